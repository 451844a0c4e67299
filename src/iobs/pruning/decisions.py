"""Decisions of a run from its calibration data: sparsity per layer, rounds, optimizer and learning rate.

    decision                     made by                      stored in              in the report
    sparsity of every layer      plan.allocate                `plan` of `run`        `allocation`
    units of every site          plan.widths.allocate_widths  `Workspace.decided`    `allocation`
    sparsity of every round      scheduled                    not stored             `asked` of each round
    kind of network steps        decide_steps                 `Workspace.decided`    `settings["decided"]`
    number of rounds             decide_growth                `Workspace.decided`    `settings["decided"]`
    optimizer, learning rate     decide_rates                 `Workspace.decided`    `settings["decided"]`
    number of gradient steps     cost.affordable.affordable   `Workspace.decided`    `settings["decided"]`
    best record                  report.best_index            `algorithm.Best`       `best_round`

`algorithm.run` calls all of them. A mask is no decision of this kind: `layerwise.projection` says where it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from iobs.core.patterns import Pattern
from iobs.pruning.descent.rates import RateTrials, boldest, finetune_trials, steps_of_finetune_trial
from iobs.pruning.layerwise.patterns import thinner
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import FineTune, Optimizer, Rounds
from iobs.pruning.report import JsonObject
from iobs.pruning.samples.batches import positions
from iobs.pruning.workspace import Decisions, Workspace

_DAMAGE = 1.0  # held-out KL divergence of the first projection, in nats, above which growing sparsity pays
_DENSE_CAUTION = 3.0  # steps on dense weights use this much smaller rates than steps on a fixed support
_LOST = 0.25  # no fine-tuning if even the best trial raises the loss by this share: the full run would too


def scheduled(plan: dict[Layer, Pattern], rounds: Rounds, index: int) -> dict[Layer, Pattern]:
    """The patterns of round `index`: the plan, or less sparsity while the schedule is "cubic"."""
    last = rounds.count - 1
    if rounds.schedule != "cubic" or index in (0, last):
        return plan
    # Cubic growth from 0.72 of the requested sparsity (65 % on the way to 90 %), as measured best in LOG.md.
    share = 1 - 0.28 * (1 - (index - 1) / (last - 1)) ** 3
    return {layer: thinner(pattern, layer, share) for layer, pattern in plan.items()}


def decide_steps(workspace: Workspace) -> Decisions:
    """The decisions without block reconstruction if there is no chain, and with one kind of steps of the whole network.

    Text takes these steps block by block, and needs no further rounds. Other data take the fine-tuning, which alters
    and mixes samples, and the rounds before it, if the whole model is in memory.
    """
    before, text = workspace.decided, positions(workspace.fit.batches[0]) > 1
    if before.blocks is None:
        return before
    decided = one_kind_of_steps(before, bool(workspace.chain), text or not workspace.store.whole)
    if decided.blocks is None:
        workspace.note("No block reconstruction: the model does not run exactly along a chain of blocks.")
    elif decided.finetune is not before.finetune:
        kind = "Text" if text else "Block by block"
        workspace.note(f"{kind}: steps of the whole network, block by block, take the place of rounds and fine-tuning.")
    return decided


def one_kind_of_steps(decided: Decisions, chain: bool, by_blocks: bool) -> Decisions:
    """The decisions without block reconstruction if there is no chain, and with one kind of steps of the whole network.

    Args:
        decided: as in the recipe.
        chain: the model runs along a chain of blocks.
        by_blocks: where both kinds are asked for, the steps are taken block by block, and not as fine-tuning.
    """
    blocks = decided.blocks
    if blocks is None or not chain:
        return replace(decided, blocks=None)
    if not blocks.network_steps or decided.finetune is None:
        return decided
    if by_blocks:
        return replace(decided, rounds=Rounds(data=decided.rounds.data), finetune=None, tuned=False)
    return replace(decided, blocks=replace(blocks, network_steps=0))


def decide_growth(workspace: Workspace) -> Rounds:
    """The rounds after the first projection: growing sparsity where it did damage, otherwise no further rounds."""
    rounds = workspace.decided.rounds
    if rounds.schedule != "auto" or rounds.count == 1:
        return rounds
    assert workspace.scoring is not None
    damage = workspace.scoring.divergence()
    grow = damage > _DAMAGE and rounds.count > 2
    distance = f"{damage:.4g} nats" if workspace.scoring.compares_chances else f"a squared distance of {damage:.4g}"
    workspace.note(
        f"After the first projection the network is {distance} from the dense one: "
        + ("sparsity grows over the rounds." if grow else "no further rounds.")
        + (" They would pay, from three on." if damage > _DAMAGE and rounds.count == 2 else "")
    )
    decided = replace(rounds, schedule="cubic") if grow else Rounds(data=rounds.data)
    workspace.callbacks.on_rounds(decided.count)
    return decided


def decide_rates(workspace: Workspace, plan: Mapping[Layer, Pattern], decided: Decisions) -> Decisions:
    """The decisions with learning rates and optimizers in place of "auto"; the model holds the first projection."""
    last = decided.rounds.count == 1
    chosen = {
        (step.optimizer, step.loss): _optimizer_and_rate(workspace, plan, step, f"descents {number}", last=last)
        for number, step in enumerate(steps_with_trials(decided))
    }

    def tuned(step: FineTune | None, caution: float = 1.0) -> FineTune | None:
        if step is None or step.lr != "auto":
            return step
        best = chosen[step.optimizer, step.loss]
        if best is None:
            return None
        return replace(step, optimizer=best[0], lr=best[1] / (caution if step.support == "dense" else 1.0))

    finetune = tuned(decided.finetune)
    rounds = decided.rounds
    if rounds.count > 1:
        rounds = replace(rounds, finetune=tuned(rounds.finetune, _DENSE_CAUTION))
    return replace(decided, rounds=rounds, finetune=finetune)


def steps_with_trials(decided: Decisions) -> list[FineTune]:
    """The gradient steps whose optimizer and rate trials choose; those with the same optimizer and loss share them."""
    between = decided.rounds.finetune if decided.rounds.count > 1 else None
    steps: dict[tuple[object, object], FineTune] = {}
    for step in (decided.finetune, between):
        if step is not None and step.lr == "auto":
            steps.setdefault((step.optimizer, step.loss), step)
    return [*steps.values()]


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
    losses_of_all: list[tuple[Optimizer, float, float]] = []
    for optimizer, those in trials.items():
        short = replace(step, optimizer=optimizer, steps=those.steps)
        losses = _losses_of_rates(workspace, plan, short, those, f"{key}, {optimizer}", before)
        losses_of_all += [(optimizer, rate, loss) for rate, loss in losses.items()]
    return {"tried": losses_of_all, "before": before}


def _losses_of_rates(
    workspace: Workspace, plan: Mapping[Layer, Pattern], step: FineTune, trials: RateTrials, key: str, before: float
) -> dict[float, float]:
    """Held-out losses after short runs with an optimizer, by rate; the steps are undone."""
    descent = workspace.descent(step, workspace.fit, plan)
    descent.mark()

    def run(rate: float) -> None:
        task = f"{trials.name} with rate {rate:g}, step"
        descent.run(
            trials.steps,
            rate,
            "linear",
            on_step=lambda done, steps, loss: workspace.callbacks.on_measure(task, done, steps),
        )

    return trials.losses(descent, run, before, workspace.checkpoint, key)
