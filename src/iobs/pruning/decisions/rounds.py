"""Rounds of a run: their sparsities, and the kinds of gradient steps between and after them."""

from __future__ import annotations

from dataclasses import replace

from iobs.core.patterns import Pattern
from iobs.pruning.layerwise.patterns import thinner
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import Rounds
from iobs.pruning.samples.batches import positions
from iobs.pruning.workspace import Decisions, Workspace

_DAMAGE = 1.0  # held-out KL divergence of the first projection, in nats, above which growing sparsity pays


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
    workspace.note(
        f"After the first projection the network is {damage:.4g} nats from the dense one: "
        + ("sparsity grows over the rounds." if grow else "no further rounds.")
        + (" They would pay, from three on." if damage > _DAMAGE and rounds.count == 2 else "")
    )
    decided = replace(rounds, schedule="cubic") if grow else Rounds(data=rounds.data)
    workspace.callbacks.on_rounds(decided.count)
    return decided
