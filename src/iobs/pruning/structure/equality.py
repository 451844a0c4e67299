"""The check of a removal: a narrower network gives what the wide one gives whose columns of removed units are zero.

`verification` makes the same comparison for the modules around single sites, before a run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.errors import AuditError, ModelError, first_line, is_out_of_memory
from iobs.pruning.network.layers import joined
from iobs.pruning.network.modes import evaluating, keeping_buffers, seeded
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import logits
from iobs.pruning.structure.config_widths import is_configured
from iobs.pruning.structure.removal import remove, zero_columns
from iobs.pruning.structure.units import Site

_COPY_LIMIT = 2**30  # bytes of a model that is copied, to compare or time it beside another
_PIECE = 2**22  # outputs that are compared at once, in float64
LARGEST_GAP = 0.05  # difference of outputs, relative to the largest output, that rounding may explain


def can_copy(model: nn.Module) -> bool:
    """True if a model is small enough for a second copy in memory."""
    return sum(value.nbytes for value in model.parameters()) <= _COPY_LIMIT


def relative_gap(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest expected value, NaN included; infinite for other shapes.

    Outputs after the first with another size along one dimension, such as the attention maps of all heads, show the
    units themselves and are not compared. Equal infinities, such as the logits of tokens that are not allowed, are no
    difference.
    """
    if len(expected) != len(outputs) or any(
        a.ndim != b.ndim or sum(i != j for i, j in zip(a.shape, b.shape, strict=True)) > (index > 0)
        for index, (a, b) in enumerate(zip(expected, outputs, strict=True))
    ):
        return float("inf")
    gaps, sizes = [], []
    for a, b in ((a, b) for a, b in zip(expected, outputs, strict=True) if a.shape == b.shape):
        for old, new in zip(*(torch.split(values.flatten(), _PIECE) for values in (a, b)), strict=True):
            before, after = old.double(), new.double()
            gaps.append((before - after).abs().masked_fill(before == after, 0))
            sizes.append(before.abs().masked_fill(before.isinf(), 0))
    return _largest(gaps) / max(_largest(sizes), 1e-30)


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest entry; NaN if one is."""
    values = [float(values.max()) for values in tensors if values.numel()]
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def rounding(model: nn.Module) -> float:
    """The difference of outputs, relative to the largest, that the shortest floats of a model explain."""
    return min(LARGEST_GAP, 50 * float(_precision(model) ** 0.75))


def _precision(model: nn.Module) -> float:
    """The machine epsilon of the shortest floats of a model."""
    kinds = {value.dtype for value in model.parameters() if value.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


@torch.no_grad()
def outputs_of(model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> Tensor:
    """The outputs of a model on a batch, in eval mode; computed in `dtype` by a copy if the model's own is shorter."""
    batch = batches.to_device(batch, next(model.parameters()).device)
    if dtype is not None and _precision(model) > torch.finfo(dtype).eps:
        model = copy.deepcopy(model).to(dtype)
        batch = batches.mapped(batch, lambda value: value.to(dtype) if value.is_floating_point() else value)
    with evaluating(model), keeping_buffers(model), seeded(model, 0):  # models that draw numbers draw the same ones
        return logits(batches.forward(model, batch))


