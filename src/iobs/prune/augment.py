"""Changes to samples that keep a thousand of them from being learnt by heart.

Mirroring and moving keep a picture's label. Mixing two samples does not, but where the dense network is the teacher it
answers for the mixture as for anything else: so few samples become as many as there are pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.prune import batches
from iobs.prune.batches import Batch
from iobs.prune.parts import Part, rebatched

_MIRRORED = 0.9  # share of samples whose dense prediction must survive mirroring: a symmetry of the samples, or none
_MOVED = 0.75  # the same of moving as well, which does the more harm the farther it goes
_PROBE = 256  # samples that the agreement is measured on
_COPIES = 4  # of a held-out sample, itself among them; and as many mixed ones
_COPIED = 64  # samples in one batch of them

Augmentation = Callable[[Batch, torch.Generator], Batch]


@dataclass(frozen=True)
class FlipShift:
    """Mirrors pictures left to right with probability 1/2, and moves them by up to `shift` pixels.

    Args:
        flip: whether to mirror.
        shift: most pixels in either direction; the border is repeated.
    """

    flip: bool
    shift: int

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Change the pictures of a batch, every sample in its own way."""
        return _with_values(batch, self._change(_values(batch), generator))

    def _change(self, pictures: Tensor, generator: torch.Generator) -> Tensor:
        count, (height, width) = len(pictures), pictures.shape[-2:]
        mirrored = torch.rand(count, generator=generator) < 0.5 if self.flip else torch.zeros(count, dtype=torch.bool)
        down, right = torch.randint(-self.shift, self.shift + 1, (2, count, 1), generator=generator)
        rows = (torch.arange(height) + down).clamp(0, height - 1)
        columns = (torch.arange(width) + right).clamp(0, width - 1)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        rows, columns = rows.to(pictures.device), columns.to(pictures.device)
        sample = torch.arange(count, device=pictures.device)[:, None, None]
        # Channels between sample and place: advanced indices apart put them last, so they are moved first.
        moved = pictures.movedim((-2, -1), (1, 2))[sample, rows[:, :, None], columns[:, None, :]]
        return moved.movedim((1, 2), (-2, -1))

    def __str__(self) -> str:
        parts = [*(["mirroring"] if self.flip else []), *([f"shifts up to {self.shift}"] if self.shift else [])]
        return " and ".join(parts)


@dataclass(frozen=True)
class Pairs:
    """Mixes the samples of a batch two by two; targets, where a batch has some, are left as they are.

    A sample becomes a blend with another (mixup, Zhang et al., 2018) or has a square of another pasted into it (CutMix,
    Yun et al., 2019), with probability 1/2 each; samples without height and width are blended.

    Args:
        before: what happens to every sample first.
    """

    before: FlipShift | None = None

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Change the samples of a batch, every one in its own way."""
        given = batch if self.before is None else self.before(batch, generator)
        values = _values(given)
        other = values[torch.randperm(len(values), generator=generator).to(values.device)]
        mixed = _blended(values, other, generator)
        if _is_picture(given):
            coin = torch.rand(len(values), generator=generator) < 0.5
            mixed = torch.where(_by_sample(coin, values), _pasted(values, other, generator), mixed)
        return _with_values(given, mixed)

    def __str__(self) -> str:
        return f"{'' if self.before is None else f'{self.before}, '}pairs of samples mixed"


def _blended(values: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    share = _by_sample(torch.rand(len(values), generator=generator), values)
    return torch.lerp(values, other, share.to(values.dtype))


def _pasted(pictures: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    """Squares of the other picture whose share of the whole is uniform between none and all of it."""
    count, (height, width) = len(pictures), pictures.shape[-2:]
    side = torch.rand(count, generator=generator).sqrt()

    def inside(length: int) -> Tensor:
        """Which of so many rows or columns lie in a sample's square, (samples, length)."""
        size = (side * length).floor()
        first = (torch.rand(count, generator=generator) * (length + 1 - size)).floor()
        place = torch.arange(length) - first[:, None]
        return (place >= 0) & (place < size[:, None])

    square = (inside(height)[:, :, None] & inside(width)[:, None, :]).to(pictures.device)
    return torch.where(square if pictures.ndim == 3 else square[:, None], other, pictures)


