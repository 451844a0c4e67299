"""Masters: float32 copies of parameters that gradient steps change, with the masks and grids that the steps keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.pruning.store import Store

Rounding = Callable[[str, Tensor, torch.dtype], Tensor]


@dataclass
class Masters:
    """Copies of parameters in float32 or wider, which gradient steps change.

    Args:
        store: holds the model; takes the result.
        values: copies, by parameter name.
        masks: True where an entry may change, by parameter name; without a mask every entry may change.
        rounding: (name, master, dtype) -> value that is written into the model. Gradients are those at these values.
            None: the masters themselves.
        zero_outside: entries outside the masks are zeros, and are written again after every step: momentum of steps
            with other masks may have moved them.
        resident: the parameters stay in memory, and are written after every step. False: their block visits memory,
            and `copy_to_model` writes them when it comes.
    """

    store: Store
    values: dict[str, Tensor]
    masks: dict[str, Tensor]
    rounding: Rounding | None = None
    zero_outside: bool = False
    resident: bool = True

    @classmethod
    def of(
        cls,
        store: Store,
        names: Iterable[str],
        masks: dict[str, Tensor],
        rounding: Rounding | None = None,
        *,
        zero_outside: bool = False,
        shared: bool = False,
    ) -> Masters:
        """The masters of the model's current parameters.

        Args:
            store, masks, rounding, zero_outside: as in the class.
            names: of the parameters.
            shared: parameters in float32 or wider, of a model without grids, are masters themselves and not copied.
        """
        copied = rounding is not None or not shared
        parameters = {name: store.model.get_parameter(name).detach() for name in names}
        values = {
            name: value.to(torch.promote_types(value.dtype, torch.float32), copy=copied)
            for name, value in parameters.items()
        }
        return cls(store, values, masks, rounding, zero_outside)

    def held(self, hold: Callable[[Tensor], Tensor]) -> Masters:
        """The same masters and masks, each stored by `hold`, of a block that visits memory."""
        values, masks = ({name: hold(value) for name, value in part.items()} for part in (self.values, self.masks))
        return Masters(self.store, values, masks, self.rounding, self.zero_outside, resident=False)

    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters in the order of the masters; they require gradients from now on."""
        parameters = [self.store.model.get_parameter(name) for name in self.values]
        for parameter in parameters:
            parameter.requires_grad_(True)
        return parameters

    def snapshot(self, hold: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Copies of masters that no step has changed, each stored by `hold`; in memory in the dtype of the model."""
        if not self.resident:  # the parameters may have another dtype while their block is away
            return {name: hold(value.clone()) for name, value in self.values.items()}
        pairs = zip(self.values.items(), self.parameters(), strict=True)
        return {name: hold(value.to(parameter.dtype, copy=True)) for (name, value), parameter in pairs}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Write a snapshot into the masters and, unless the block visits memory, into the model."""
        self.replace(snapshot)
        if self.resident:
            for name, parameter in zip(self.values, self.parameters(), strict=True):
                parameter.detach().copy_(snapshot[name])

    @torch.no_grad()
    def replace(self, values: Mapping[str, Tensor]) -> None:
        """Take the values of masters from elsewhere; the model stays as it is."""
        for name, value in values.items():
            self.values[name].copy_(value)

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Take the model's current weights, as after a projection."""
        self.replace({name: self.store.model.get_parameter(name).detach() for name in self.values})

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Write the masters into the model, in its dtype and on its grids; steps leave entries outside the masks."""
        for name, parameter in zip(self.values, self.parameters(), strict=True):
            parameter.detach().copy_(self._rounded(name, parameter.dtype))

    @torch.no_grad()
    def keep(self) -> None:
        """Give the result to the store, which may round it to the dtype of a file."""
        for name in self.values:
            self.store.write_tensor(name, self._rounded(name, self.store.model.get_parameter(name).dtype))

    def masked(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient of a master without the entries that stay."""
        return gradient * self.masks[name].to(gradient.device) if name in self.masks else gradient

    @torch.no_grad()
    def finish_step(self) -> None:
        """Write masters that an optimizer has changed into the model."""
        if self.zero_outside:
            for name, mask in self.masks.items():
                if name in self.values:
                    self.values[name] *= mask
        if self.resident:
            self.copy_to_model()

    def _rounded(self, name: str, dtype: torch.dtype) -> Tensor:
        """The value of a master in the model, on the grids of its layers."""
        value = self.values[name]
        return value if self.rounding is None else self.rounding(name, value, dtype)
