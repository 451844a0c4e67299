"""Augmentation of calibration samples, so that fine-tuning on few samples does not overfit.

Mirroring and shifting keep the label of an image. Mixing two samples does not, but the dense model gives outputs for
mixtures too. If these outputs are the targets, mixing turns n samples into about n^2 / 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.pruning.recipe import Augmentation
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples, rebatched

_MIRROR_AGREEMENT = 0.9  # share of predictions that mirroring must leave; it is a symmetry of the samples or is not
_SHIFT_AGREEMENT = 0.75  # share of predictions that mirroring and shifting must leave; larger shifts leave fewer
_PROBE = 256  # samples on which the agreement is measured
_COPIES = 4  # versions of a held-out sample, including the original; and the same number of mixtures
_COPY_BATCH = 64  # samples in a batch of copies


@dataclass(frozen=True)
class FlipShift:
    """Mirror images left to right with probability 1/2, and shift them by up to `shift` pixels.

    Args:
        flip: mirror.
        shift: largest shift in pixels, in each direction; the border is repeated.
    """

    flip: bool
    shift: int

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Change every image of a batch by a draw of its own."""
        return _with_values(batch, self._change(_values(batch), generator))

    def _change(self, images: Tensor, generator: torch.Generator) -> Tensor:
        count, (height, width) = len(images), images.shape[-2:]
        mirrored = torch.rand(count, generator=generator) < 0.5 if self.flip else torch.zeros(count, dtype=torch.bool)
        down, right = torch.randint(-self.shift, self.shift + 1, (2, count, 1), generator=generator)
        rows = (torch.arange(height) + down).clamp(0, height - 1)
        columns = (torch.arange(width) + right).clamp(0, width - 1)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        rows, columns = rows.to(images.device), columns.to(images.device)
        sample = torch.arange(count, device=images.device)[:, None, None]
        # Advanced indices must be adjacent, so the channels are moved behind rows and columns.
        moved = images.movedim((-2, -1), (1, 2))[sample, rows[:, :, None], columns[:, None, :]]
        return torch.empty_like(images).copy_(moved.movedim((1, 2), (-2, -1)))  # models may read them as a view

    def __str__(self) -> str:
        parts = [*(["mirroring"] if self.flip else []), *([f"shifts up to {self.shift}"] if self.shift else [])]
        return " and ".join(parts)


@dataclass(frozen=True)
class Pairs:
    """Mix pairs of samples of a batch; labels of the batch are unchanged.

    With probability 1/2 a sample is blended with another (mixup, Zhang et al., 2018). Otherwise a square of the other
    sample is pasted into it (CutMix, Yun et al., 2019). Samples without height and width are always blended.

    Args:
        before: augmentation of every sample before mixing, or None.
    """

    before: FlipShift | None = None

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Change every sample of a batch by a draw of its own."""
        changed = batch if self.before is None else self.before(batch, generator)
        values = _values(changed)
        other = values[torch.randperm(len(values), generator=generator).to(values.device)]
        mixed = _blended(values, other, generator)
        if _is_image(changed):
            coin = torch.rand(len(values), generator=generator) < 0.5
            mixed = torch.where(_by_sample(coin, values), _pasted(values, other, generator), mixed)
        return _with_values(changed, mixed)

    def __str__(self) -> str:
        return f"{'' if self.before is None else f'{self.before}, '}pairs of samples mixed"


def _blended(values: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    """Blends of two tensors of samples, by a uniform share for each sample."""
    share = _by_sample(torch.rand(len(values), generator=generator), values)
    return torch.lerp(values, other, share.to(values.dtype))


def _pasted(images: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    """Images with a square of the other image, whose share of the area is uniform in [0, 1]."""
    count, (height, width) = len(images), images.shape[-2:]
    side = torch.rand(count, generator=generator).sqrt()

    def inside(length: int) -> Tensor:
        """Mask of the rows or columns inside the square of each sample, (samples, length) bool."""
        size = (side * length).floor()
        first = (torch.rand(count, generator=generator) * (length + 1 - size)).floor()
        place = torch.arange(length) - first[:, None]
        return (place >= 0) & (place < size[:, None])

    square = (inside(height)[:, :, None] & inside(width)[:, None, :]).to(images.device)
    return torch.where(square if images.ndim == 3 else square[:, None], other, images)


def _by_sample(numbers: Tensor, values: Tensor) -> Tensor:
    """One number per sample, (samples, 1, ...), to broadcast over the values of the sample."""
    return numbers.to(values.device).reshape(-1, *[1] * (values.ndim - 1))


def suited(model: nn.Module, part: Samples, seed: int, mix: bool) -> FlipShift | Pairs | None:
    """The strongest augmentation that suits a model and its samples; None for tokens.

    Args:
        model: the dense model, in eval mode.
        part: calibration samples.
        seed: of the random changes.
        mix: allow mixing, for losses whose targets are outputs of the dense model.
    """
    kept = label_preserving(model, part, seed)
    mixes = mix and all(_can_mix(batch) for batch in part.batches)
    return Pairs(kept) if mixes else kept


def copies(change: Augmentation, part: Samples, seed: int) -> Samples:
    """The samples and augmented copies of them, so that few held-out samples compare models as well as many.

    With an augmentation that mixes samples, half of the result is mixed: mixtures alone would favour models that were
    trained on mixtures.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = rebatched(part, _COPY_BATCH)
    gentle = change.before if isinstance(change, Pairs) else change
    changes: list[Augmentation] = [] if gentle is None else [gentle] * (_COPIES - 1)
    if isinstance(change, Pairs):
        changes += [change] * (1 if gentle is None else _COPIES)
    augmented = [change(batch, generator) for change in changes for batch in plain.batches]
    return Samples.of([*plain.batches, *augmented])


