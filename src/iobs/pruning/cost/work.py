"""Forecast of a run: how often it does each piece of its work, times the price of the piece.

The counts come from the recipe and from the sizes of the model and the data. The prices are measured on this machine
(`prices.measure`), or follow from the stated rates of another one (`machines.need`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from iobs.core.patterns import Pattern, Rate, SparseGrid, Unstructured
from iobs.core.structured import Structured
from iobs.pruning.calibration.gram import WIDE
from iobs.pruning.calibration.row_fisher import PRICED_TOKENS, PROBE, PROBE_TOKENS
from iobs.pruning.decisions import candidates, steps_with_trials
from iobs.pruning.descent.batches import samples_of_step
from iobs.pruning.descent.rates import block_trials, most_trial_steps, network_trials
from iobs.pruning.forecast import Forecast, Part
from iobs.pruning.layerwise.problem import (
    SHOWN_SAMPLES,
    can_share,
    couples,
    solves_by_rows,
    weighs_rows,
)
from iobs.pruning.layerwise.projection import TARGETS
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.allocate import ENOUGH_OUTPUTS, can_keep_grams
from iobs.pruning.plan.counts import LEVELS, under_pattern
from iobs.pruning.plan.curves import (
    CURVE_TOKENS,
    EVALUATION_SHARE,
    LEAST_TRIAL,
    TRIAL_SAMPLES,
    most_of_trial,
    recipe_of_curves,
    row_step,
    with_whole_curves,
)
from iobs.pruning.plan.widths import LEVELS as UNIT_LEVELS
from iobs.pruning.recipe import BlockFit, FineTune, LayerSettings, NetworkSolver, Recipe, Rounds
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Samples
from iobs.pruning.workspace import Decisions
from iobs.solvers.families import REFINEMENTS, SOLVERS
from iobs.solvers.protocols import SolveCost, declared_cost, usual_cost
from iobs.solvers.row_metric import coupled_operations
from iobs.solvers.successive_rounding import carried_operations

# Measured shares, in forward passes (LOG.md, "Times foretold"): of the whole network if nothing else is said.
STEP_PASSES = 4  # a gradient step on its samples: of the dense network, forward, and backward
NETWORK_STEP = 5.0  # a step of the whole network block by block, which runs every block forward twice
_LOSSES = 4  # of a round: dense and pruned, on the held-out samples and on as many others; half of it without these
_GROUP = 0.25  # of a block: the rest of it, which a group of layers with one input runs
_FISHER_PASSES = 5  # of a sample: forward twice, and backward to the outputs of layers and their inputs
_SAMPLED = 3.0  # a window that is sampled token by token
_GROUP_CALL = 0.0013  # seconds of a group and batch, besides its pass
_STEP_CALL = 0.0035  # seconds of a gradient step besides its passes: samples, copies, update
_COMPILER = 1.5  # seconds until the first optimizer of a process has loaded torch's compiler
_FRAGMENTS = 2  # samples that judge lie in all batches, a few in each: passes of one take so much longer
_UNFOLDED = 400  # price of an entry of a convolution's unfolded input, in multiply-adds of its Gram
_DAY = 24 * 3600  # seconds of solves that deserve a warning
_MASTER_BYTES = 19  # of a weight in a step of the whole network: masters and masks, there and back


@dataclass(frozen=True)
class LayerInput:
    """The input of a layer.

    Args:
        rows: rows of the input for a position of the data: 1 for text, the output's positions for a convolution.
        readers: number of the layers that read it, such as 3 for q, k and v.
        unfolded: it is the unfolded input of a convolution.
        added: outputs of the layer are added to a residual stream.
    """

    rows: float = 1.0
    readers: float = 1.0
    unfolded: bool = False
    added: bool = False


@dataclass(frozen=True)
class Prices:
    """Seconds of the pieces of the work on one machine.

    Args:
        forward: of a position of the data in a forward pass: through all blocks, or through a model without any.
        gram: of an operation in the products of layer inputs.
        solve: of an operation of a solve in float32.
        double: of an operation of a solve in float64.
        layer: of a solve besides its operations.
        loop: of an operation in loops over single entries; the default is that of float64 on all cores of a large CPU.
        update: of one weight in the update of an optimizer, besides the passes of the step.
        byte: of a byte of a block that is brought to the device; 0 if the model is there.
        stage: of a stage of a solver of the whole network; 0 if it is not known.
        head: of a position in what lies outside the blocks, such as the scores of a vocabulary.
        of_curves: prices of the solves that measure damages of layers; None: as those of the run.
        measured: of whole solves, by name of the layer; other layers are priced by their operations.
    """

    forward: float
    gram: float
    solve: float
    double: float
    layer: float = 0.0
    loop: float = 2e-11
    update: float = 0.0
    byte: float = 0.0
    stage: float = 0.0
    head: float = 0.0
    of_curves: Prices | None = None
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> float:
        """Seconds of a position of the data in a forward pass through the whole model."""
        return self.forward + self.head


@dataclass(frozen=True)
class Work:
    """Sizes that the time of a run depends on.

    Args:
        layers: the layers to prune.
        samples: number of calibration samples, including held-out ones.
        positions: of all these samples: tokens of text, otherwise usually one of each sample.
        held_out: share of the samples that is held out.
        blocks: number of blocks along which the model is run; 0 if it is run whole.
        step: positions of a gradient step on one rank.
        inputs: of the layers, by name; layers that are missing get no input.
        model_bytes: size of all weights.
        whole: the whole model is in memory.
        by_position: a model in memory gives an output for every position of text; False: one for each sample.
        priced: the outputs of the model have gradients, which price the errors of rows.
        fit: calibration samples, if there may be fine-tuning.
        ranks: number of processes that share the samples and the rows of layers.
        sites: number of the sites whose units are chosen.
        grouped: names of the layers whose columns are removed in groups.
        ruled: names of the layers that have a pattern of their own by a rule, and no part in an allocation.
        batches: number of batches of the samples as they are given; 0: as many as steps.
    """

    layers: Sequence[Layer]
    samples: int
    positions: int
    held_out: float
    blocks: int
    step: float
    inputs: Mapping[str, LayerInput]
    model_bytes: int = 0
    whole: bool = False
    by_position: bool = False
    priced: bool = True
    fit: Samples | None = None
    ranks: int = 1
    sites: int = 0
    grouped: Collection[str] = ()
    ruled: Collection[str] = ()
    batches: int = 0

    @property
    def length(self) -> float:
        """Positions of a sample."""
        return self.positions / self.samples

    @property
    def steps(self) -> int:
        """Gradient steps in a pass over the calibration samples."""
        return max(1, math.ceil(self.positions * (1 - self.held_out) / self.step / self.ranks))

    @property
    def weights(self) -> int:
        """Number of weights in the layers."""
        return sum(layer.weights for layer in self.layers)

    @property
    def groups(self) -> float:
        """Number of groups of layers with one input; the experts in one parameter are one group."""
        stacks = {layer.key for layer in self.layers if layer.expert is not None and layer.name in self.inputs}
        single = [layer.name for layer in self.layers if layer.expert is None]
        return len(stacks) + sum(1 / self.inputs[name].readers for name in single if name in self.inputs)

    def swept(self, recipe: Recipe) -> Work:
        """The work with the samples that are run."""
        few = run_samples(recipe, self.layers, self.samples, self.held_out, self.ranks)
        return replace(self, samples=few, positions=round(few * self.length))


def stated_sizes(model: nn.Module, *names: str) -> tuple[int, ...]:
    """Sizes that the configuration of a model states, such as its `vocab_size`; 0 for those that it does not."""
    config = getattr(model, "config", None)
    return tuple(int(getattr(config, name, 0) or 0) for name in names)


def run_samples(recipe: Recipe, layers: Sequence[Layer], samples: int, held_out: float, ranks: int) -> int:
    """The number of samples that are run: a few if the result depends on no data; experts need all."""
    if not recipe.reads_weights_only or ranks > 1 or any(layer.expert is not None for layer in layers):
        return samples
    return min(samples, SHOWN_SAMPLES * (2 if held_out else 1))


def inputs_by_width(layers: Sequence[Layer], blocks: int) -> dict[str, LayerInput]:
    """The inputs of layers of a language model that is not here: at most three of one width in every block.

    These are the inputs of the attention, of its output, and of the perceptron. An expert gets two tokens of each of
    its kind.
    """
    widths = [layer.shape[1] for layer in layers]
    counts = {columns: widths.count(columns) for columns in set(widths)}
    experts = max((layer.expert + 1 for layer in layers if layer.expert is not None), default=0)

    def entry(layer: Layer) -> LayerInput:
        if layer.expert is not None:
            return LayerInput(min(1.0, 2 / experts))
        count = counts[layer.shape[1]]
        return LayerInput(readers=count / (blocks * min(3, max(1, count // blocks))))

    return {layer.name: entry(layer) for layer in layers}


def solver_cost(settings: LayerSettings, rows: int, columns: int, grouped: bool = False) -> SolveCost:
    """The declared cost of the solver and the refinement of a layer, for a matrix; of groups of columns the usual."""
    if grouped:
        return usual_cost(rows, columns)
    solver, refine = (
        table[choice]() if isinstance(choice, str) and choice in table else choice
        for table, choice in ((SOLVERS, settings.solver), (REFINEMENTS, settings.refine))
    )
    cost = declared_cost(solver, rows, columns)
    if refine is None:
        return cost
    more = declared_cost(refine, rows, columns)
    return SolveCost(cost.operations + more.operations, max(cost.bytes, more.bytes), cost.loops + more.loops)


@dataclass(frozen=True)
class Solves:
    """Solves of layers with the same settings.

    Args:
        settings: solver and refinement.
        prices: of a machine.
        pairs: a dense model runs beside the pruned one.
        held_out: held-out samples have Grams of their own.
        ranks: number of processes that divide the rows of a layer, if its solver can, or else the layers of a group.
        grouped: columns are removed in groups.
        together: operations of solving all rows of a matrix (rows, columns) together; None: they are not.
    """

    settings: LayerSettings
    prices: Prices
    pairs: bool = False
    held_out: bool = False
    ranks: int = 1
    grouped: bool = False
    together: Callable[[float, int], float] | None = None

    def operations(self, rows: float, columns: int) -> tuple[float, float, float]:
        """Operations in float32, in float64, and in loops: of the problem, its solution, and its errors."""
        cost = solver_cost(self.settings, max(1, round(rows)), columns, self.grouped)
        product, cube = 2.0 * rows * columns**2, columns**3 / 3
        in_gram = product * ((4 if self.pairs else 2) + (2 if self.held_out else 0))
        if self.pairs and self.held_out:
            in_gram += 4 * (cube + 2 * product)  # ridge regressions of the drift, of which about four are tried
        centre = cube + product if self.pairs else 0.0
        if columns >= WIDE:
            return cost.operations + in_gram, centre, cost.loops
        return cost.operations, in_gram + centre, cost.loops

    def seconds(self, layer: Layer, readers: float = 1.0, rows: float | None = None) -> float:
        """Time of a layer, whose factorisations serve all readers of its input; `rows` of it alone."""
        rows_of_group = layer.shape[0] / layer.groups
        rows = rows_of_group if rows is None else rows
        prices, divided = self.prices, solves_by_rows(self.settings)
        together = 0.0 if self.together is None else self.together(rows, layer.shape[1])
        if layer.name in prices.measured:
            seconds = prices.measured[layer.name] * layer.groups * rows / rows_of_group + together * prices.solve
            return seconds / max(1.0, self.ranks if divided else min(self.ranks, readers))
        single, double, loops = self.operations(rows * readers / (self.ranks if divided else 1), layer.shape[1])
        single += together * readers
        seconds = single * prices.solve + double * prices.double + loops * prices.loop
        seconds = prices.layer + layer.groups * seconds / readers
        return seconds if divided else seconds / max(1.0, min(self.ranks, readers))


def warning_of_days(layers: Iterable[Layer], recipe: Recipe) -> str | None:
    """A warning before a run whose solves take days in loops over single entries; None for other runs."""
    loops = sum(solver_cost(recipe.for_layer(layer.name), *layer.shape).loops for layer in layers)
    days = loops * Prices.loop / current().size / _DAY
    if days < 1:
        return None
    return (
        f"Warning: the solves take rows x columns^3 operations, at least {days:.0f} days for these layers. "
        "Take --solver admm with --set solver.budget=best in place of obc and of refine=swap, or fewer layers."
    )


def forecast(
    workload: Work,
    prices: Prices,
    recipe: Recipe,
    decided: Decisions,
    pattern: Pattern | None = None,
    sampled: int = 0,
    sampled_by_steps: int = 0,
) -> Forecast:
    """Forecast the work of a whole run.

    Args:
        workload: sizes of the model and the data.
        prices: of the machine.
        recipe: how to prune.
        decided: rounds and gradient steps, as far as they are decided.
        pattern: of the run, which decides how sparsity is allocated; None: zeros anywhere.
        sampled: number of windows of text that are sampled from the dense model before the first projection.
        sampled_by_steps: of those that gradient steps of fine-tuning sample, if there are any.
    """
    if decided.rounds.schedule == "auto":  # which seldom adds rounds
        decided = replace(decided, rounds=Rounds())
    if recipe.network_solver is not None:
        return _of_whole_network(workload, prices, recipe.network_solver, decided)
    workload, pattern = workload.swept(recipe), pattern or Unstructured(0.5)
    fit = decided.blocks.within(workload.steps) if decided.blocks is not None and workload.blocks else None
    rounds, count = decided.rounds.count, len(workload.layers)
    phases, weights = _round(workload, prices, recipe, pattern, fit)
    if rounds > 1:
        later, _ = _round(workload, prices, recipe.of_later_rounds, pattern, None)
        phases = {
            name: (phases.get(name, 0.0) + (rounds - 1) * later.get(name, 0.0)) / rounds for name in {**phases, **later}
        }
    mean = sum(phases.values())
    steps = fit is not None or decided.finetune is not None or decided.rounds.finetune is not None
    parts = (
        *([Part("first step", 1, _COMPILER, once=True)] if steps and "torch._dynamo" not in sys.modules else []),
        *_allocation(workload, prices, recipe, pattern, fit),
        *_block_rates(workload, prices, pattern, fit),
        Part("layers", rounds * count, mean, phases=phases),
        *([Part("losses", rounds, _losses(workload, prices))] if workload.whole else []),
        *_network_steps(workload, prices, fit),
        *_fine_tuning(workload, prices, decided),
    )
    if decided.finetune is not None or decided.rounds.finetune is not None:
        sampled += sampled_by_steps
    if sampled:
        seconds = _SAMPLED * prices.whole * workload.length
        parts = (*parts, Part("windows of sampled text", sampled, seconds, once=True))
    return Forecast(parts, weights)


def _of_whole_network(workload: Work, prices: Prices, solver: NetworkSolver, decided: Decisions) -> Forecast:
    """The stages of a solver of the whole network, losses, and gradient steps; nothing without labels."""
    if not prices.stage:
        return Forecast(())
    rounds = decided.rounds.count
    stages = Part("stages of the whole network", rounds * solver.stages, prices.stage)
    losses = Part("losses", rounds, _losses(workload, prices))
    return Forecast((stages, losses, *_fine_tuning(workload, prices, decided)))


def _round(
    workload: Work, prices: Prices, recipe: Recipe, pattern: Pattern, fit: BlockFit | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean seconds of a layer in one round by phase, and the relative time of each layer."""
    shared, by_layer = _layers(workload, prices, recipe, pattern, fit)
    count = len(workload.layers)
    phases = {name: seconds / count for name, seconds in shared.items() if seconds}
    for name in ("Grams", "solves"):
        phases[name] = sum(entry[name] for entry in by_layer.values()) / count
    mean, rest = sum(phases.values()), sum(shared.values()) / count
    return phases, {name: (rest + sum(entry.values())) / mean for name, entry in by_layer.items()}


