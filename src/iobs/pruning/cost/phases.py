"""Time of the phases of a run, from counted floating-point operations and bytes, and the rates of a machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from iobs.pruning.allocation.sensitivity import CURVE_LEVELS, CURVE_TOKENS
from iobs.pruning.calibration.gram import WIDE
from iobs.pruning.layerwise.problem import solves_by_rows
from iobs.pruning.recipe import BlockFit, Recipe, as_allocation
from iobs.pruning.reconstruction.walk import NETWORK_RATES, RATES, network_trial_steps, trial_steps
from iobs.solvers.admm import ADMM, SCHEDULES

STEP_TOKENS = 1024  # of one gradient step of a reconstruction


class Matrix(Protocol):
    """A weight matrix, of which only the shape is needed."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    @property
    def weights(self) -> int:
        """Number of entries."""
        ...

    @property
    def groups(self) -> int:
        """Number of groups of a convolution, otherwise 1."""
        ...


@dataclass(frozen=True)
class Shape:
    """A weight matrix without weights."""

    rows: int
    columns: int
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    @property
    def weights(self) -> int:
        """Number of entries."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Rates:
    """Speeds of a machine.

    Args:
        product: floating-point operations per second of a product in the dtype of the blocks.
        solve: floating-point operations per second of a product in float32, as Grams and solvers need it.
        transfer: bytes per second from the place of the weights to the device; infinite if they stay there.
    """

    product: float
    solve: float
    transfer: float = float("inf")


@dataclass(frozen=True)
class Work:
    """Sizes that the time of a run depends on.

    Args:
        layers: the layers to prune.
        tokens: number of calibration tokens, including held-out ones.
        model_bytes: size of all weights.
        ranks: number of processes, each with its share of the tokens and of the rows of a layer; with solvers that
            cannot divide rows, layers with one input are solved at a time, one on each rank.
    """

    layers: Sequence[Matrix]
    tokens: int
    model_bytes: int
    ranks: int = 1

    @property
    def weights(self) -> int:
        """Number of weights in the layers."""
        return sum(layer.weights for layer in self.layers)

    @property
    def blocks(self) -> int:
        """Number of blocks: each has at least one layer of its rarest width of input."""
        widths = [layer.shape[1] for layer in self.layers]
        return max(1, min(map(widths.count, set(widths))))


def is_admm(recipe: Recipe) -> bool:
    """Check that the solver is ADMM, whose memory and time differ from those of the others."""
    return recipe.solver == "admm" or isinstance(recipe.solver, ADMM)


def phases(work: Work, recipe: Recipe, rates: Rates) -> dict[str, float]:
    """Seconds of every phase of one round, by name; phases that the recipe does not have are left out."""
    fit = recipe.blocks and recipe.blocks.within(math.ceil(work.tokens / STEP_TOKENS / work.ranks))
    projections = 1 if fit is None else fit.masks
    streams = 1 if recipe.target == "layer" and fit is None else 2
    ranks = work.ranks if solves_by_rows(recipe) else 1
    solves = sum(solve_operations(layer, recipe, ranks) for layer in work.layers)
    if ranks < work.ranks:
        solves /= _speed_up(work)
    found = {
        "reading and writing": (streams + 1) * work.model_bytes / rates.transfer,
        "Grams": projections * sum(2.0 * work.tokens * layer.shape[1] ** 2 for layer in work.layers) / rates.solve,
        "forward passes": 6.0 * projections * work.tokens * work.weights / rates.product,
        "solves": projections * solves / rates.solve,
    }
    for name in ("Grams", "forward passes"):
        found[name] /= work.ranks
    if as_allocation(recipe.allocation).criterion != "uniform":
        found["allocation"] = allocation_seconds(work, recipe, rates)
    if fit is not None:
        steps = _block_steps(fit) + block_trial_steps(fit) / work.blocks
        found["steps of blocks"] = steps * 6.0 * STEP_TOKENS * work.weights / rates.product
        found["outputs of dense blocks"] = 2.0 * work.tokens * work.weights / rates.product / work.ranks
    if fit is not None and fit.network_steps:
        found["steps of the network"] = network_seconds(work, fit, rates)
    return {name: seconds for name, seconds in found.items() if seconds}


def allocation_seconds(work: Work, recipe: Recipe, rates: Rates) -> float:
    """Seconds of an allocation by block: curves of every layer, and one pass for their Grams."""
    fast = recipe.but(solver=ADMM("fast")) if is_admm(recipe) else recipe
    turns = math.ceil(CURVE_LEVELS / work.ranks)  # ranks share the points of a curve
    solves = turns * sum(solve_operations(layer, fast) for layer in work.layers)
    tokens = min(work.tokens, 2 * CURVE_TOKENS) / work.ranks
    grams = sum(2.0 * tokens * layer.shape[1] ** 2 for layer in work.layers)
    return (solves + grams) / rates.solve + 6.0 * tokens * work.weights / rates.product


def network_seconds(work: Work, fit: BlockFit, rates: Rates) -> float:
    """Seconds of the steps of the whole network, and of the trials of their rate.

    A step runs every block forward, once more forward, and backward (twice as much), and brings its weights in twice.
    """
    return network_step_count(fit) * (8.0 * STEP_TOKENS * work.weights / rates.product + _brought(work, rates))


def network_step_count(fit: BlockFit) -> int:
    """Number of the steps of the whole network, with the trials of their rate."""
    trials = len(NETWORK_RATES) * network_trial_steps(fit) if fit.network_lr == "auto" else 0
    return fit.network_steps + trials


def _brought(work: Work, rates: Rates) -> float:
    return 2 * work.model_bytes / rates.transfer


def _block_steps(fit: BlockFit) -> float:
    """Gradient steps that each block takes part in, besides the trials of the rate on the first one."""
    return fit.window * fit.steps + (fit.masks - 1) * fit.between


def block_trial_steps(fit: BlockFit) -> int:
    """Number of the steps in trials of the rate of block reconstruction, all on the first window."""
    return len(RATES) * trial_steps(fit) if fit.lr == "auto" else 0


def _speed_up(work: Work) -> float:
    """Factor by which ranks shorten the solves: layers of one block with the same shape of input share their turn."""
    if work.ranks == 1:
        return 1.0
    sizes: dict[int, int] = {}
    for layer in work.layers:
        sizes[layer.shape[1]] = sizes.get(layer.shape[1], 0) + 1
    blocks = max(1, min(sizes.values()))
    # Of the layers of a block with equal columns one, the output projection, has an input of its own.
    turns = sum(-(-max(1, count // blocks - 1) // work.ranks) + (count > blocks) for count in sizes.values())
    return max(1.0, len(work.layers) / blocks / max(1, turns))


def solve_operations(layer: Matrix, recipe: Recipe, ranks: int = 1) -> float:
    """Operations of a solve on each rank: inverses, and products of its rows with a square of columns.

    One product is needed per iteration, one for the linear term and two for the error; float64 counts twice.
    """
    schedule = SCHEDULES[recipe.solver.budget if isinstance(recipe.solver, ADMM) else "default"]
    iterations, stages = (schedule.iterations + schedule.refit + 1, schedule.stages + 1)
    if not is_admm(recipe):
        iterations, stages = 1, 2
    square = layer.shape[1] ** 2
    other = 3 if layer.shape[1] >= WIDE else 6
    return 2.0 * layer.shape[0] / ranks * square * (iterations + other) + 2.0 * layer.shape[1] * square * stages
