"""Optimizer and learning rate of fine-tuning, by short trials from the first projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from iobs.core.patterns import Pattern
from iobs.pruning.descent.rates import RateTrials, boldest, finetune_trials, steps_of_finetune_trial
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import FineTune, Optimizer
from iobs.pruning.report import JsonObject
from iobs.pruning.workspace import Decisions, Workspace

_DENSE_CAUTION = 3.0  # steps on dense weights use this much smaller rates than steps on a fixed support
_LOST = 0.25  # no fine-tuning if even the best trial raises the loss by this share: the full run would too


def decide_rates(workspace: Workspace, plan: Mapping[Layer, Pattern], decided: Decisions) -> Decisions:
    """The decisions with learning rates and optimizers in place of "auto"; the model holds the first projection."""
    # Steps with the same optimizer and loss share their trials.
    chosen: dict[tuple[object, object], tuple[Optimizer, float] | None] = {}

    def tuned(step: FineTune | None, caution: float = 1.0) -> FineTune | None:
        if step is None or step.lr != "auto":
            return step
        key = step.optimizer, step.loss
        if key not in chosen:
            last = decided.rounds.count == 1
            chosen[key] = _optimizer_and_rate(workspace, plan, step, f"descents {len(chosen)}", last=last)
        best = chosen[key]
        if best is None:
            return None
        return replace(step, optimizer=best[0], lr=best[1] / (caution if step.support == "dense" else 1.0))

    finetune = tuned(decided.finetune)
    rounds = decided.rounds
    if rounds.count > 1:
        rounds = replace(rounds, finetune=tuned(rounds.finetune, _DENSE_CAUTION))
    return replace(decided, rounds=rounds, finetune=finetune)


def candidates(decided: Decisions) -> tuple[FineTune, ...]:
    """Fine-tuning runs to try: the full length and, if trials chose the rate, the length of a trial."""
    step = decided.finetune
    if step is None:
        return ()
    short = steps_of_finetune_trial(step)
    return (step, replace(step, steps=short)) if decided.tuned and short < step.steps else (step,)


def _optimizer_and_rate(
    workspace: Workspace, plan: Mapping[Layer, Pattern], step: FineTune, key: str, *, last: bool
) -> tuple[Optimizer, float] | None:
    """The optimizer and the learning rate with the least held-out loss, from short trials on the first projection.

    Args:
        workspace: state of the run; the model holds the first projection.
        plan: the pattern of every layer.
        step: fine-tuning that needs an optimizer and a rate.
        key: of the trials in the checkpoint.
        last: True if no other projection follows the steps.

    Returns:
        None if every rate diverges, or if all trials raise the loss so far that a longer run would not recover.
    """
    trials = finetune_trials(step)
    length = steps_of_finetune_trial(step)
    done = workspace.checkpoint.remembered(key, lambda: _losses_of_trials(workspace, plan, step, trials, key))
    losses: dict[tuple[Optimizer, float], float] = {(optimizer, rate): loss for optimizer, rate, loss in done["tried"]}
    best = boldest(losses)
    if best is None:
        workspace.note(f"No gradient steps: every learning rate of {' and '.join(trials)} diverges.")
        return None
    listed = ", ".join(f"{optimizer} {rate:g}: {loss:.4g}" for (optimizer, rate), loss in losses.items())
    if last and min(losses.values()) > done["before"] + _LOST * abs(done["before"]):
        workspace.note(
            f"No fine-tuning: after {length} steps the held-out loss is far above {done['before']:.4g} ({listed})."
        )
        return None
    workspace.note(
        f"Steps of {best[0]} with learning rate {best[1]:g}: least held-out loss after {length} steps ({listed})."
    )
    return best


def _losses_of_trials(
    workspace: Workspace,
    plan: Mapping[Layer, Pattern],
    step: FineTune,
    trials: Mapping[Optimizer, RateTrials],
    key: str,
) -> JsonObject:
    """Held-out losses after short runs with each optimizer and rate, and the loss before any step."""
    assert workspace.scoring is not None
    before = workspace.scoring.comparison_loss()
    tried: list[tuple[Optimizer, float, float]] = []
    for optimizer, those in trials.items():
        short = replace(step, optimizer=optimizer, steps=those.steps)
        losses = _losses_of_rates(workspace, plan, short, those, f"{key}, {optimizer}", before)
        tried += [(optimizer, rate, loss) for rate, loss in losses.items()]
    return {"tried": tried, "before": before}


def _losses_of_rates(
    workspace: Workspace, plan: Mapping[Layer, Pattern], step: FineTune, trials: RateTrials, key: str, before: float
) -> dict[float, float]:
    """Held-out losses after short runs with an optimizer, by rate; the steps are undone."""
    descent = workspace.descent(step, workspace.fit, plan)
    descent.mark()

    def trial(rate: float) -> float:
        descent.undo()
        task = f"{trials.name} with rate {rate:g}, step"
        descent.run(
            trials.steps,
            rate,
            "linear",
            on_step=lambda done, steps, loss: workspace.callbacks.on_measure(task, done, steps),
        )
        return descent.loss()

    losses = trials.losses(trial, before, workspace.checkpoint, key)
    descent.undo()
    return losses