def _one_pass(workload: Work, prices: Prices) -> float:
    """Seconds of a forward pass of all samples, on one rank."""
    return prices.forward * workload.positions / workload.ranks


def _losses(workload: Work, prices: Prices) -> float:
    """Seconds of the losses of a round, on one rank."""
    return _LOSSES * (workload.held_out or 0.5) * prices.whole * workload.positions / workload.ranks


def _passes_of_groups(workload: Work, prices: Prices, in_steps: bool = False) -> float:
    """Seconds of the passes that give all groups of layers with one input their Gram, of one stream.

    Along a chain a group runs the rest of its own block, from the layers that were pruned last. Otherwise it runs half
    of the whole model. The batches are those of gradient steps (`in_steps`), or as they are given.
    """
    if not workload.blocks:
        return (1 + workload.groups / 2) * _one_pass(workload, prices)
    calls = workload.positions / workload.step / workload.ranks
    if workload.batches and not in_steps:
        calls = workload.batches
    return workload.groups * (_GROUP * _one_pass(workload, prices) / workload.blocks + _GROUP_CALL * calls)


def _gram_seconds(workload: Work, prices: Prices, layer: Layer, products: float, positions: float) -> float:
    """Seconds of the Grams of a layer, its share of those of all readers of its input."""
    entry = workload.inputs.get(layer.name)
    if entry is None:
        return 0.0
    columns = layer.shape[1]
    width = layer.groups * columns * (columns + (_UNFOLDED if entry.unfolded else 0))
    return 2.0 * prices.gram * products * positions / workload.ranks * entry.rows * width / entry.readers


