"""Damping chosen by samples that the solver does not see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from iobs.core.patterns import Pattern
from iobs.core.quadratic import HessianOperator, Quadratic, Solution, relative_error
from iobs.errors import ProblemError
from iobs.solvers.door import solve

DAMPINGS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def solve_by_held_out(
    quadratic: Quadratic,
    pattern: Pattern,
    held_out: Tensor | HessianOperator,
    *,
    dampings: Sequence[float] = DAMPINGS,
    **options: Any,
) -> Solution:
    """Solve with several dampings, return the solution whose error on held-out inputs is least.

    Args:
        quadratic: the problem on the calibration samples.
        pattern: as `solve`.
        held_out: Hessian of other samples, (d, d): the error is measured from this problem's centre in its metric.
        dampings: to try, relative to the mean of the calibration Hessian's diagonal.
        **options: as `solve`, but for the damping.

    Returns:
        The best solution; `stats["held_out_errors"]` has the relative error of every damping tried.

    Raises:
        ProblemError: no damping to try.
    """
    tried = [*dict.fromkeys(map(float, dampings))]
    if not tried:
        raise ProblemError("Give at least one damping to try.")
    other = Quadratic.at(quadratic.centre(), held_out)
    errors: dict[float, float] = {}
    best: Solution | None = None
    for damping in tried:
        solution = solve(quadratic, pattern, damping=damping, **options)
        least = min(errors.values(), default=math.inf)
        errors[damping] = relative_error(other, solution.weight)
        if best is None or errors[damping] < least:
            best = solution
    assert best is not None
    best.stats["held_out_errors"] = errors
    return best
