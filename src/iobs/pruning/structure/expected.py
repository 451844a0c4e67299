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
_LARGEST_GAP = 0.05  # difference of outputs in short floats, relative to the largest output


def can_copy(model: nn.Module) -> bool:
    """Check that a model is small enough for a second copy in memory."""
    return sum(value.nbytes for value in model.parameters()) <= _COPY_LIMIT


@torch.no_grad()
def outputs_of(model: nn.Module, batch: Batch, single: bool = False) -> Tensor:
    """The outputs of a model on a batch, in eval mode; with `single` computed in float32, by a copy if necessary."""
    batch = batches.to_device(batch, next(model.parameters()).device)
    if single and _precision(model) > torch.finfo(torch.float32).eps:
        model = copy.deepcopy(model).float()
        batch = batches.mapped(batch, lambda value: value.float() if value.is_floating_point() else value)
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
            Expected.of(wide, batch).require(narrow)
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
        single: they were computed in float32; models that are too large for a copy compute in their own dtype.
    """

    batch: Batch
    outputs: Tensor
    single: bool

    @classmethod
    def of(cls, model: nn.Module, batch: Batch) -> Expected:
        """The outputs of a model with zeros on the first samples of a batch: `batches.pieces` says how many."""
        batch = next(batches.pieces(batch))
        if not can_copy(model):
            return cls(batch, outputs_of(model, batch), False)
        try:
            return cls(batch, outputs_of(model, batch, single=True), True)
        except batches.REFUSALS as error:  # its code has the dtype of its weights
            if is_out_of_memory(error):
                raise
            return cls(batch, outputs_of(model, batch), False)

    def require(self, model: nn.Module) -> None:
        """Check that a narrower model gives these outputs.

        Raises:
            AuditError: it does not.
        """
        gap = _gap(self.outputs, outputs_of(model, self.batch, self.single))
        # Only added biases are rounded to the model's own precision, or all products are.
        rounded = _precision(model) if self.single else rounding(model)
        if not gap <= max(50 * torch.finfo(torch.float32).eps ** 0.75, min(_LARGEST_GAP, rounded)):
            raise AuditError(
                f"The narrower model gives other outputs than the model with zeros (difference {gap:.1e})."
            )


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
    return min(_LARGEST_GAP, 50 * float(_precision(model) ** 0.75))


def _precision(model: nn.Module) -> float:
    """The machine epsilon of the shortest floats of a model."""
    kinds = {value.dtype for value in model.parameters() if value.is_floating_point()}
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)
