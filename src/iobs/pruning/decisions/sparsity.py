"""The sparsity of every layer and of every round."""

from __future__ import annotations

from dataclasses import asdict, replace

from torch import Tensor

from iobs.core.grids import BITS, Budget, on_grid_of
from iobs.core.patterns import Pattern, Unstructured
from iobs.core.quadratic import Solution
from iobs.core.structured import Structured
from iobs.pruning.allocation.bits import BitPlanner
from iobs.pruning.allocation.counts import under_pattern
from iobs.pruning.allocation.sensitivity import ENOUGH_OUTPUTS, Planner, can_keep_grams
from iobs.pruning.calibration.gram import Statistics
from iobs.pruning.decisions.widths import allocate_widths
from iobs.pruning.layerwise.grids import solver_without_grid
from iobs.pruning.layerwise.patterns import thinner
from iobs.pruning.layerwise.problem import Task, solve_layer
from iobs.pruning.layerwise.targets import TARGETS
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import Rounds, as_allocation
from iobs.pruning.report import AllocationRecord, JsonObject, allocation_record
from iobs.pruning.samples.batches import positions
from iobs.pruning.workspace import Decisions, Workspace
from iobs.solvers.admm import ADMM
from iobs.solvers.gridded.search import QuickGrid

_DAMAGE = 1.0  # held-out KL divergence of the first projection, in nats, above which growing sparsity pays


def allocate(work: Workspace) -> tuple[dict[Layer, Pattern], list[AllocationRecord]]:
    """The pattern of every layer; for a non-uniform allocation also the measurements behind it.

    Layers whose pattern a rule sets keep it; the others share the pattern of the run.
    """
    if isinstance(work.request.pattern, Structured):
        whole = work.request.pattern.whole  # the layers that are refitted keep all columns
        return (dict(work.request.patterns), []) if whole else allocate_widths(work, work.request.pattern)
    patterns, recipe = dict(work.request.patterns), work.recipe
    allocation = under_pattern(as_allocation(recipe.allocation), work.request.pattern)
    layers = tuple(layer for layer, pattern in patterns.items() if pattern is work.request.pattern)
    if allocation.criterion == "uniform" or not layers:
        return patterns, []
    if isinstance(work.request.pattern, Budget):
        return divide_bits(work, work.request.pattern, layers)
    fast = recipe.but(solver=ADMM("fast")) if recipe.solver == "admm" or isinstance(recipe.solver, ADMM) else recipe

    def solve_fast(layer: Layer, statistics: Statistics, dense: Tensor, pattern: Pattern) -> list[Solution]:
        zeros, own = dense if recipe.keep_zeros else None, fast.for_layer(layer.name)
        own = own.but(solver=solver_without_grid(own.solver))  # curves are those of free values
        return solve_layer(Task(layer, pattern, dense, None, own, zeros), statistics)

    planner = Planner(
        work.store.model,
        layers,
        work.chain,
        work.fit,
        work.heldout,
        solve_fast,
        work.request.seed,
        work.callbacks.on_measure,
        work.note,
        residency=work.store,
        checkpoint=work.checkpoint,
    )
    if allocation.criterion == "auto" and not work.store.whole:
        allocation = replace(allocation, criterion="block")
    if allocation.criterion == "auto":
        # `planner.output_count` runs the model, so it comes last: only if a search is affordable.
        # A search judges one-shot masks: before steps of the whole network its allocations lose (LOG.md).
        wanted = allocation.generations > 0 and can_keep_grams(layers) and not _takes_network_steps(work)
        searched = wanted and planner.output_count >= ENOUGH_OUTPUTS
        found_by = f"a search, judged by {planner.output_count} outputs" if searched else "measured damages, no search"
        work.note(f"Sparsities of layers: by {found_by}.")
        allocation = replace(allocation, criterion="evolve" if searched else "kl")

    def planned() -> JsonObject:
        counts, records = planner.allocate(work.request.pattern, allocation)
        keeps = {layer.name: keep for layer, keep in counts.items()}
        return {"keeps": keeps, "records": [asdict(record) for record in records]}

    found = work.remembered("allocation", planned)
    # A layer that receives no input has no count and keeps the pattern of the run.
    keeps = found["keeps"]
    pattern = work.request.pattern
    patterns |= {
        layer: on_grid_of(pattern, Unstructured(keep=keeps[layer.name])) for layer in layers if layer.name in keeps
    }
    return patterns, [allocation_record(record) for record in found["records"]]


