"""Augmentation of calibration samples, so that fine-tuning on few samples does not overfit.

Mirroring and shifting keep the label of an image. Mixing two samples does not, but the dense model gives outputs for
mixtures too. If these outputs are the targets, mixing turns n samples into about n^2 / 2.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError
from iobs.pruning.descent.batches import samples_of_step
from iobs.pruning.recipe import Augmentation, FineTune
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples.batches import Batch, Samples, rebatched

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


# ---- text sampled from the dense model, so that fine-tuning on few windows of text does not overfit
# The dense model gives the targets of any text, also of its own (data-free distillation: Liu et al., LLM-QAT, 2023).
_SHARE = 2  # every second window of a step is sampled text
_AUTO_COPIES = 2  # sampled windows per calibration window in block reconstruction
_AUTO_TOKENS = 2**17  # most tokens of calibration text that gets them: more text is overfitted less, and costs more
_MOST_COPIES = 8  # sampled windows per calibration window
_PREFIX = 16  # a sampled window begins with the first sixteenth of a calibration window
_TOKENS = 8192  # tokens that are sampled at once; they bound the memory of keys and values
_READ = {"input_ids", "attention_mask", "labels"}  # entries of a batch of plain text


@dataclass(frozen=True, eq=False)
class SampledText:
    """Replace half of the windows of a batch by windows sampled from the dense model; labels are unchanged.

    Args:
        windows: token ids, int64 (windows, positions).
    """

    windows: Tensor

    def __call__(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Replace half of the rows, rounded down, or one row with probability 1/2 if there is only one.

        The rows are drawn, since a step has its samples in the order of the caller's batches: the windows of the last
        batches would never be used.
        """
        assert isinstance(batch, Mapping)
        tokens = batch["input_ids"].clone()
        count = len(tokens) // _SHARE if len(tokens) > 1 else int(torch.randint(_SHARE, (), generator=generator) == 0)
        rows = torch.randint(len(self.windows), (count,), generator=generator)
        places = torch.randperm(len(tokens), generator=generator)[:count].to(tokens.device)
        tokens[places] = self.windows[rows].to(tokens.device, tokens.dtype)
        return {**batch, "input_ids": tokens}

    def __str__(self) -> str:
        return f"{len(self.windows)} windows of text sampled from the dense model, half of each step"


def with_sampled_text(
    model: nn.Module,
    part: Samples,
    copies: int,
    seed: int,
    remember: Callable[[Callable[[], Tensor]], Tensor] = lambda sample: sample(),
) -> Samples:
    """Add windows that the dense model samples to calibration samples, in batches of the same size.

    Args:
        model: the dense model, in eval mode.
        part: calibration samples.
        copies: sampled windows per calibration window.
        seed: of the draws.
        remember: (function that samples the windows) -> the windows, perhaps those of an interrupted run.

    Raises:
        ProblemError: the model or its samples are not suited.
    """

    def sample() -> Tensor:
        sampled = sampled_text(model, part, copies * part.samples, seed) if can_sample(model, part) else None
        if sampled is None:
            raise _unsuited()
        return sampled.windows

    extended = Samples([*part.batches], [*part.numbers])
    parts = torch.split(remember(sample), batches.size(part.batches[0]))
    for number, windows in enumerate(parts, max(part.numbers) + 1):
        pattern = batches.take(part.batches[0], torch.arange(len(windows)))
        assert isinstance(pattern, Mapping)
        ids = windows.to(pattern["input_ids"].device, pattern["input_ids"].dtype)
        extended.batches.append({**pattern, **{name: ids for name in ("input_ids", "labels") if name in pattern}})
        extended.numbers.append(number)
    return extended


def require_sampling(model: nn.Module, part: Samples) -> None:
    """Check, before any work, that a model can continue its calibration samples.

    Raises:
        ProblemError: it cannot.
    """
    if not can_sample(model, part):
        raise _unsuited()


def _unsuited() -> ProblemError:
    return ProblemError(
        "blocks.sampled: text is sampled from causal language models with a cache of keys and values, and needs "
        f"windows of equal length, at least {_PREFIX} tokens, without padding; leave it at 0."
    )


def copies_to_sample(model: nn.Module, part: Samples) -> int:
    """Sampled windows per calibration window for block reconstruction; 0 without need, or if they are not suited.

    Args:
        model: the dense model, in memory whole.
        part: calibration samples.
    """
    if sum(map(batches.position_count, part.batches)) > _AUTO_TOKENS:
        return 0
    return _AUTO_COPIES if can_sample(model, part) else 0


