"""The parameters that a fit changes: float32 masters, masks, and the way back into the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.layerwise.grids import GridRounding, free_zeros, rounding_of
from iobs.pruning.network.layers import Layer
from iobs.pruning.store import Store


def fitted_names(
    model: nn.Module, layers: Iterable[Layer], blocks: Sequence[Block], frozen: Iterable[str]
) -> tuple[list[str], dict[str, Tensor]]:
    """The parameters that are fitted in some blocks, by name, and the masks of pruned weights.

    These are the parameters of pruned layers, and vectors such as biases and norm scales. Matrices that stay dense keep
    their bits, also beside pruned ones in one parameter, and so do parameters that the user froze.

    Args:
        model: the model.
        layers: pruned layers.
        blocks: the blocks; a parameter outside them is left out.
        frozen: names of parameters that the user froze.
    """
    pruned: dict[str, list[Layer]] = {}
    for layer in layers:
        pruned.setdefault(layer.key, []).append(layer)
    left = set(frozen) - pruned.keys()
    names: list[str] = []
    masks: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        if not any(block.holds(name) for block in blocks) or name in left or not value.is_floating_point():
            continue
        if name in pruned:
            masks[name] = _fitted_entries(value.detach(), pruned[name])
        if name in pruned or value.ndim == 1:
            names.append(name)
    return names, masks


def _fitted_entries(value: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The entries of a parameter that are not zero and belong to layers, as a mask."""
    kept = value != 0
    if sum(layer.weights for layer in layers) == value.numel():
        return kept
    own = torch.zeros_like(kept, memory_format=torch.contiguous_format)
    for layer in layers:
        layer.write_into(own, torch.ones(layer.shape, dtype=torch.bool))
    return kept & own


@dataclass
class Masters:
    """Copies of fitted parameters in float32 or wider, which gradient steps change.

    Args:
        store: holds the model; takes the result.
        values: copies, by parameter name.
        masks: True where an entry may change, by parameter name; without a mask every entry may change.
        rounding: puts layers onto their grids when masters are written into the model; None without grids.
    """

    store: Store
    values: dict[str, Tensor]
    masks: dict[str, Tensor]
    rounding: GridRounding | None = None

    @classmethod
    def of(
        cls,
        store: Store,
        names: Iterable[str],
        masks: dict[str, Tensor],
        rounding: GridRounding | None = None,
        shared: bool = False,
    ) -> Masters:
        """The masters of the model's current parameters.

        Args:
            store: holds the model.
            names: of the parameters.
            masks: of pruned weights, by name.
            rounding: puts layers onto their grids.
            shared: parameters in float32 or wider, of a model without grids, are masters themselves and not copied.
        """
        parameters = dict(store.model.named_parameters())
        copied = rounding is not None or not shared
        values = {
            name: parameters[name].detach().to(torch.promote_types(parameters[name].dtype, torch.float32), copy=copied)
            for name in names
        }
        return cls(store, values, masks, rounding)

    def held(self, hold: Callable[[Tensor], Tensor]) -> Masters:
        """The same masters and masks, each stored by `hold`."""
        values, masks = ({name: hold(one) for name, one in part.items()} for part in (self.values, self.masks))
        return Masters(self.store, values, masks, self.rounding)

    def differentiable(self) -> list[nn.Parameter]:
        """Let the model's parameters require gradients, and return them in the order of the masters."""
        found = dict(self.store.model.named_parameters())
        for name in self.values:
            found[name].requires_grad_(True)
        return [found[name] for name in self.values]

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Write the masters into the model, in its dtype and on its grids; steps leave entries outside the masks."""
        for name, parameter in zip(self.values, self.differentiable(), strict=True):
            parameter.detach().copy_(self._rounded(name, parameter.dtype))

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the masters, by name."""
        return {name: value.clone() for name, value in self.values.items()}

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Write a snapshot into the masters and into the model."""
        self.replace(values)
        self.copy_to_model()

    @torch.no_grad()
    def replace(self, values: Mapping[str, Tensor]) -> None:
        """Write a snapshot into the masters alone."""
        for name, value in values.items():
            self.values[name].copy_(value)

    @torch.no_grad()
    def keep(self) -> None:
        """Give the result to the store, which may round it to the dtype of a file."""
        for name in self.values:
            self.store.write_tensor(name, self._rounded(name, self.store.model.get_parameter(name).dtype))

    def _rounded(self, name: str, dtype: torch.dtype) -> Tensor:
        """The value of a master in the model, on the grids of its layers."""
        value = self.values[name]
        return value if self.rounding is None else self.rounding(name, value, dtype)


@dataclass(frozen=True)
class FittedParameters:
    """The parameters that fits along a chain of blocks change.

    Args:
        store: holds the model.
        layers: pruned layers.
        patterns: of the pruned layers, after their last projection.
        sweep: has the blocks, and knows the layers that received no input so far. These are not pruned yet.
        frozen: names of parameters that the user froze.
    """

    store: Store
    layers: Collection[Layer]
    patterns: Mapping[Layer, Pattern]
    sweep: Sweep
    frozen: Collection[str]

    def of(self, stages: range, outside: bool = False, final: bool = True, shared: bool = False) -> Masters:
        """The masters of some blocks; with final patterns values stay on their grids.

        Args:
            stages: of the blocks.
            outside: also the vectors outside all blocks.
            final: the layers have their final patterns.
            shared: float32 parameters are their own masters.
        """
        model, blocks = self.store.model, [self.sweep.chain[stage] for stage in stages]
        layers = [layer for layer in self.layers if layer not in self.sweep.without_input]
        names, masks = fitted_names(model, layers, blocks, self.frozen)
        rounding = None
        if final:
            own = {layer: self.patterns[layer] for layer in layers if layer.key in masks}
            free_zeros(masks, own)
            rounding = rounding_of(model, own)
        names += self._vectors_outside() if outside else []
        return Masters.of(self.store, names, masks, rounding, shared)

    def outside(self) -> Masters:
        """The masters of the vectors outside all blocks."""
        return Masters.of(self.store, self._vectors_outside(), {})

    def _vectors_outside(self) -> list[str]:
        """The names of the vectors outside the blocks, such as the scale of the last norm."""
        everywhere = tuple(f"{block.path}." for block in self.sweep.chain)
        return [
            name
            for name, value in self.store.model.named_parameters()
            if value.ndim == 1 and value.is_floating_point() and not name.startswith(everywhere)
            if name not in self.frozen
        ]