@dataclass(frozen=True)
class Expected:
    """Outputs of a model with zeros, which the narrower model has to give.

    Attributes:
        batch: samples that the model was called on.
        outputs: of the model.
        dtype: float32 if they were computed in it. None: in the model's own, as those of models that are too large
            for a copy.
    """

    batch: Batch
    outputs: Tensor
    dtype: torch.dtype | None

    @classmethod
    def of(cls, model: nn.Module, batch: Batch) -> Expected:
        """The outputs of a model with zeros on the first samples of a batch: `batches.pieces` says how many."""
        batch = next(batches.pieces(batch))
        if not can_copy(model):
            return cls(batch, outputs_of(model, batch), None)
        try:
            return cls(batch, outputs_of(model, batch, torch.float32), torch.float32)
        except batches.REFUSALS as error:  # its code has the dtype of its weights
            if is_out_of_memory(error):
                raise
            return cls(batch, outputs_of(model, batch), None)

    def require(self, model: nn.Module, wide: nn.Module | None = None) -> None:
        """Raise unless a narrower model gives these outputs.

        Args:
            model: the narrower model.
            wide: the model with zeros. With it, a small difference is measured again in float64, since deep networks
                may amplify the rounding of float32.

        Raises:
            AuditError: it does not.
        """
        gap = relative_gap([self.outputs], [outputs_of(model, self.batch, self.dtype)])
        # Only added biases are rounded to the model's own precision, or all products are.
        rounded = rounding(model) if self.dtype is None else _precision(model)
        limit = max(50 * torch.finfo(torch.float32).eps ** 0.75, min(LARGEST_GAP, rounded))
        if wide is not None and limit < gap < LARGEST_GAP:
            try:
                gap = relative_gap(*([outputs_of(each, self.batch, torch.float64)] for each in (wide, model)))
            except batches.REFUSALS as error:  # the code or the device does not take float64
                if is_out_of_memory(error):
                    raise
        if not gap <= limit:
            raise AuditError(
                f"The narrower model gives other outputs than the model with zeros (difference {gap:.1e})."
            )


def require_narrower(model: nn.Module, sites: Sequence[Site], data: Sequence[Batch]) -> None:
    """Raise unless a model without every second unit takes several batches, and gives what zeros give.

    Nothing is checked of a model that is too large for a copy.

    Raises:
        ModelError: it does not.
    """
    if not can_copy(model):
        return
    wide, narrow = copy.deepcopy(model), copy.deepcopy(model)
    kept = {site.name: [*range(0, site.count, 2)] for site in sites}
    for site in sites:
        zero_columns(wide, site, kept[site.name])
    try:
        remove(narrow, sites, kept)
        for batch in data:
            Expected.of(wide, batch).require(narrow, wide)
    except (AuditError, *batches.REFUSALS) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"Units cannot be removed: {type(model).__name__} calls other layers for other batches, and the narrower "
            f"network fails there ({first_line(error)}). Name the layers that may lose units in include=, or prune "
            "entries instead: Unstructured or NM."
        ) from error


def require_rebuilt(model: nn.Module, batch: Batch, note: Callable[[str], None]) -> None:
    """Raise unless the model's class, built from its configuration, gives the same outputs with the model's weights.

    Args:
        model: as it is after the removal of blocks or experts.
        batch: samples.
        note: called with a note where a large model cannot be checked.

    Raises:
        ModelError: it does not.
    """
    if not is_configured(model):
        return
    kind, large, loads = type(model).__name__, not can_copy(model), False
    own = dict(model.named_buffers())
    try:
        with torch.device("meta") if large else nullcontext():
            again = type(model)(copy.deepcopy(model.config)).eval()
        loads = True
        again.load_state_dict(model.state_dict(), assign=True)  # it borrows the tensors
        loads = False
        # Tensors that are no part of the state are computed anew; a large model lends them too, in its own dtype.
        for path, module in again.named_modules():
            for name in module._non_persistent_buffers_set:
                lent, built = own.get(joined(path, name)), module._buffers.get(name)
                if lent is not None and built is not None:
                    module._buffers[name] = lent if large else built.to(lent)
        outputs = outputs_of(again, batch)
    except Exception as error:  # every class has its own
        if is_out_of_memory(error):
            raise
        if large and not loads:  # its code needs values of other tensors
            note(f"Not checked that {kind} can be built from its new configuration: {first_line(error)}")
            return
        raise ModelError(f"{kind} cannot be built from its new configuration: {first_line(error)}.") from None
    if not torch.allclose(outputs, outputs_of(model, batch), atol=1e-3, rtol=1e-2):
        raise ModelError(
            f"{kind} gives other outputs when it is built from its new configuration: its layers "
            "depend on their place in a way that the configuration does not say."
        )
