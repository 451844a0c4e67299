"""Optimizer and learning rate of gradient steps, by short trials from the first projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from iobs.core.patterns import Pattern
from iobs.errors import NonFiniteError
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import FineTune, Optimizer
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint
from iobs.pruning.workspace import Decisions, Workspace

_DENSE_CAUTION = 3.0  # steps on dense weights use this much smaller rates than steps on a fixed support
_TRIAL_STEPS = 12  # least number of steps of a trial
_TRIAL_SHARE = 10  # a trial takes steps // _TRIAL_SHARE steps: much shorter runs need smaller rates
_RATES: dict[str, tuple[float, ...]] = {
    "adam": (5e-5, 2e-4, 8e-4, 3e-3),
    "momentum": (1e-2, 3e-2, 1e-1),
    "sgd": (1e-2, 3e-2, 1e-1, 3e-1, 1.0),
}
_AUTO: tuple[Optimizer, ...] = ("adam", "momentum")
_AS_GOOD = 0.02  # held-out losses within this relative distance of the least count as equal to it
_LOST = 0.25  # no fine-tuning if even the best trial raises the loss by this share: the full run would too
_STOP_WORSE = 0.15  # stop trying larger rates once the loss is this much worse (relative)


def decide_rates(work: Workspace, plan: Mapping[Layer, Pattern], decided: Decisions) -> Decisions:
    """The decisions with learning rates and optimizers in place of "auto"; the model holds the first projection."""
    # Steps with the same optimizer and loss share their trials.
    found: dict[tuple[object, object], tuple[Optimizer, float] | None] = {}

    def tuned(step: FineTune | None, caution: float = 1.0) -> FineTune | None:
        if step is None or step.lr != "auto":
            return step
        key = step.optimizer, step.loss
        if key not in found:
            found[key] = _best_descent(work, plan, step, f"descents {len(found)}", alone=decided.rounds.count == 1)
        best = found[key]
        if best is None:
            return None
        return replace(step, optimizer=best[0], lr=best[1] / (caution if step.support == "dense" else 1.0))

    finetune = tuned(decided.finetune)
    rounds = decided.rounds
    if rounds.count > 1:
        rounds = replace(rounds, finetune=tuned(rounds.finetune, _DENSE_CAUTION))
    return replace(decided, rounds=rounds, finetune=finetune)


def _best_descent(
    work: Workspace, plan: Mapping[Layer, Pattern], step: FineTune, name: str, alone: bool
) -> tuple[Optimizer, float] | None:
    """The optimizer and the learning rate with the least held-out loss, from short trials on the first projection.

    Args:
        work: state of the run; the model holds the first projection.
        plan: the pattern of every layer.
        step: fine-tuning that needs an optimizer and a rate.
        name: name of the trials in the checkpoint.
        alone: True if no other projection follows the steps.

    Returns:
        None if every rate diverges, or if all trials raise the loss so far that a longer run would not recover.
    """
    length = trial_length(step)
    done = work.checkpoint.remembered(name, lambda: _trials(work, plan, step, length, name))
    tried: dict[tuple[Optimizer, float], float] = {(optimizer, rate): loss for optimizer, rate, loss in done["tried"]}
    best = boldest(tried)
    if best is None:
        work.note(f"No gradient steps: every learning rate of {' and '.join(_tried(step))} diverges.")
        return None
    listed = ", ".join(f"{optimizer} {rate:g}: {loss:.4g}" for (optimizer, rate), loss in tried.items())
    if alone and min(tried.values()) > done["before"] + _LOST * abs(done["before"]):
        work.note(
            f"No fine-tuning: after {length} steps the held-out loss is far above {done['before']:.4g} ({listed})."
        )
        return None
    work.note(
        f"Steps of {best[0]} with learning rate {best[1]:g}: least held-out loss after {length} steps ({listed})."
    )
    return best


def _trials(work: Workspace, plan: Mapping[Layer, Pattern], step: FineTune, length: int, name: str) -> JsonObject:
    """Held-out losses after `length` steps with each optimizer and rate, and the loss before any step."""
    assert work.scoring is not None
    scoring, start = work.scoring, work.store.snapshot()

    def trial(optimizer: Optimizer, rate: float) -> float:
        work.store.restore(start)
        short = replace(step, lr=rate, optimizer=optimizer, steps=length, decay=True)
        task = f"trial of {optimizer} with rate {rate:g}, step"
        work.trainer_on(plan, short, length).run(
            work.fit, lambda done, total, loss: work.callbacks.on_measure(task, done, total)
        )
        return scoring.comparison_loss()

    found: list[tuple[Optimizer, float, float]] = []
    before = scoring.comparison_loss()
    for optimizer in _tried(step):
        kept = kept_trial(partial(trial, optimizer), work.checkpoint, f"{name}, {optimizer}")
        losses = try_rates(kept, _RATES[optimizer], before)
        found += [(optimizer, rate, loss) for rate, loss in losses.items()]
    work.store.restore(start)
    return {"tried": found, "before": before}


def boldest(tried: dict[tuple[Optimizer, float], float]) -> tuple[Optimizer, float] | None:
    """The best optimizer with its largest rate whose loss is about the least: longer runs need larger rates."""
    if not tried:
        return None
    optimizer, least = min(tried.items(), key=lambda entry: entry[1])[0][0], min(tried.values())
    enough = least + _AS_GOOD * abs(least)
    return max(pair for pair, loss in tried.items() if pair[0] == optimizer and loss <= enough)


def trial_steps(step: FineTune) -> int:
    """The most steps that the choice of an optimizer and a learning rate takes."""
    return trial_length(step) * sum(len(_RATES[name]) for name in _tried(step)) if step.lr == "auto" else 0


def trial_length(step: FineTune) -> int:
    """The number of steps of one trial."""
    return max(_TRIAL_STEPS, step.steps // _TRIAL_SHARE)


def candidates(decided: Decisions) -> tuple[FineTune, ...]:
    """Fine-tuning runs to try: the full length and, if trials chose the rate, the length of a trial."""
    step = decided.finetune
    if step is None:
        return ()
    short = trial_length(step)
    return (step, replace(step, steps=short)) if decided.tuned and short < step.steps else (step,)


def _tried(step: FineTune) -> tuple[Optimizer, ...]:
    return _AUTO if step.optimizer == "auto" else (step.optimizer,)


def kept_trial(trial: Callable[[float], float], checkpoint: Checkpoint, key: str) -> Callable[[float], float]:
    """A trial of learning rates whose losses a checkpoint keeps.

    Args:
        trial: rate -> held-out loss after the run.
        checkpoint: holds the losses.
        key: of the trials.
    """
    return lambda rate: checkpoint.number(f"{key}, trial of {rate:g}", partial(trial, rate))


def try_rates(trial: Callable[[float], float], rates: tuple[float, ...], before: float) -> dict[float, float]:
    """The loss after a short run with each learning rate; stops at a rate that does harm.

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
        if losses[rate] > least + _STOP_WORSE * abs(least):
            break
    return losses
