"""`iobs.solve`: one door to every solver, where damping, dead columns and failures are dealt with once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from iobs.core.patterns import Pattern, require_pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import DampingWarning, NotPositiveDefiniteError, ProblemError
from iobs.solvers.admm import ADMM
from iobs.solvers.base import Budget, Refinement, Solver
from iobs.solvers.exact import Exact
from iobs.solvers.magnitude import Magnitude
from iobs.solvers.obc import OBC
from iobs.solvers.refit import Refit
from iobs.solvers.sparsegpt import SparseGPT
from iobs.solvers.swap import Swap
from iobs.solvers.wanda import Wanda

SOLVERS: dict[str, Callable[..., Solver]] = {
    "magnitude": Magnitude,
    "wanda": Wanda,
    "sparsegpt": SparseGPT,
    "obc": OBC,
    "admm": ADMM,
    "exact": Exact,
}
REFINEMENTS: dict[str, Callable[..., Refinement]] = {"refit": Refit, "swap": Swap}
BUDGETED = {"admm"}  # solvers that trade time for error

_RAISES = 5  # times that a failed factorisation may raise the damping tenfold
_FIRST_DAMPING = 1e-6  # what a failure at zero damping starts from
_ORDINARY = 30  # powers of two between which a Hessian's mean diagonal, and the largest weight, are left as they are


def solve(
    quadratic: Quadratic,
    pattern: Pattern,
    solver: str | Solver = "admm",
    *,
    refine: str | Refinement | None = None,
    damping: float = 0.0,
    budget: Budget = "default",
    name: str = "the quadratic",
    **options: Any,
) -> Solution:
    """Minimise a quadratic under a sparsity pattern.

    Args:
        quadratic: the problem, (rows, d). Never modified.
        pattern: how many entries are kept, and where.
        solver: "magnitude", "wanda", "sparsegpt", "obc", "admm", "exact", or any `Solver`.
        refine: None, "refit" (exact weights on the support), "swap" (exact 1-swaps), or any `Refinement`.
        damping: proximal term towards the anchor, relative to the mean of the Hessian's diagonal. Where a Cholesky
            factorisation fails it is raised tenfold with a `DampingWarning`, at most five times.
        budget: "fast", "default" or "best": time against error, for solvers that can trade them.
        name: what to call the problem in warnings and errors.
        **options: passed to the solver's constructor.

    Returns:
        The weights in the dtype of the linear term, exactly zero outside the mask; `loss` is that of the undamped
        problem; `stats["damping"]` is the damping really used, `stats["dead_columns"]` the inputs that never fire.

    Raises:
        PatternError: the pattern does not fit the shape.
        ProblemError: an unknown solver, refinement or option.
        NotPositiveDefiniteError: the Hessian cannot be factorised even with the raised damping, or q falls for ever
            along a column where the Hessian is zero and b is not.
    """
    (solution,) = _solve_all([quadratic], [pattern], quadratic, solver, refine, damping, budget, name, options)
    return solution


def solve_many(
    quadratics: Sequence[Quadratic],
    patterns: Sequence[Pattern],
    solver: str | Solver = "admm",
    *,
    refine: str | Refinement | None = None,
    damping: float = 0.0,
    budget: Budget = "default",
    name: str = "the quadratics",
    **options: Any,
) -> list[Solution]:
    """`solve` for problems with one Hessian: every factorisation is computed once and shared.

    Layers that see the same inputs (q, k and v; gate and up), or one layer at several sparsities. The answers are
    those of `solve`, one problem after the other, with the damping that all of them can be factorised with. What is
    shared is kept until the last is solved: for "admm" one (d, d) float32 matrix a stage of its schedule.

    Args:
        quadratics: problems that were made with the very same Hessian object.
        patterns: one for each.
        solver: as `solve`, and so are all the others.
        refine: see `solve`.
        damping: see `solve`.
        budget: see `solve`.
        name: see `solve`.
        **options: see `solve`.

    Raises:
        ProblemError: the Hessians differ, or there are not as many patterns as problems.
        PatternError: as `solve`.
        NotPositiveDefiniteError: as `solve`.
    """
    if len(quadratics) != len(patterns):
        raise ProblemError(f"Give one pattern for each problem, got {len(patterns)} for {len(quadratics)}.")
    if not quadratics:
        return []
    stacked = Quadratic.stack(quadratics).sharing()
    return _solve_all(quadratics, patterns, stacked, solver, refine, damping, budget, name, options)


def _solve_all(
    quadratics: Sequence[Quadratic],
    patterns: Sequence[Pattern],
    stacked: Quadratic,
    solver: str | Solver,
    refine: str | Refinement | None,
    damping: float,
    budget: Budget,
    name: str,
    options: dict[str, Any],
) -> list[Solution]:
    """All problems, with the least damping (of those tried) that none of them fails with."""
    for quadratic, pattern in zip(quadratics, patterns, strict=True):
        if not quadratic.shape[0]:
            raise ProblemError(f"{name} has no rows, so there is nothing to solve.")
        require_pattern(pattern)
        pattern.groups(quadratic.shape)
    if not damping >= 0:
        raise ProblemError(f"damping must not be negative, got {damping}; 0.01 is usual for the layers of a network.")
    chosen, refinement = _solver(solver, budget, options), _refinement(refine)
    live, dead = _without_dead_columns(_computable(stacked))
    mean = _mean_curvature(live)
    units = [_unit(quadratic) for quadratic in quadratics]
    for attempt in range(_RAISES + 1):
        try:
            split = _split(live.damped(damping * mean), quadratics)
            problems = [one if unit == 1 else one.in_units(unit) for one, unit in zip(split, units, strict=True)]
            solutions = [chosen(problem, pattern) for problem, pattern in zip(problems, patterns, strict=True)]
            if refinement is not None:
                found = zip(problems, patterns, solutions, strict=True)
                solutions = [refinement(*each) for each in found]
            break
        except NotPositiveDefiniteError as error:
            if attempt == _RAISES:
                raise NotPositiveDefiniteError(
                    f"{name}: the Hessian has no Cholesky factor even with damping {damping:g}. "
                    "Look for inputs of wildly different scale or NaN, or give more calibration samples."
                ) from error
            raised = max(10 * damping, _FIRST_DAMPING)
            warnings.warn(
                f"{name}: Cholesky failed with damping {damping:g}; trying {raised:g}.", DampingWarning, stacklevel=3
            )
            damping = raised
    triples = zip(quadratics, solutions, units, strict=True)
    return [_finished(quadratic, solution, unit, dead, damping) for quadratic, solution, unit in triples]


def _split(stacked: Quadratic, quadratics: Sequence[Quadratic]) -> list[Quadratic]:
    if len(quadratics) == 1:
        return [stacked]
    ends = list(accumulate(quadratic.shape[0] for quadratic in quadratics))
    return [stacked.rows(slice(start, end)) for start, end in pairwise([0, *ends])]


def _finished(quadratic: Quadratic, solution: Solution, unit: float, dead: Tensor | None, damping: float) -> Solution:
    """The solution as one of the problem that was asked: in its units, undamped, without its dead columns."""
    stats = {**solution.stats, "damping": damping, "dead_columns": 0 if dead is None else int(dead.sum())}
    weight = solution.weight if unit == 1 else solution.weight * unit
    solution = replace(solution, problem=quadratic, weight=weight.to(quadratic.dtype), stats=stats)
    if dead is None:
        return solution
    return Solution.of(quadratic, solution.weight, solution.mask & ~dead, **stats)


def _solver(solver: str | Solver, budget: Budget, options: dict[str, Any]) -> Solver:
    if budget not in ("fast", "default", "best"):
        raise ProblemError(f'budget must be "fast", "default" or "best", got {budget!r}.')
    if not isinstance(solver, str):
        if options:
            raise ProblemError(
                f"Options {sorted(options)} go to the solver's own constructor when an instance is given."
            )
        return solver
    if solver not in SOLVERS:
        raise ProblemError(f"There is no solver {solver!r}; choose one of {', '.join(sorted(SOLVERS))}.")
    if solver in BUDGETED:
        options = {"budget": budget, **options}
    try:
        return SOLVERS[solver](**options)
    except TypeError as error:
        raise ProblemError(f"The solver {solver!r} does not take these options: {error}") from None


def require_known(solver: str | Solver, refine: str | Refinement | None, budget: Budget) -> None:
    """Find out before any work whether these choices exist.

    Raises:
        ProblemError: an unknown solver, refinement or budget.
    """
    _solver(solver, budget, {})
    _refinement(refine)


def _refinement(refine: str | Refinement | None) -> Refinement | None:
    if refine is None or not isinstance(refine, str):
        return refine
    if refine not in REFINEMENTS:
        raise ProblemError(f"There is no refinement {refine!r}; choose one of {', '.join(sorted(REFINEMENTS))}.")
    return REFINEMENTS[refine]()


def _computable(quadratic: Quadratic) -> Quadratic:
    """The same minimisers in float32 at least, with curvatures whose squares are far from the ends of its range."""
    wide = torch.promote_types(quadratic.dtype, torch.float32)
    quadratic = quadratic.to(wide) if wide != quadratic.dtype else quadratic
    amount = _power(_mean_curvature(quadratic))
    return quadratic if amount == 1 else quadratic.divided(amount)


def _unit(quadratic: Quadratic) -> float:
    """What to measure the weights in, so that their squares are far from the ends of the range of float32, too."""
    if quadratic.centred:
        assert quadratic.anchor is not None
        return _power(float(quadratic.anchor.abs().max()))
    mean = _mean_curvature(quadratic)  # the size of b / H stands for that of the weights, which nobody knows yet
    return _power(float(quadratic.linear.abs().max()) / mean) if mean > 0 else 1.0


def _power(size: float) -> float:
    """The power of two next to a size that is far from 1, otherwise 1."""
    power = round(math.log2(size)) if 0 < size < math.inf else 0
    return 2.0**power if abs(power) > _ORDINARY else 1.0


def _mean_curvature(quadratic: Quadratic) -> float:
    return float(quadratic.operator.diagonal().double().mean())


def _without_dead_columns(quadratic: Quadratic) -> tuple[Quadratic, Tensor | None]:
    """Dead inputs (zero on the undamped diagonal) become harmless: unit curvature, zero target, zero saliency.

    Their weights are then the last that any solver keeps, so their budget goes to live columns of the same group.
    """
    diagonal = quadratic.operator.diagonal()
    dead = diagonal == 0
    if not bool(dead.any()):
        return quadratic, None
    if bool(dead.all()):
        raise ProblemError("The Hessian is zero: no input of this problem ever fires; check the calibration data.")
    if not quadratic.centred:
        slope = quadratic.linear.abs().amax(0)
        # An input too small to square leaves a trace in b alone: that is rounding.
        falling = dead & (slope > torch.finfo(slope.dtype).eps ** 0.5 * slope.max())
        if bool(falling.any()):
            raise NotPositiveDefiniteError(
                f"q has no least value: it falls for ever along column {int(falling.nonzero()[0])}, where the Hessian "
                "is zero and the linear term is not. Both must come from the same samples."
            )
    return quadratic.without(dead), dead


__all__ = ["BUDGETED", "REFINEMENTS", "SOLVERS", "require_known", "solve", "solve_many"]
