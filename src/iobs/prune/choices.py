"""Choices that a run makes from its own calibration data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from iobs.core.patterns import Pattern, Unstructured
from iobs.core.quadratic import Solution
from iobs.errors import NonFiniteError
from iobs.prune.allocation import as_allocation, uniform
from iobs.prune.gram import Statistics
from iobs.prune.layers import Layer
from iobs.prune.record import AllocationRecord, allocation_record
from iobs.prune.sensitivity import ENOUGH, Planner, can_keep_grams
from iobs.prune.solving import solve_layer
from iobs.prune.steps import GradientStep, Optimizer
from iobs.prune.workbench import Workbench

_DAMAGE = 1.0  # held-out KL of the first projection, in nats, above which rounds of growing sparsity pay
_DENSE_CAUTION = 3.0  # steps on dense weights are this much smaller than those on a fixed support
_TRIAL_STEPS = 12  # of a learning rate's trial, at least,
_TRIAL_SHARE = 10  # and this part of the steps it is for: the shorter a run, the smaller the rate that suits it
_RATES: dict[str, tuple[float, ...]] = {
    "adam": (5e-5, 2e-4, 8e-4, 3e-3),
    "momentum": (1e-2, 3e-2, 1e-1),
    "sgd": (1e-2, 3e-2, 1e-1, 3e-1, 1.0),
}
_AUTO: tuple[Optimizer, ...] = ("adam", "momentum")
_AS_GOOD = 0.02  # a held-out loss within this share of the least is as good as it
_LOST = 0.25  # where even the best trial adds this share to the loss, ten times its steps end above it too (LOG.md)
_HOPELESS = 0.15  # a rate worse than the best, or than no steps, by this share ends the search: larger ones are worse


def allocate(bench: Workbench) -> tuple[dict[Layer, Pattern], list[AllocationRecord]]:
    """The pattern of every layer, and the measurements behind an uneven one."""
    layers, allocation = bench.selection.layers, as_allocation(bench.settings.allocation)
    if allocation.criterion == "uniform":
        return uniform(bench.pattern, layers), []

    def solve_fast(layer: Layer, statistics: Statistics, dense: Tensor, pattern: Pattern) -> list[Solution]:
        old = dense if bench.settings.keep_zeros else None
        return solve_layer(layer, statistics, dense, dense, pattern, replace(bench.settings, budget="fast"), old)

    planner = Planner(
        bench.model,
        layers,
        bench.chain,
        bench.fit,
        bench.heldout,
        solve_fast,
        bench.settings.seed,
        bench.progress.choosing,
    )
    if allocation.criterion == "auto":
        # The network is asked for its answers only where a search is affordable.
        searched = allocation.generations > 0 and can_keep_grams(layers) and planner.answers >= ENOUGH
        how = f"searched for, judged by {planner.answers} answers" if searched else "by their damages, not searched for"
        bench.note(f"Sparsities of layers: {how}.")
        allocation = replace(allocation, criterion="evolve" if searched else "kl")

    def planned() -> dict[str, Any]:
        counts, records = planner.allocate(bench.pattern, allocation)
        keeps = {layer.name: keep for layer, keep in counts.items()}
        return {"keeps": keeps, "records": [asdict(record) for record in records]}

    found = bench.remembered("allocation", planned)
    keeps, records = found["keeps"], [allocation_record(record) for record in found["records"]]
    # A layer that the network feeds nothing got no count.
    return {
        layer: Unstructured(keep=keeps[layer.name]) if layer.name in keeps else bench.pattern for layer in layers
    }, records


def settle(bench: Workbench) -> None:
    """Settle what depends on the damage of the first projection, which the model holds."""
    settings = bench.settings
    if settings.schedule == "auto":
        damage = bench.divergence()
        grow = damage > _DAMAGE and settings.rounds > 2
        bench.note(
            f"After the first projection the network is {damage:.4g} nats from the dense one: "
            + ("sparsity grows over the rounds." if grow else "no further rounds.")
            + (" They would pay, from three on." if damage > _DAMAGE and settings.rounds == 2 else "")
        )
        settings = (
            replace(settings, schedule="cubic", rounds=settings.rounds)
            if grow
            else replace(settings, schedule="constant", rounds=1)
        )
        bench.progress.expect_rounds(settings.rounds)
    found: dict[Any, tuple[Optimizer, float] | None] = {}  # steps of the same optimizers and loss share their trials

    def settled(step: GradientStep | None, caution: float = 1.0) -> GradientStep | None:
        if step is None or step.lr != "auto":
            return step
        key = step.optimizer, step.loss
        if key not in found:
            found[key] = _best_descent(bench, step, f"descents {len(found)}", alone=settings.rounds == 1)
        best = found[key]
        if best is None:
            return None
        return replace(step, optimizer=best[0], lr=best[1] / (caution if step.support == "dense" else 1.0))

    polish = settled(settings.polish)
    step = settled(settings.step, _DENSE_CAUTION) if settings.rounds > 1 else settings.step
    bench.settings = replace(settings, step=step, polish=polish)


def _best_descent(bench: Workbench, step: GradientStep, name: str, alone: bool) -> tuple[Optimizer, float] | None:
    """The optimizer and rate whose short run on the first projection's support leaves the least held-out loss.

    Args:
        bench: of the run; the model holds the first projection.
        step: what is to be settled.
        name: of the trials in the journal.
        alone: whether the steps would end the run from here, with no other projection before them.

    Returns:
        None where no steps are worth it: all of them diverge, or all do harm that a longer run does not make good.
    """
    length = _trial_length(step)
    done = bench.remembered(name, lambda: _tried_out(bench, step, length))
    tried: dict[tuple[Optimizer, float], float] = {(optimizer, rate): loss for optimizer, rate, loss in done["tried"]}
    best = boldest(tried)
    if best is None:
        bench.note(f"No gradient steps: every learning rate of {' and '.join(_tried(step))} diverges.")
        return None
    listed = ", ".join(f"{optimizer} {rate:g}: {loss:.4g}" for (optimizer, rate), loss in tried.items())
    if alone and min(tried.values()) > done["before"] + _LOST * abs(done["before"]):
        bench.note(f"No polish: after {length} steps the held-out loss is far above {done['before']:.4g} ({listed}).")
        return None
    bench.note(
        f"Steps of {best[0]} with learning rate {best[1]:g}: least held-out loss after {length} steps ({listed})."
    )
    return best


def _tried_out(bench: Workbench, step: GradientStep, length: int) -> dict[str, Any]:
    """Optimizers, rates, and the held-out losses after so many steps from the first projection; the loss before."""
    start, masks = bench.snapshot(), bench.masks()

    def trial(optimizer: Optimizer, rate: float) -> float:
        bench.restore(start)
        short = replace(step, lr=rate, optimizer=optimizer, steps=length, decay=True)
        name = f"trial of {optimizer} with rate {rate:g}, step"
        bench.trainer(short, length, masks).run(
            bench.fit, lambda done, total, loss: bench.progress.choosing(name, done, total)
        )
        return judged()

    def judged() -> float:
        loss = bench.measure(bench.judges if bench.judges.batches else bench.fit)
        assert loss is not None
        return loss

    found: list[tuple[Optimizer, float, float]] = []
    before = judged()
    for optimizer in _tried(step):
        losses = try_rates(partial(trial, optimizer), _RATES[optimizer], before)
        found += [(optimizer, rate, loss) for rate, loss in losses.items()]
    bench.restore(start)
    return {"tried": found, "before": before}


def boldest(tried: dict[tuple[Optimizer, float], float]) -> tuple[Optimizer, float] | None:
    """The largest rate that is as good as the best, of the best's optimizer: longer runs want larger rates."""
    if not tried:
        return None
    optimizer, least = min(tried.items(), key=lambda entry: entry[1])[0][0], min(tried.values())
    enough = least + _AS_GOOD * abs(least)
    return max(pair for pair, loss in tried.items() if pair[0] == optimizer and loss <= enough)