def _by_sample(numbers: Tensor, values: Tensor) -> Tensor:
    """One number a sample, shaped to be combined with all of its values."""
    return numbers.to(values.device).reshape(-1, *[1] * (values.ndim - 1))


def suited(model: nn.Module, part: Part, seed: int, mix: bool) -> FlipShift | Pairs | None:
    """The strongest augmentation that suits a network and its samples; None for tokens.

    Args:
        model: the dense network, in eval mode.
        part: calibration samples.
        seed: of the trial.
        mix: whether samples may be mixed, which asks for a loss that goes by the dense network's answers.
    """
    kept = label_preserving(model, part, seed)
    mixes = mix and all(_can_mix(batch) for batch in part.batches)
    return Pairs(kept) if mixes else kept


def copies(change: Augmentation, part: Part, seed: int) -> Part:
    """A part's samples as they are and changed in several ways, so that few of them judge a network as many would.

    Of an augmentation that mixes samples, as many copies are mixed as are not: mixtures alone would favour networks
    that were trained on mixtures.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = rebatched(part, _COPIED)
    gentle = change.before if isinstance(change, Pairs) else change
    changes: list[Augmentation] = [] if gentle is None else [gentle] * (_COPIES - 1)
    if isinstance(change, Pairs):
        changes += [change] * (1 if gentle is None else _COPIES)
    found = [*plain.batches, *(one(batch, generator) for one in changes for batch in plain.batches)]
    return Part.of(found)


@torch.no_grad()
def label_preserving(model: nn.Module, part: Part, seed: int) -> FlipShift | None:
    """The strongest augmentation that leaves most of a network's predictions as they are.

    Mirroring is judged alone and must leave nine in ten, then shifts by an eighth and a sixteenth of the side and by
    one pixel, which must leave three in four. Text and features give None.

    Args:
        model: the dense network, in eval mode.
        part: calibration samples.
        seed: of the trial.
    """
    used = part.first(_PROBE).batches
    if not used or not all(_is_picture(batch) for batch in used):
        return None
    plain = _predictions(model, used, None, seed)
    if plain is None:
        return None

    def kept(change: FlipShift) -> float:
        changed = _predictions(model, used, change, seed)
        assert plain is not None
        assert changed is not None
        return float((plain == changed).float().mean())

    flip = kept(FlipShift(True, 0)) >= _MIRRORED
    side = min(_values(used[0]).shape[-2:])
    sizes = sorted({side // 8, side // 16, 1}, reverse=True)
    shift = next((size for size in sizes if size and kept(FlipShift(flip, size)) >= _MOVED), 0)
    return FlipShift(flip, shift) if flip or shift else None


def _predictions(model: nn.Module, used: list[Batch], change: FlipShift | None, seed: int) -> Tensor | None:
    """The likeliest class of every sample, (samples,) int64; None where the network is no classifier of pictures."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for batch in used:
        given = batch if change is None else change(batch, generator)
        scores = batches.logits(batches.forward(model, given))
        if scores.ndim != 2 or scores.shape[1] < 2:
            return None
        found.append(scores.argmax(1))
    return torch.cat(found)


def _values(batch: Batch) -> Tensor:
    value = batch["pixel_values"] if isinstance(batch, Mapping) else batches.inputs(batch)
    assert isinstance(value, Tensor)
    return value


def _with_values(batch: Batch, values: Tensor) -> Batch:
    if isinstance(batch, Mapping):
        return {**batch, "pixel_values": values}
    return (values, *batch[1:]) if isinstance(batch, (tuple, list)) else values


def _can_mix(batch: Batch) -> bool:
    """Whether a batch's inputs are one tensor of real numbers."""
    alone = "pixel_values" in batch if isinstance(batch, Mapping) else isinstance(batches.inputs(batch), Tensor)
    return alone and _values(batch).is_floating_point()


def _is_picture(batch: Batch) -> bool:
    """Whether a batch holds pictures: (samples, height, width) or (samples, 1 to 4 channels, height, width)."""
    value = batch.get("pixel_values") if isinstance(batch, Mapping) else batches.inputs(batch)
    if not isinstance(value, Tensor) or not value.is_floating_point() or min(value.shape[-2:], default=0) < 8:
        return False
    return value.ndim == 3 or (value.ndim == 4 and value.shape[1] <= 4)