def windows_to_sample(model: nn.Module, part: Samples, used: int) -> int:
    """Number of windows to sample for gradient steps; 0 without steps, or if `can_sample` is False.

    Args:
        model: the dense model.
        part: calibration samples.
        used: number of samples that all steps read.
    """
    return min(_MOST_COPIES * part.samples, -(-used // _SHARE)) if used and can_sample(model, part) else 0


def windows_of_steps(model: nn.Module, part: Samples, steps: Iterable[FineTune | None]) -> int:
    """Number of windows to sample for steps between and after rounds, of those that leave their augmentation open."""
    augmented = [step for step in steps if step is not None and step.augment == "auto"]
    return windows_to_sample(
        model, part, sum((step.most_steps or step.steps) * samples_of_step(step, part) for step in augmented)
    )


def can_sample(model: nn.Module, part: Samples) -> bool:
    """True if a model can continue its calibration samples.

    It can if it is a causal model of transformers with a cache of keys and values, and if the samples are windows of
    equal length without padding.
    """
    if not part.batches or not all(isinstance(batch, Mapping) and set(batch) <= _READ for batch in part.batches):
        return False
    if not takes_cache(model) or not part.alike:
        return False
    masks = (outputs.attended(model, batch) for batch in part.batches)
    if batches.positions(part.batches[0]) < _PREFIX or not all(mask is None or bool(mask.all()) for mask in masks):
        return False
    return _predicts(model, part)  # False for an encoder, whose class can be a decoder too


def takes_cache(model: nn.Module) -> bool:
    """True if a model takes token ids with a cache of keys and values."""
    return {"past_key_values", "use_cache", "input_ids"} <= set(inspect.signature(model.forward).parameters)


@torch.no_grad()
def sampled_text(model: nn.Module, part: Samples, count: int, seed: int) -> SampledText | None:
    """Windows that the dense model continues from the first tokens of calibration windows.

    Args:
        model: the dense model, in eval mode.
        part: calibration samples that `can_sample` accepts.
        count: number of windows.
        seed: of the draws.

    Returns:
        None if the model predicts no next tokens, gives NaN, or keeps no keys and values.
    """
    generator = torch.Generator().manual_seed(seed)
    length = batches.positions(part.batches[0])
    windows: list[Tensor] = []
    for rows in torch.split(torch.randint(part.samples, (count,), generator=generator), max(1, _TOKENS // length)):
        picked = part.pick(rows)
        assert isinstance(picked, Mapping)
        start = picked["input_ids"][:, : length // _PREFIX].to(next(model.parameters()).device)
        drawn = continued(model, start, length, generator)
        if drawn is None:
            return None
        windows.append(drawn.cpu())
    return SampledText(torch.cat(windows)) if windows else None


@torch.no_grad()
def _predicts(model: nn.Module, part: Samples) -> bool:
    """True if the model predicts next tokens and keeps keys and values: two tokens of one window are sampled."""
    window = batches.first_sample(part.batches[0])
    assert isinstance(window, Mapping)
    start = window["input_ids"][:, :1].to(next(model.parameters()).device)
    return continued(model, start, 3, torch.Generator().manual_seed(0)) is not None


def continued(model: nn.Module, tokens: Tensor, length: int, generator: torch.Generator | None = None) -> Tensor | None:
    """Token ids (windows, length): given first tokens (windows, prefix), and those of the model after them.

    Args:
        model: a causal language model in eval mode.
        tokens: the first tokens, int64.
        length: of the result.
        generator: of draws; None: the most likely tokens.

    Returns:
        None if the model predicts no next tokens, gives NaN, or keeps no keys and values.
    """
    cache, new = None, tokens
    while tokens.shape[1] < length:
        output = model(input_ids=new, past_key_values=cache, use_cache=True)
        if not isinstance(output, Mapping) or output.get("past_key_values") is None:
            return None
        scores, cache = output.get("logits"), output["past_key_values"]
        if not isinstance(scores, Tensor) or scores.ndim != 3 or scores.shape[:2] != new.shape:
            return None
        chances = scores[:, -1].float().softmax(-1).cpu()
        if not bool(chances.isfinite().all()):  # the sweep names the layer that causes it
            return None
        new = chances.argmax(-1, True) if generator is None else torch.multinomial(chances, 1, generator=generator)
        new = new.to(tokens.device)
        tokens = torch.cat([tokens, new], 1)
    return tokens
