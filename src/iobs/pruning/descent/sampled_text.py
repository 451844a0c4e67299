"""Text sampled from the dense model, so that fine-tuning on few windows of text does not overfit.

The dense model gives the targets of any text, also of its own (data-free distillation: Liu et al., LLM-QAT, 2023).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError
from iobs.pruning.descent.batches import samples_of_step
from iobs.pruning.recipe import FineTune
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import attended
from iobs.pruning.samples.subsets import Samples

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
    if sum(batches.size(batch) * batches.positions(batch) for batch in part.batches) > _AUTO_TOKENS:
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
    masks = (attended(model, batch) for batch in part.batches)
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
