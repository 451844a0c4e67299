"""Time of the phases of a run, from counted operations and bytes, and the rates of a machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from iobs.pruning.allocation.kin import MEASURED_BLOCKS, measured_shares
from iobs.pruning.allocation.measurements import row_step
from iobs.pruning.allocation.sensitivity import CURVE_LEVELS, CURVE_TOKENS, evaluation_share
from iobs.pruning.cost.loads import (
    Load,
    Matrix,
    Rates,
    drift_load,
    error_load,
    in_gram_dtype,
    is_admm,
    problem_load,
    search_load,
    sum_load,
)
from iobs.pruning.descent.rates import block_trials, network_trials
from iobs.pruning.layerwise.problem import SHOWN_SAMPLES, solves_by_rows
from iobs.pruning.recipe import BlockFit, Recipe, as_allocation
from iobs.solvers.admm import ADMM

_INPUTS = 3  # most inputs of one width in a block: of the attention, of its output, and of the perceptron
_TRIED = 3  # densities at which an allocation runs a block
_TRIAL_SAMPLES = 32  # of such a run
_UPDATE_BYTES = 80  # of one weight in a step of Adam: gradient, master, moments, mask, and the copy into the model
_MASTER_BYTES = 2 * 5 + 4 + 4 + 1  # of one weight: twice its master and mask, then the master, and back, and the mask
_LOGIT_BYTES = 60  # of one logit in a divergence and its gradient


@dataclass(frozen=True)
class Shape:
    """A weight matrix without weights."""

    rows: int
    columns: int
    groups: int = 1
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def weights(self) -> int:
        """Number of entries."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Work:
    """Sizes that the time of a run depends on.

    Args:
        layers: the layers to prune.
        tokens: number of calibration tokens, including held-out ones.
        model_bytes: size of all weights.
        ranks: number of processes, each with its share of the tokens and of the rows of a layer. With solvers that
            cannot divide rows, layers with one input are solved at the same time, one on each rank.
        vocabulary: number of outputs per token, of a head that a reconstruction runs.
        batch: tokens of a forward pass, besides those of a reconstruction.
        samples: number of samples of these tokens.
        held_out: share of the tokens that is held out, and has Grams of its own.
        hidden: width of the residual stream; 0: the least number of columns of a layer.
        step: tokens of a gradient step of a reconstruction, and of its forward passes, on one rank.
        links: number of blocks of the chain; 0: as many as `blocks`.
    """

    layers: Sequence[Matrix]
    tokens: int
    model_bytes: int
    ranks: int = 1
    vocabulary: int = 0
    batch: int = 2048
    samples: int = 0
    held_out: float = 0.0
    hidden: int = 0
    step: float = 1024.0
    links: int = 0

    @property
    def steps(self) -> int:
        """Number of gradient steps in a pass over the calibration samples."""
        return max(1, math.ceil(self.tokens * (1 - self.held_out) / self.step / self.ranks))

    @property
    def judged(self) -> float:
        """Tokens of one rank that judge a fit: held-out ones, or all if none are held out."""
        return self.tokens * (self.held_out or 1.0) / self.ranks

    @property
    def weights(self) -> int:
        """Number of weights in the layers."""
        return sum(layer.weights for layer in self.layers)

    @property
    def width(self) -> int:
        """Columns of the residual stream."""
        return self.hidden or min(layer.shape[1] for layer in self.layers)

    @property
    def blocks(self) -> int:
        """Number of blocks: each has at least one layer of its rarest width of input, or one stack of experts.

        It is 1 if only experts behind the first are pruned.
        """
        widths = [layer.shape[1] for layer in self.layers if not layer.expert]
        return max(1, min(map(widths.count, set(widths)), default=1))

    @property
    def inputs(self) -> dict[int, int]:
        """Number of different inputs of layers, by their columns; layers such as q, k and v share one."""
        widths = [layer.shape[1] for layer in self.layers]
        return {columns: self.blocks * min(_INPUTS, widths.count(columns) // self.blocks) for columns in set(widths)}


def phases(work: Work, recipe: Recipe, rates: Rates) -> dict[str, float]:
    """Seconds of every phase of one round, by name; phases that the recipe does not have are left out."""
    work = swept(work, recipe)
    fit = recipe.blocks and recipe.blocks.within(work.steps)
    projections = 1 if fit is None else fit.masks
    streams = 1 if recipe.target == "layer" and fit is None else 2
    forward = Load(block=2.0 * work.tokens * work.weights) * (1 / work.ranks)
    found = {
        "reading and writing": (streams + 1) * work.model_bytes / rates.transfer,
        "Grams": projections * gram_load(work, recipe).seconds(rates),
        "forward passes": (forward * (3.0 * projections)).seconds(rates),
        "solves": projections * solve_load(work, recipe).seconds(rates),
    }
    if as_allocation(recipe.allocation).criterion != "uniform":
        found["allocation"] = allocation_load(work, recipe).seconds(rates)
    if fit is not None:
        found["steps of blocks"] = fit_load(work, fit).seconds(rates)
        found["outputs of dense blocks"] = forward.seconds(rates)
    if fit is not None and fit.network_steps:
        found["steps of the network"] = network_seconds(work, fit, rates)
    return {name: seconds for name, seconds in found.items() if seconds}


def swept(work: Work, recipe: Recipe) -> Work:
    """The work with the samples that are run: a few if the result depends on no data; experts need all."""
    if not recipe.reads_weights_only or work.ranks > 1 or any(layer.expert is not None for layer in work.layers):
        return work
    few = SHOWN_SAMPLES * work.tokens // max(1, work.samples) * (2 if work.held_out else 1)
    return replace(work, tokens=min(work.tokens, few) if work.samples else work.tokens)


def gram_load(work: Work, recipe: Recipe) -> Load:
    """The Grams of every input, and the drift of the layers that write into the residual stream."""
    pairs = recipe.target != "layer"
    tokens = work.tokens / work.ranks
    found, passes = Load(), tokens / (work.batch if recipe.blocks is None else work.step)
    for columns, count in work.inputs.items():
        found += sum_load(columns, tokens, 3 if pairs else 1, passes) * count
    if recipe.target == "residual":
        for layer in work.layers:
            if layer.shape[0] == work.width:
                found += drift_load(layer, tokens, passes)
    return found


def solve_load(work: Work, recipe: Recipe) -> Load:
    """The solves of all layers, and their errors for the report."""
    pairs = recipe.target != "layer"
    ranks = work.ranks if solves_by_rows(recipe) else 1
    errors = 2 if work.held_out else 1
    solves, measures = Load(), Load()
    for layer in work.layers:
        solves += problem_load(layer, pairs, ranks) + search_load(layer, recipe, ranks)
        measures += error_load(layer, pairs, errors, work.ranks)
        if pairs and work.held_out:
            solves += _regression_load(layer)
    return solves * (1.0 if ranks == work.ranks else 1 / _speed_up(work)) + measures


def _regression_load(layer: Matrix) -> Load:
    """Ridge regressions of the drift, of which held-out samples choose one: about four are tried."""
    rows, columns = layer.shape
    return in_gram_dtype(layer, 4 * (columns**3 / 3 + 4.0 * rows * columns**2))


def allocation_load(work: Work, recipe: Recipe) -> Load:
    """An allocation by block: curves of the measured layers, a pass for their Grams, and runs of blocks."""
    fast = recipe.but(solver=ADMM("fast")) if is_admm(recipe) else recipe
    levels = math.ceil(CURVE_LEVELS / work.ranks)  # ranks share the points of a curve
    tokens = min(work.tokens, 2 * CURVE_TOKENS) / work.ranks
    found, passes = Load(), tokens / work.batch
    for columns, count in work.inputs.items():
        found += sum_load(columns, tokens, 1, passes) * (count * min(1.0, MEASURED_BLOCKS / work.blocks))
    shares = measured_shares(work.layers, work.blocks)
    for layer, share in zip(work.layers, shares, strict=True):
        step = row_step(layer.shape[0], layer.groups)
        sampled = levels * (1 - _TRIED / CURVE_LEVELS)  # errors without a trial
        for divisor, points in ((1, float(levels) - sampled), (step, sampled)):
            found += (search_load(layer, fast, divisor) + problem_load(layer, False, divisor)) * (points * share)
        found += error_load(layer, False, CURVE_LEVELS) * (0.5 * share)  # the energy of the target is known
    length = work.tokens / work.samples if work.samples else 1.0
    judging = (1 - work.held_out) * evaluation_share(work.held_out)
    judged = min(judging * work.tokens, _TRIAL_SAMPLES * length) / work.ranks
    runs = _TRIED * sum(shares) / work.blocks
    return found + Load(block=2.0 * work.weights * (runs * judged + 3.0 * tokens))


def fit_load(work: Work, fit: BlockFit) -> Load:
    """Steps of all windows, their trials, the losses that judge them, and the passes to the next window."""
    links = work.links or work.blocks
    trials = block_trial_steps(fit) / links
    steps = _block_steps(fit) + trials
    judging = 2.0 * (fit.window + fit.masks - 1) + len(block_trials(fit).rates) * (trials > 0) / links
    moved = fit.window * work.tokens / work.ranks
    found = Load(block=steps * 6.0 * work.step * work.weights, moved=steps * _UPDATE_BYTES * work.weights)
    found += Load(block=(judging * work.judged + moved) * 2.0 * work.weights)
    return found + (_head_load(work, fit.steps, work.judged) if fit.last == "kl" else Load())


def _head_load(work: Work, steps: int, tokens: float) -> Load:
    """Steps of the last window through the head, and the losses before and after them."""
    head = float(work.vocabulary * work.width)
    through = steps * work.step
    moved = _LOGIT_BYTES * work.vocabulary * (through + 2 * tokens)
    return Load(block=head * (6.0 * through + 2 * 4.0 * tokens), moved=moved)


def network_seconds(work: Work, fit: BlockFit, rates: Rates) -> float:
    """Seconds of the steps of the whole network, and of the trials of their rate.

    A step runs every block forward, once more forward, and backward (twice as much), and brings its weights in twice.
    Masters and masks follow them, from main memory or from files.
    """
    count = network_step_count(fit)
    step = Load(block=8.0 * work.step * work.weights, moved=_UPDATE_BYTES * work.weights)
    step += _head_load(work, 1, 0.0)
    return count * (step.seconds(rates) + (2 * work.model_bytes + _MASTER_BYTES * work.weights) / rates.transfer)


def network_step_count(fit: BlockFit) -> int:
    """Number of the steps of the whole network, with the trials of their rate."""
    return fit.network_steps + (network_trials(fit).most_steps if fit.network_lr == "auto" else 0)


def _block_steps(fit: BlockFit) -> float:
    """Gradient steps that each block takes part in, besides the trials of the rate on the first one."""
    return fit.window * fit.steps + (fit.masks - 1) * fit.between


def block_trial_steps(fit: BlockFit) -> int:
    """Number of the steps in trials of the rate of block reconstruction, all on the first window."""
    return block_trials(fit).most_steps if fit.lr == "auto" else 0


def _speed_up(work: Work) -> float:
    """Factor by which ranks shorten solves that cannot be divided: layers with one input share their turn."""
    sizes: dict[int, int] = {}
    for layer in work.layers:
        sizes[layer.shape[1]] = sizes.get(layer.shape[1], 0) + 1
    blocks = max(1, min(sizes.values()))
    # Of the layers of a block with equal columns one, the output projection, has an input of its own.
    turns = sum(-(-max(1, count // blocks - 1) // work.ranks) + (count > blocks) for count in sizes.values())
    return max(1.0, len(work.layers) / blocks / max(1, turns))
