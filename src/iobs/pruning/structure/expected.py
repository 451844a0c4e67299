"""Check of a whole network after a removal: it gives what the network with zeros gave."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.errors import AuditError, ModelError, first_line, is_out_of_memory
from iobs.pruning.network.modes import evaluating, keeping_buffers, seeded
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import logits
from iobs.pruning.structure.removal import remove, zero_columns
from iobs.pruning.structure.units import Site

_COPY_LIMIT = 2**30  # bytes of a model that is copied, to compare or time it beside another
_PIECE = 2**22  # outputs that are compared at once, in float64
LARGEST_GAP = 0.05  # difference of outputs, relative to the largest output, that rounding may explain


def can_copy(model: nn.Module) -> bool:
    """Check that a model is small enough for a second copy in memory."""
    return sum(value.nbytes for value in model.parameters()) <= _COPY_LIMIT


@torch.no_grad()
def outputs_of(model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> Tensor:
    """The outputs of a model on a batch, in eval mode; computed in `dtype` by a copy if the model's own is shorter."""
    batch = batches.to_device(batch, next(model.parameters()).device)
    if dtype is not None and _precision(model) > torch.finfo(dtype).eps:
        model = copy.deepcopy(model).to(dtype)
        batch = batches.mapped(batch, lambda value: value.to(dtype) if value.is_floating_point() else value)
    with evaluating(model), keeping_buffers(model), seeded(model, 0):  # models that draw numbers draw the same ones
        return logits(batches.forward(model, batch))


def require_narrower(model: nn.Module, sites: Sequence[Site], given: Sequence[Batch]) -> None:
    """Check before any work that a model without every second unit takes several batches, and gives what zeros give.

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
        for batch in given:
            Expected.of(wide, batch).require(narrow, wide)
    except (AuditError, *batches.REFUSALS) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"Units cannot be removed: {type(model).__name__} calls other layers for other batches, and the narrower "
            f"network fails there ({first_line(error)}). Name the layers that may lose units in include=, or prune "
            "entries instead: Unstructured or NM."
        ) from error


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
        """Check that a narrower model gives these outputs.

        Args:
            model: the narrower model.
            wide: the model with zeros. With it, a small difference is measured again in float64, since deep networks
                may amplify the rounding of float32.

        Raises:
            AuditError: it does not.
        """
        gap = _gap(self.outputs, outputs_of(model, self.batch, self.dtype))
        # Only added biases are rounded to the model's own precision, or all products are.
        rounded = rounding(model) if self.dtype is None else _precision(model)
        limit = max(50 * torch.finfo(torch.float32).eps ** 0.75, min(LARGEST_GAP, rounded))
        if wide is not None and limit < gap < LARGEST_GAP:
            gap = self._gap_in_float64(model, wide, gap)
        if not gap <= limit:
            raise AuditError(
                f"The narrower model gives other outputs than the model with zeros (difference {gap:.1e})."
            )

    def _gap_in_float64(self, model: nn.Module, wide: nn.Module, otherwise: float) -> float:
        """The difference of two models in float64; `otherwise` if their code or their device does not take it."""
        try:
            return _gap(*(outputs_of(one, self.batch, torch.float64) for one in (wide, model)))
        except batches.REFUSALS as error:
            if is_out_of_memory(error):
                raise
            return otherwise


def _gap(before: Tensor, after: Tensor) -> float:
    """Largest difference of two outputs, relative to the largest output before; infinite for other shapes."""
    if before.shape != after.shape:
        return float("inf")
    pairs = zip(*(torch.split(values.flatten(), _PIECE) for values in (before, after)), strict=True)
    found = [largest_gap(old.double(), new.double()) for old, new in pairs]
    return largest(gap for gap, _ in found) / max(largest(size for _, size in found), 1e-30)


def largest_gap(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Largest difference of two tensors of one shape, NaN included, and the largest finite size of the first.

    Equal infinities, such as the logits of tokens that are not allowed, are no difference.
    """
    if not before.numel():
        return 0.0, 0.0
    gaps = (before - after).abs().masked_fill(before == after, 0)
    return float(gaps.max()), float(before.abs().masked_fill(before.isinf(), 0).max())


def largest(values: Iterable[float]) -> float:
    """The largest value; NaN if one is."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def rounding(model: nn.Module) -> float:
    """The difference of outputs, relative to the largest, that the shortest floats of a model explain."""
    return min(LARGEST_GAP, 50 * float(_precision(model) ** 0.75))


def _precision(model: nn.Module) -> float:
    """The machine epsilon of the shortest floats of a model."""
    kinds = {value.dtype for value in model.parameters() if value.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)
