"""Recipes that end within a given time, and the gradient steps and epochs that a run can afford."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from iobs.core.patterns import Pattern
from iobs.core.steps import in_words
from iobs.core.structured import Structured
from iobs.errors import ProblemError
from iobs.pruning.calibration.blocks import hidden_of
from iobs.pruning.cost.work import NETWORK_STEP, STEP_PASSES
from iobs.pruning.descent.batches import samples_of_step
from iobs.pruning.layerwise.problem import weighs_rows
from iobs.pruning.network.calls import Args, Kwargs, after_calls
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.plan.counts import under_pattern
from iobs.pruning.recipe import BlockFit, FineTune, Recipe, Rounds
from iobs.pruning.recipe.parts import MOST_EPOCHS
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch, Samples
from iobs.pruning.workspace import Decisions

_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05)  # of the gradient steps; fewer repay no trial of a rate
_SHORT = 100  # steps of each window in short fits, as in the preset "fast"
_FIT_BUDGET = 1e14  # multiply-adds of block reconstruction and of steps of the whole network: about an hour on one core
SAMPLING_EPOCHS = 4.0  # fewer passes over the calibration windows do not overfit them, and need no sampled ones
_STEP_BUDGET = 1.25e13  # multiply-adds of all gradient steps: about five minutes on one core
_ALIVE = 8  # latest inputs that a new one is compared with: layers that share an input are called in a row


@dataclass(frozen=True)
class ShorterRecipe:
    """A recipe, or a form of it that takes less time.

    Attributes:
        recipe: how to prune.
        words: what it leaves out; empty for the whole recipe.
    """

    recipe: Recipe
    words: str


# ---- a given time: fewer gradient steps, then no steps, then no division of the sparsity
def require_forms(recipe: Recipe, pattern: Pattern) -> None:
    """Raise unless the time of a run can be foretold, and so be limited.

    Raises:
        ProblemError: the pattern is of whole units, or the solver of the whole network.
    """
    reason = ""
    if isinstance(pattern, Structured):
        reason = "a pattern of whole units; the steps of its recipe set the time"
    elif recipe.network_solver is not None:
        reason = "a solver of the whole network"
    if reason:
        raise ProblemError(f"A time for the run (within) is not possible yet with {reason}.")


def forms(recipe: Recipe, pattern: Pattern) -> Iterator[ShorterRecipe]:
    """The forms of a recipe, the richest first; nearly always each takes less time than the one before.

    The first one takes all gradient steps that the recipe allows, more than a CPU affords otherwise.
    """
    blocks = recipe.blocks
    if blocks is not None and blocks.epochs == "auto":
        recipe = recipe.but(blocks=replace(blocks, epochs=MOST_EPOCHS))
    many = recipe.blocks is not None or any(max(step.steps, step.most_steps or 0) > 1 for step in recipe.steps)
    for share in _SHARES if many else _SHARES[:1]:
        yield ShorterRecipe(_with_steps(recipe, share), f"{share:.0%} of the gradient steps" if share < 1 else "")
    blocks = recipe.blocks
    if blocks is not None and (blocks.masks > 1 or blocks.network_steps):
        epochs = 1.0 if blocks.epochs is None else min(1.0, float(blocks.epochs))
        short = replace(blocks, masks=1, network_steps=0, sampled=0, steps=min(blocks.steps, _SHORT), epochs=epochs)
        # Steps of the whole network take the place of a search; without them a search would take longer than they did.
        division = recipe.division
        searched = division.criterion == "auto" and division.generations > 0 and blocks.network_steps > 0
        allocation = replace(division, generations=0) if searched else recipe.allocation
        recipe = recipe.but(blocks=short, finetune=None, rounds=Rounds(), allocation=allocation)
        yield ShorterRecipe(recipe, "one projection, and short fits of blocks")
    left_out: list[str] = []
    if recipe.blocks is not None or recipe.steps or recipe.rounds.count > 1:
        recipe = recipe.but(blocks=None, finetune=None, rounds=Rounds())
        left_out.append("one projection, no gradient steps")
        yield ShorterRecipe(recipe, left_out[0])
    division = under_pattern(recipe.division, pattern)
    if division.generations and division.criterion in ("auto", "search"):
        recipe = recipe.but(allocation=replace(recipe.division, criterion="auto", generations=0))
        left_out.append("no search among divisions")
        yield ShorterRecipe(recipe, ", ".join(left_out))
    bounded = division.bounds or division.least or division.most is not None
    divided, weighed = division.criterion != "uniform", weighs_rows(recipe, pattern)
    if (divided or weighed) and not bounded:
        recipe = recipe.but(allocation="uniform", curvature="layer")
        left_out.append("equal shares of all layers" if divided else "rows of a layer that count equally")
        yield ShorterRecipe(recipe, ", ".join(left_out))
    if recipe.target != "layer":
        yield ShorterRecipe(recipe.but(target="layer"), ", ".join([*left_out, "layers match their own outputs"]))


def form_of(recipe: Recipe, pattern: Pattern, number: int) -> Recipe:
    """The recipe of the form with this number, from 0."""
    return next(itertools.islice(forms(recipe, pattern), number, None)).recipe


def _with_steps(recipe: Recipe, share: float) -> Recipe:
    """The recipe with a share of its gradient steps."""
    if share == 1:
        return recipe
    finetune, between = (
        None if step is None else _fewer(step, share) for step in (recipe.finetune, recipe.rounds.finetune)
    )
    blocks = None if recipe.blocks is None else _shorter(recipe.blocks, share)
    return recipe.but(blocks=blocks, finetune=finetune, rounds=replace(recipe.rounds, finetune=between))


def _fewer(step: FineTune, share: float) -> FineTune:
    most, least = step.most_steps, min(step.steps, 2)  # a single step may take the gradient of all data
    return replace(
        step,
        steps=max(least, math.ceil(share * step.steps)),
        most_steps=None if most is None else max(least, math.ceil(share * most)),
    )


def _shorter(blocks: BlockFit, share: float) -> BlockFit:
    assert blocks.epochs != "auto"
    epochs = None if blocks.epochs is None else share * blocks.epochs
    few = blocks.sampled == "auto" and epochs is not None and epochs < SAMPLING_EPOCHS
    return replace(
        blocks,
        steps=math.ceil(share * blocks.steps),
        between=math.ceil(share * blocks.between),
        network_steps=math.ceil(share * blocks.network_steps),
        epochs=epochs,
        sampled=0 if few else blocks.sampled,
    )


def fitting(recipe: Recipe, pattern: Pattern, seconds: float, foretold: Callable[[Recipe], float]) -> tuple[int, str]:
    """The number of the first form of a recipe that ends in time, and a note on it.

    Args:
        recipe: how to prune.
        pattern: of the run.
        seconds: that the run may take.
        foretold: recipe -> seconds that it takes.

    Raises:
        ProblemError: no form ends in time.
    """
    least = math.inf
    for number, form in enumerate(forms(recipe, pattern)):
        expected = foretold(form.recipe)
        if expected <= seconds:
            words = f"{form.words or 'the whole recipe'}; about {_shown(expected)}"
            return number, f"Within {_shown(seconds)}: {words}."
        least = min(least, expected)
    raise ProblemError(
        f"No form of this recipe ends within {_shown(seconds)}: the shortest takes about {_shown(least)}. Give "
        "more time, fewer or shorter samples, or a faster solver such as sparsegpt."
    )


def _shown(seconds: float) -> str:
    return in_words(seconds) if seconds >= 1 else f"{seconds:.1f} s"


# ---- gradient steps and epochs that the multiply-adds of the layers afford
@dataclass
class ObservedInput:
    """Input of a module with layers.

    Attributes:
        group: key of its input; modules with the same input have the same key.
        rows: rows of all its inputs.
        unfolded: it is a convolution.
        added: its outputs are added to a residual stream.
    """

    group: object
    rows: float
    unfolded: bool
    added: bool = False


@contextmanager
def observing_inputs(
    model: nn.Module, layers: Sequence[Layer], most: float = math.inf
) -> Iterator[dict[str, ObservedInput]]:
    """Observe the inputs of layers, by path of their module, in the forward passes inside the context.

    Args:
        model: the model.
        layers: the layers.
        most: most positions of a sample that count in a convolution.
    """
    observed: dict[str, ObservedInput] = {}
    latest: deque[tuple[object, int]] = deque(maxlen=_ALIVE)  # inputs and their numbers

    def note(path: str, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
        output = hidden_of(output)
        if not isinstance(output, Tensor):
            return
        value = args[0] if args else output
        group = next((number for other, number in latest if other is value), len(observed))
        latest.append((value, group))
        convolution = isinstance(module, CONVOLUTIONS)
        if convolution:
            rows = len(output) * min(output.flatten(2).shape[2] if output.ndim > 2 else 0, most)
        else:
            rows = output[..., 0].numel()
        entry = observed.setdefault(path, ObservedInput(group, 0.0, convolution))
        entry.rows += rows

    with after_calls(model, {layer.path for layer in layers}, note):
        yield observed


@torch.no_grad()
def with_affordable_steps(
    decided: Decisions, model: nn.Module, layers: Sequence[Layer], fit: Samples, sampled: bool
) -> Decisions:
    """The decisions with the numbers of gradient steps that a run can afford, see `affordable`."""
    between, after = (
        None if step is None else affordable(step, model, layers, fit, sampled)
        for step in (decided.rounds.finetune, decided.finetune)
    )
    return replace(decided, rounds=replace(decided.rounds, finetune=between), finetune=after)


def affordable(
    step: FineTune, model: nn.Module, layers: Sequence[Layer], fit: Samples, sampled: bool = False
) -> FineTune:
    """Raise `steps` towards `most_steps` as far as the budget of multiply-adds allows.

    The budget counts multiply-adds, not seconds, so that the number of steps is the same on every machine. It counts
    the multiply-adds of the layers to prune. For text it counts those of the whole model, where attention and
    vocabulary cost more than these layers.

    Args:
        step: fine-tuning.
        model: the dense model.
        layers: the layers to prune.
        fit: calibration samples.
        sampled: text is sampled from the dense model. Other text keeps `steps`: more of them fit the few windows alone.
    """
    if step.most_steps is None:
        return step
    batch = batches.first_sample(fit.batches[0])
    if batches.positions(batch) > 1:
        if not sampled:
            return replace(step, most_steps=None)
        with FlopCounterMode(display=False) as counter:
            batches.forward(model, batch)
        sample = counter.get_total_flops() / 2
    else:
        with observing_inputs(model, layers) as observed:
            batches.forward(model, batch)
        sample = sum(observed[layer.path].rows * layer.weights for layer in layers if layer.path in observed)
    count = int(_STEP_BUDGET / max(1.0, STEP_PASSES * sample * samples_of_step(step, fit)))
    return replace(step, steps=max(step.steps, min(step.most_steps, count)), most_steps=None)


def with_affordable_epochs(
    recipe: Recipe, layers: Sequence[Layer], data: Sequence[Batch], device: torch.device
) -> Recipe:
    """The recipe with a number of epochs of block reconstruction in place of "auto", see `BlockFit`.

    Fewer epochs also mean fewer steps between projections, and no sampled windows where few epochs are left. Like all
    budgets here it counts multiply-adds, so that it is the same on every CPU.

    Args:
        recipe: how to prune.
        layers: the layers to prune.
        data: calibration samples.
        device: of the computations.
    """
    blocks = recipe.blocks
    if blocks is None or blocks.epochs != "auto":
        return recipe
    epochs = MOST_EPOCHS
    if device.type == "cpu" and data and batches.positions(data[0]) > 1:
        positions = sum(map(batches.position_count, data))
        passes = STEP_PASSES * blocks.window + (NETWORK_STEP if blocks.network_steps else 0)
        epochs = _FIT_BUDGET / max(1.0, passes * positions * sum(layer.weights for layer in layers))
        epochs = round(min(MOST_EPOCHS, max(1.0, epochs)), 1)
    between = math.ceil(blocks.between * epochs / MOST_EPOCHS)
    sampled = 0 if blocks.sampled == "auto" and epochs < SAMPLING_EPOCHS else blocks.sampled
    return recipe.but(blocks=replace(blocks, epochs=epochs, between=between, sampled=sampled))
