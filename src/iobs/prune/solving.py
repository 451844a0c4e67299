"""One layer's problem, from its statistics to its sparse weights."""

from __future__ import annotations

import torch
from torch import Tensor

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.prune.drift import corrected
from iobs.prune.gram import Statistics
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

    Returns:
        One solution a group; `stats["drift_damping"]` is what `drift.corrected` chose, 0 where it had nothing to do.
    """
    rows = layer.shape[0] // layer.groups
    solutions = []
    for part, piece in enumerate(patterns_of_groups(layer, pattern)):
        own = slice(part * rows, (part + 1) * rows)
        problem, drift_damping = _problem(statistics, part, target[own], current[own], target is current, settings)
        if problem.shape[1] >= SEARCH_COLUMNS:
            problem = problem.to(torch.float32)
        solution = solve(
            problem,
            piece,
            settings.solver,
            refine=settings.refine if old is None else keeping(old[own], settings.refine),
            damping=settings.damping,
            budget=settings.budget,
            name=layer.name,
        )
        solution.stats["drift_damping"] = drift_damping
        solutions.append(solution)
    return solutions


def _problem(
    statistics: Statistics, group: int, target: Tensor, current: Tensor, same: bool, settings: Settings
) -> tuple[Quadratic, float]:
    """min 1/2 ||V X - T D||^2 / count for the rows of one group, and by how much the drift of X from D is damped."""
    gram = statistics.calibration
    hessian = gram.own[group]
    target, current = target.to(hessian.dtype), current.to(hessian.dtype)
    if not bool(hessian.diagonal().any()):
        # Nothing that these weights are fed ever fires: every choice has the same error, so the largest are kept.
        return Quadratic.at(current, torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)), 0.0
    if gram.cross is None and same:
        return Quadratic.at(current, hessian), 0.0
    correction = corrected(statistics, group, target, current, settings.damping)
    return Quadratic(hessian, correction.linear, current), correction.damping