def _layers(
    workload: Work, prices: Prices, recipe: Recipe, pattern: Pattern, fit: BlockFit | None
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Seconds of one round: by phase for all layers together, and by name and phase for single layers."""
    pairs, drifts = recipe.target != "layer", TARGETS[recipe.target].drift and recipe.inputs != "dense"
    weighed = recipe.weighs_rows_of(workload.length)
    streams = 2 if pairs or recipe.inputs == "dense" else 1
    masks = 1 if fit is None else fit.masks  # projections, of which the first alone compares with the dense model
    one_pass = _one_pass(workload, prices)
    shared = {
        "reading and writing": (streams + 1) * workload.model_bytes * prices.byte,
        "forward passes": (streams + masks - 1) * _passes_of_groups(workload, prices, fit is not None)
        + (0 if fit else streams) * one_pass,
    }
    if fit is not None:
        taken = fit.window * fit.steps + (fit.masks - 1) * fit.between
        judged = 2 * (fit.window + masks - 1) * (workload.held_out or 1.0)
        step = STEP_PASSES * prices.forward * workload.step + prices.update * workload.weights
        shared["steps of blocks"] = taken * step + judged * one_pass
        shared["steps of blocks"] += taken / fit.window * workload.blocks * _STEP_CALL
        shared["forward passes"] += (fit.window - 0.5) * one_pass
        shared["outputs of dense blocks"] = one_pass
    together, by_layer = carried_operations if isinstance(pattern, Rate) else coupled_operations, {}
    for layer in workload.layers:
        settings = recipe.for_layer(layer.name)
        readers = workload.inputs.get(layer.name, LayerInput()).readers
        solves = Solves(
            settings,
            prices,
            held_out=workload.held_out > 0,
            ranks=workload.ranks,
            grouped=layer.name in workload.grouped,
            together=together if weighed and couples(layer, settings, pattern) else None,
        )
        first, later = (replace(solves, pairs=compares).seconds(layer, readers) for compares in (pairs, False))
        products = (2 * streams - 1) + masks - 1.0
        if drifts and workload.inputs.get(layer.name, LayerInput()).added:  # one product with targets, not two
            products += layer.shape[0] / layer.groups / layer.shape[1] - 2
        by_layer[layer.name] = {
            "Grams": _gram_seconds(workload, prices, layer, products, workload.positions),
            "solves": first + (masks - 1) * later,
        }
    return shared, by_layer


def _allocation(workload: Work, prices: Prices, recipe: Recipe, pattern: Pattern, fit: BlockFit | None) -> list[Part]:
    """The prices of rows, from one backward pass, the damage curves of all layers, and the search."""
    if isinstance(pattern, Structured):
        return _unit_curves(workload, prices, recipe, pattern)
    solves, single = 0.0, 0.0
    allocation = under_pattern(recipe.division, pattern)
    divided = [layer for layer in workload.layers if layer.name not in workload.ruled]
    if not divided or (allocation.criterion == "auto" and not workload.priced):
        allocation = replace(allocation, criterion="uniform")
    workload = replace(workload, layers=divided or workload.layers)
    if allocation.criterion == "uniform" and not weighs_rows(recipe, pattern):
        return []
    parts = [_row_prices(workload, prices)]
    if allocation.criterion == "uniform":
        return parts
    fast, whole = recipe_of_curves(recipe), {*with_whole_curves([*workload.layers])}
    tokens, grams = min(workload.positions, CURVE_TOKENS), 0.0
    judges = _judges_of_trials(workload, TRIAL_SAMPLES // len(workload.layers))
    for layer in workload.layers:
        rows = layer.shape[0] / layer.groups / row_step(layer.shape[0], layer.groups)
        settings, levels = fast.for_layer(layer.name), len(LEVELS) if layer in whole else 1
        of_layer = Solves(settings, prices.of_curves or prices)
        single += of_layer.seconds(layer, rows=rows)
        if workload.ranks == 1 and can_share([layer] * levels, [settings] * levels):
            solves += of_layer.seconds(layer, rows=rows * levels)
        else:
            solves += of_layer.seconds(layer, rows=rows) * levels / min(workload.ranks, levels)
        if judges:  # a trial of the layer with all its rows
            solves += of_layer.seconds(layer) + _FRAGMENTS * judges * prices.whole
        grams += _gram_seconds(workload, prices, layer, 1, tokens)
    passes = (_passes_of_groups(workload, prices) + _one_pass(workload, prices)) * tokens / workload.positions
    # Bits are divided by the spreads of layers alone, without solves.
    mean = ((0.0 if isinstance(pattern, Rate) else solves) + grams + passes) / len(workload.layers)
    task = "spreads of layers" if isinstance(pattern, Rate) else "error curves of layers"
    parts.append(Part(task, len(workload.layers), mean, once=True, phases={"allocation": mean}))
    judges = min(PROBE, PROBE_TOKENS / workload.length, _judges(workload))
    searched = allocation.criterion == "search" or (
        allocation.criterion == "auto"
        and workload.whole
        and not (fit and fit.network_steps)
        and can_keep_grams(tuple(workload.layers))
        and judges * workload.length >= ENOUGH_OUTPUTS
    )
    if searched and allocation.generations:
        move = 2 * single / len(workload.layers) + judges * prices.whole * workload.length
        search = "moves of weights between layers"
        parts.append(Part(search, allocation.generations, move, once=True, phases={"allocation": move}))
    return parts


def _unit_curves(workload: Work, prices: Prices, recipe: Recipe, pattern: Structured) -> list[Part]:
    """The prices of rows, and the damage of every width of all sites: one removal of all units, and a few trials."""
    if pattern.whole or recipe.division.criterion == "uniform" or not workload.sites:
        return []
    share = min(1.0, CURVE_TOKENS / workload.positions)
    levels = len(UNIT_LEVELS)
    trials = 2 * TRIAL_SAMPLES // (levels * workload.sites)
    judges = _judges_of_trials(workload, trials)
    seconds = prices.whole * workload.length * _FRAGMENTS * judges * (workload.sites * levels + 1)
    seconds += share * (_passes_of_groups(workload, prices) + _one_pass(workload, prices))
    for layer in workload.layers:
        seconds += _gram_seconds(workload, prices, layer, 1, share * workload.positions)
        seconds += 2 * Solves(recipe.for_layer(layer.name), prices, grouped=True).seconds(layer)  # no unit is left
    mean = seconds / workload.sites
    effects = Part("effects of widths", workload.sites, mean, once=True, phases={"allocation": mean})
    return [_row_prices(workload, prices), effects]


def _row_prices(workload: Work, prices: Prices) -> Part:
    """The prices of rows, from one backward pass of the samples of this rank that rows are priced on."""
    fit = workload.samples * (1 - workload.held_out)
    samples = min(PROBE, PRICED_TOKENS / workload.length, fit) / workload.ranks
    seconds = _FISHER_PASSES * prices.whole * workload.length * samples
    return Part("prices of rows", 1, seconds, once=True, phases={"allocation": seconds})


def _judges_of_trials(workload: Work, most: int) -> float:
    """The number of samples that judge each of some trials, at most `most`; 0 if they would say nothing."""
    needed = not (workload.by_position and workload.priced)
    possible = workload.whole and needed and most >= LEAST_TRIAL
    return min(most, most_of_trial(workload.length), _judges(workload)) if possible else 0.0


def _judges(workload: Work) -> float:
    """The number of samples that no layer is solved for."""
    return (EVALUATION_SHARE * (1 - workload.held_out) + workload.held_out) * workload.samples


def _block_rates(workload: Work, prices: Prices, pattern: Pattern, fit: BlockFit | None) -> list[Part]:
    """The trials of the rate of block reconstruction: on the first window, and again with values on a grid."""
    if fit is None or fit.lr != "auto" or not fit.steps:
        return []
    window = min(1.0, fit.window / workload.blocks)
    step = STEP_PASSES * prices.forward * workload.step + prices.update * workload.weights
    trials = block_trials(fit)
    trial = window * (trials.steps * step + (workload.held_out or 1.0) * _one_pass(workload, prices))
    trial += trials.steps * _STEP_CALL
    chosen = 2 if isinstance(pattern, SparseGrid) and fit.fits_levels else 1  # only the last projection has a grid
    return [Part(trials.name, chosen * len(trials.rates), trial, once=True, phases={"steps of blocks": trial})]


def _network_steps(workload: Work, prices: Prices, fit: BlockFit | None) -> list[Part]:
    """The steps of the whole network, block by block, and the trials of their rate."""
    if fit is None or not fit.network_steps:
        return []
    step = NETWORK_STEP * prices.whole * workload.step + prices.update * workload.weights + _STEP_CALL * workload.blocks
    step += prices.byte * (2 * workload.model_bytes + _MASTER_BYTES * workload.weights)
    phase = "steps of the network"
    parts = [Part("steps of the whole network", fit.network_steps, step, phases={phase: step})]
    if fit.network_lr == "auto":
        trials = network_trials(fit)
        trial = trials.steps * step
        parts.insert(0, Part(trials.name, len(trials.rates), trial, once=True, phases={phase: trial}))
    return parts


def _fine_tuning(workload: Work, prices: Prices, decided: Decisions) -> list[Part]:
    """The trials of learning rates, the steps between rounds, and the fine-tuning after the last round."""
    if workload.fit is None:
        return []
    fit, parts = workload.fit, []

    def seconds(step: FineTune) -> float:
        return STEP_PASSES * prices.whole * workload.length * samples_of_step(step, fit) + _STEP_CALL

    between, after = decided.rounds.finetune, decided.finetune
    trials = [(most_trial_steps(step), seconds(step)) for step in steps_with_trials(decided)]
    if trials:
        steps = sum(count for count, _ in trials)
        mean = sum(count * each for count, each in trials) / steps
        parts.append(Part("trial", steps, mean, once=True))
    if between is not None:  # growing sparsity takes no steps after the first projection, which it undoes
        runs = decided.rounds.count - (2 if decided.rounds.schedule == "cubic" else 1)
        parts.append(Part("steps", runs * between.steps, seconds(between)))
    if after is not None:
        steps = sum(step.steps for step in candidates(decided))
        parts.append(Part("fine-tuning", steps, seconds(after)))
    return parts