def trial_steps(step: GradientStep) -> int:
    """How many steps the choice of an optimizer and a learning rate takes at most."""
    return _trial_length(step) * sum(len(_RATES[name]) for name in _tried(step)) if step.lr == "auto" else 0


def _tried(step: GradientStep) -> tuple[Optimizer, ...]:
    return _AUTO if step.optimizer == "auto" else (step.optimizer,)


def _trial_length(step: GradientStep) -> int:
    return max(_TRIAL_STEPS, step.steps // _TRIAL_SHARE)


def polishes(step: GradientStep | None, tried: bool) -> tuple[GradientStep, ...]:
    """The polish; and, where trials chose it, one as short as they: more steps may be worse."""
    if step is None:
        return ()
    short = _trial_length(step)
    return (step, replace(step, steps=short)) if tried and short < step.steps else (step,)


def try_rates(trial: Callable[[float], float], rates: tuple[float, ...], before: float) -> dict[float, float]:
    """The loss after a short run with each learning rate; rates are tried upwards until they do harm.

    Args:
        trial: rate -> held-out loss after the run.
        rates: ascending.
        before: the held-out loss without any steps.
    """
    losses: dict[float, float] = {}
    for rate in rates:
        try:
            losses[rate] = trial(rate)
        except NonFiniteError:  # diverged: no larger rate can do better
            break
        least = min(before, *losses.values())
        if losses[rate] > least + _HOPELESS * abs(least):
            break
    return losses