def divide_bits(
    work: Workspace, budget: Budget, layers: tuple[Layer, ...]
) -> tuple[dict[Layer, Pattern], list[AllocationRecord]]:
    """The pattern of every layer under a budget of bits, and the measurements behind it."""
    recipe = work.recipe
    quick = recipe.but(solver=QuickGrid()) if recipe.solver == "admm" or isinstance(recipe.solver, ADMM) else recipe
    target = TARGETS[recipe.target]
    teacher = None if work.scoring is None else target.teacher(work.scoring, True)

    def solve_fast(layer: Layer, statistics: Statistics, dense: Tensor, pattern: Pattern) -> list[Solution]:
        own = None if teacher is None else dense
        return solve_layer(Task(layer, pattern, dense, own, quick.for_layer(layer.name)), statistics)

    def planned() -> JsonObject:
        planner = BitPlanner(
            work.store.model,
            layers,
            work.chain,
            work.fit,
            work.heldout,
            solve_fast,
            work.request.seed,
            teacher,
            target.drift,
            work.callbacks.on_measure,
            work.checkpoint,
        )
        chosen, records, tried = planner.allocate(budget)
        choices = {layer.name: [*choice] for layer, choice in chosen.items()}
        return {"choices": choices, "records": [asdict(record) for record in records], "tried": tried}

    found = work.remembered("bits", planned)
    choices = {layer: found["choices"][layer.name] for layer in layers if layer.name in found["choices"]}
    counts = {bits: sum(own == bits for own, _ in choices.values()) for bits in BITS}
    sparse = sum(keep < layer.weights for layer, (_, keep) in choices.items())
    listed = ", ".join(f"{bits} bits in {count}" for bits, count in counts.items() if count)
    if found["tried"]:
        losses = ", ".join(
            f"{name} {loss:.4g}" for name, loss in sorted(found["tried"].items(), key=lambda one: one[1])
        )
        work.note(f"Divergence from the dense model on samples that no layer was solved for: {losses}.")
    work.note(f"Bits of {len(choices)} layers: {listed}; {sparse} of them with zeros.")
    # A layer that receives no input has no choice; it stays dense.
    patterns = dict(work.request.patterns)
    patterns |= {layer: budget.choice(bits, keep, layer.shape) for layer, (bits, keep) in choices.items()}
    return patterns, [allocation_record(record) for record in found["records"]]


def _takes_network_steps(work: Workspace) -> bool:
    blocks = work.decided.blocks
    return bool(work.chain) and blocks is not None and blocks.network_steps > 0


def scheduled(plan: dict[Layer, Pattern], rounds: Rounds, index: int) -> dict[Layer, Pattern]:
    """The patterns of round `index`: the plan, or less sparsity while the schedule is "cubic"."""
    last = rounds.count - 1
    if rounds.schedule != "cubic" or index in (0, last):
        return plan
    # Cubic growth from 0.72 of the requested sparsity (65 % on the way to 90 %), as measured best in LOG.md.
    share = 1 - 0.28 * (1 - (index - 1) / (last - 1)) ** 3
    return {layer: thinner(pattern, layer, share) for layer, pattern in plan.items()}


def decide_steps(work: Workspace) -> Decisions:
    """The decisions without block reconstruction if there is no chain, and with one kind of steps of the whole network.

    Text takes these steps block by block, and needs no further rounds. Other data take the fine-tuning, which alters
    and mixes samples, and the rounds before it, if the whole model is in memory.
    """
    before, text = work.decided, positions(work.fit.batches[0]) > 1
    if before.blocks is None:
        return before
    decided = one_kind_of_steps(before, bool(work.chain), text or not work.store.whole)
    if decided.blocks is None:
        work.note("No block reconstruction: the model does not run exactly along a chain of blocks.")
    elif decided.finetune is not before.finetune:
        kind = "Text" if text else "Block by block"
        work.note(f"{kind}: steps of the whole network, block by block, take the place of rounds and fine-tuning.")
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


def decide_growth(work: Workspace) -> Rounds:
    """The rounds after the first projection: growing sparsity where it did damage, otherwise no further rounds."""
    rounds = work.decided.rounds
    if rounds.schedule != "auto" or rounds.count == 1:
        return rounds
    assert work.scoring is not None
    damage = work.scoring.divergence()
    grow = damage > _DAMAGE and rounds.count > 2
    work.note(
        f"After the first projection the network is {damage:.4g} nats from the dense one: "
        + ("sparsity grows over the rounds." if grow else "no further rounds.")
        + (" They would pay, from three on." if damage > _DAMAGE and rounds.count == 2 else "")
    )
    decided = replace(rounds, schedule="cubic") if grow else Rounds(data=rounds.data)
    work.callbacks.on_rounds(decided.count)
    return decided