@torch.no_grad()
def label_preserving(model: nn.Module, part: Samples, seed: int) -> FlipShift | None:
    """The strongest augmentation that leaves most predictions of a model unchanged.

    Mirroring is tested alone and must leave 90 % of the predictions. Then shifts by an eighth of the side, by a
    sixteenth and by one pixel are tested. The largest shift that leaves 75 % of the predictions is taken. Text and
    features give None.

    Args:
        model: the dense model, in eval mode.
        part: calibration samples.
        seed: of the random changes.
    """
    used = part.first(_PROBE).batches
    if not used or not all(_is_image(batch) for batch in used):
        return None
    plain = _predictions(model, used, None, seed)
    if plain is None:
        return None

    def kept(change: FlipShift) -> float:
        changed = _predictions(model, used, change, seed)
        assert plain is not None
        assert changed is not None
        return float((plain == changed).float().mean())

    flip = kept(FlipShift(True, 0)) >= _MIRROR_AGREEMENT
    side = min(_values(used[0]).shape[-2:])
    sizes = sorted({side // 8, side // 16, 1}, reverse=True)
    shift = next((size for size in sizes if size and kept(FlipShift(flip, size)) >= _SHIFT_AGREEMENT), 0)
    return FlipShift(flip, shift) if flip or shift else None


def _predictions(model: nn.Module, used: list[Batch], change: FlipShift | None, seed: int) -> Tensor | None:
    """The most likely class of every sample, (samples,) int64; None if the model is not an image classifier."""
    generator = torch.Generator().manual_seed(seed)
    classes = []
    for batch in used:
        batch = batch if change is None else change(batch, generator)
        scores = outputs.logits(batches.forward(model, batch))
        if scores.ndim != 2 or scores.shape[1] < 2:
            return None
        classes.append(scores.argmax(1))
    return torch.cat(classes)


def _values(batch: Batch) -> Tensor:
    """The input tensor of a batch that can be augmented."""
    value = _input(batch)
    assert isinstance(value, Tensor)
    return value


def _input(batch: Batch) -> object:
    """The input of a batch: its pixel values, or its only input; None for other mappings."""
    return batch.get("pixel_values") if isinstance(batch, Mapping) else batches.inputs(batch)


def _with_values(batch: Batch, values: Tensor) -> Batch:
    """The batch with another input tensor."""
    if isinstance(batch, Mapping):
        return {**batch, "pixel_values": values}
    return (values, *batch[1:]) if isinstance(batch, (tuple, list)) else values


def _can_mix(batch: Batch) -> bool:
    """True if the input of a batch is one tensor of real numbers."""
    value = _input(batch)
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_image(batch: Batch) -> bool:
    """True for images: (samples, height, width), or (samples, 1 to 4 channels, height, width), of 8 pixels or more."""
    value = _input(batch)
    if not isinstance(value, Tensor) or not value.is_floating_point() or min(value.shape[-2:], default=0) < 8:
        return False
    return value.ndim == 3 or (value.ndim == 4 and value.shape[1] <= 4)
