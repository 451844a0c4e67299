"""One layer's problem, from its statistics to its sparse weights."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Solution
from iobs.prune.gram import Statistics, quadratic
from iobs.prune.layers import Layer
from iobs.prune.old_zeros import keeping
from iobs.prune.settings import Settings
from iobs.prune.spread import patterns_of_groups
from iobs.solvers import solve

SEARCH_COLUMNS = 256  # from which a problem is handed to its solver in float32: half the time of whatever follows


def solve_layer(
    layer: Layer,
    statistics: Statistics,
    target: Tensor,
    current: Tensor,
    pattern: Pattern,
    settings: Settings,
    old: Tensor | None = None,
) -> list[Solution]:
    """Solve one layer, group by group. Grams are summed in float64; wide problems are then solved in float32.

    Args:
        layer: its address.
        statistics: Grams of its inputs.
        target: (rows, columns) weights whose output is imitated.
        current: (rows, columns) weights that damping pulls towards.
        pattern: of the whole layer.
        settings: solver, refinement, damping and budget.
        old: (rows, columns) weights whose zeros stay, or nothing.
    """
    rows = layer.shape[0] // layer.groups
    solutions = []
    for part, piece in enumerate(patterns_of_groups(layer, pattern)):
        own = slice(part * rows, (part + 1) * rows)
        problem = quadratic(statistics.calibration, part, target[own], current[own], same=target is current)
        if problem.shape[1] >= SEARCH_COLUMNS:
            problem = problem.to(torch.float32)
        solutions.append(
            solve(
                problem,
                piece,
                settings.solver,
                refine=settings.refine if old is None else keeping(old[own], settings.refine),
                damping=settings.damping,
                budget=settings.budget,
                name=layer.name,
            )
        )
    return solutions
