"""`iobs.solve`, the entry point of all solvers: damping, dead columns, units and failed factorisations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from iobs.core.masks import RowsOf
from iobs.core.modes import full_precision
from iobs.core.patterns import Pattern, Rate
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import DampingWarning, NotPositiveDefiniteError, ProblemError, is_a
from iobs.solvers.families import (
    BUDGETED,
    COLUMN_GROUPS,
    ENTRIES,
    FAMILIES,
    GRIDS,
    RATES,
    SolverFamily,
    family_of,
    require_fit,
)
from iobs.solvers.protocols import Budget, Refinement, Solver, require_budget

_RAISES = 5  # a failed factorisation raises the damping tenfold, at most this many times
_FIRST_DAMPING = 1e-6  # least damping after a failure
_ORDINARY = 30  # the mean of diag(H) and the largest weight are not rescaled between 2^-30 and 2^30


def solve(
    quadratic: Quadratic,
    pattern: Pattern,
    solver: str | Solver | None = None,
    *,
    refine: str | Refinement | None = None,
    damping: float = 0.0,
    budget: Budget = "default",
    name: str = "the quadratic",
    **options: object,
) -> Solution:
    """Minimise a quadratic under a sparsity pattern.

    Args:
        quadratic: the problem, (rows, d). Never modified.
        pattern: what is kept: entries, for example `Unstructured(0.5)`; entries with values on a grid, for example
            `Unstructured(0.5) & Grid(4)`; or whole groups of columns, `Groups`.
        solver: for entries "magnitude", "wanda", "sparsegpt", "obc", "lobs", "nettrim", "admm", "exact"; for groups
            "search", "greedy", "exact", "osscar", "random", "magnitude", "wanda", "flap", "scores"; on a grid "admm",
            "gptq", "sparsegpt", "obr", "magnitude"; or any `Solver`. None: "search" for groups, otherwise "admm".
        refine: None, "refit" (exact weights on the support), "swap" (exact 1-swaps), or any `Refinement`.
        damping: weight of the proximal term to the anchor, relative to the mean of the Hessian's diagonal. If a
            Cholesky factorisation fails, the damping is raised tenfold with a `DampingWarning`, at most five times.
        budget: "fast", "default" or "best", time against error; only "admm" and "search" given by name use it.
        name: name of the problem in warnings and errors.
        **options: arguments of the solver's constructor, if the solver is given by name.

    Returns:
        The weights in the dtype of the linear term, exactly zero outside the mask. `loss` is the loss of the undamped
        problem, `stats["damping"]` the damping used and `stats["dead_columns"]` the number of inputs that are zero.

    Raises:
        PatternError: the pattern does not fit the shape.
        ProblemError: an unknown solver, refinement or option.
        NotPositiveDefiniteError: the Hessian cannot be factorised even with the raised damping, or q is unbounded
            below along a column where the Hessian is zero and b is not.
    """
    if not isinstance(quadratic, Quadratic):
        raise ProblemError(f"solve needs an iobs.Quadratic, got {type(quadratic).__name__}; see iobs.Quadratic.at.")
    if isinstance(pattern, Rate) and quadratic.dtype.itemsize == 2 and not callable(solver):
        options = {"dtype": quadratic.dtype, **options}  # so that products are exact in the dtype of the weights
    tools = _tools(family_of(pattern), solver, refine, damping, budget, options)
    with full_precision():
        (solution,) = _solve_all([quadratic], [pattern], quadratic, tools, damping, name)
    return solution


def solve_many(
    quadratics: Sequence[Quadratic],
    patterns: Sequence[Pattern],
    solver: str | Solver | None = None,
    *,
    refine: str | Refinement | None = None,
    damping: float = 0.0,
    budget: Budget = "default",
    name: str = "the quadratics",
    **options: object,
) -> list[Solution]:
    """Solve problems with one Hessian; every factorisation is computed once and shared.

    The problems are layers with the same inputs (q, k and v; gate and up) or one layer at several sparsities. The
    solutions equal the solutions of `solve` with the same damping; if the damping is raised, it is raised for all
    problems. Factorisations are stored until the last problem is solved: for "admm" one (d, d) float32 matrix for
    each stage of its schedule.

    Args:
        quadratics: problems made with the same Hessian object.
        patterns: one pattern for each problem.
        solver: see `solve`.
        refine: see `solve`.
        damping: see `solve`.
        budget: see `solve`.
        name: see `solve`.
        **options: see `solve`.

    Raises:
        ProblemError: the Hessians differ, or the numbers of patterns and problems differ.
        PatternError: as `solve`.
        NotPositiveDefiniteError: as `solve`.
    """
    if len(quadratics) != len(patterns):
        raise ProblemError(f"Give one pattern for each problem, got {len(patterns)} for {len(quadratics)}.")
    if not quadratics:
        return []
    families = [family_of(pattern) for pattern in patterns]
    if any(family is not families[0] for family in families):
        raise ProblemError("Problems that are solved together need patterns of one kind: entries, grids or Groups.")
    tools = _tools(families[0], solver, refine, damping, budget, options)
    with full_precision():
        return _solve_all(quadratics, patterns, Quadratic.stack(quadratics).sharing(), tools, damping, name)


class _Tools(NamedTuple):
    """Solver and refinement of all problems of one call, and whether masks hold whole columns."""

    solver: Solver
    refinement: Refinement | None
    whole_columns: bool


def _tools(
    family: SolverFamily,
    solver: str | Solver | None,
    refine: str | Refinement | None,
    damping: float,
    budget: Budget,
    options: dict[str, object],
) -> _Tools:
    if not is_a(Real, damping):
        raise ProblemError(f"damping must be a number, got {damping!r}.")
    if not damping >= 0:
        raise ProblemError(f"damping must not be negative, got {damping}; 0.01 is usual for the layers of a network.")
    chosen = _solver(family, family.default if solver is None else solver, budget, options)
    return _Tools(chosen, _refinement(family, refine), family.whole_columns)


def _solve_all(
    quadratics: Sequence[Quadratic],
    patterns: Sequence[Pattern],
    stacked: Quadratic,
    tools: _Tools,
    damping: float,
    name: str,
) -> list[Solution]:
    """Solve all problems with the least of the tried dampings for which no factorisation fails."""
    for quadratic, pattern in zip(quadratics, patterns, strict=True):
        if 0 in quadratic.shape:
            raise ProblemError(f"{name} has no {'columns' if quadratic.shape[0] else 'rows'}: nothing to solve.")
        require_fit(pattern, quadratic.shape)
    live, dead = _without_dead_columns(_computable(stacked))
    mean = _mean_curvature(live)
    units = [_unit(quadratic, pattern) for quadratic, pattern in zip(quadratics, patterns, strict=True)]
    for attempt in range(_RAISES + 1):
        try:
            split = _split(live.damped(damping * mean), quadratics)
            pairs = zip(split, units, strict=True)
            problems = [problem if unit == 1 else problem.in_units(unit) for problem, unit in pairs]
            solutions = [tools.solver(problem, pattern) for problem, pattern in zip(problems, patterns, strict=True)]
            if tools.refinement is not None:
                unrefined = zip(problems, patterns, solutions, strict=True)
                solutions = [tools.refinement(*each) for each in unrefined]
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
    whole = tools.whole_columns
    return [_finished(quadratic, solution, unit, dead, damping, whole) for quadratic, solution, unit in triples]


def _split(stacked: Quadratic, quadratics: Sequence[Quadratic]) -> list[Quadratic]:
    if len(quadratics) == 1:
        return [stacked]
    ends = list(accumulate(quadratic.shape[0] for quadratic in quadratics))
    return [stacked.rows(slice(start, end)) for start, end in pairwise([0, *ends])]


def _finished(
    quadratic: Quadratic, solution: Solution, unit: float, dead: Tensor | None, damping: float, whole_columns: bool
) -> Solution:
    """Convert a solution to the problem given by the user: its units and dtype, undamped, dead columns zero."""
    stats = {**solution.stats, "damping": damping, "dead_columns": 0 if dead is None else int(dead.sum())}
    weight = solution.weight if unit == 1 else solution.weight * unit
    if "scales" in stats:  # of values on a grid, in the units of the weights
        # Scales stay wider than weights of half precision, which are then products that are rounded once.
        stats["scales"] = (stats["scales"] * unit).to(torch.promote_types(quadratic.dtype, torch.float32))
    if "steps" in stats:  # of the columns of coded integers
        stats["steps"] = stats["steps"] * unit
    if "bound" in stats:  # of the loss, in the units of the weights and of the Hessian
        stats["bound"] = stats["bound"] * unit**2 * _power(_mean_curvature(quadratic))
    if "penalty" in stats:  # of the l1 norm, which has the units of the weights
        stats["penalty"] = stats["penalty"] * unit * _power(_mean_curvature(quadratic))
    solution = replace(solution, problem=quadratic, weight=weight.to(quadratic.dtype), stats=stats)
    if dead is None:
        return solution
    live = Solution.of(quadratic, solution.weight, solution.mask & ~dead, **stats)
    return replace(live, mask=solution.mask) if whole_columns else live


def _solver(family: SolverFamily, solver: str | Solver, budget: Budget, options: dict[str, object]) -> Solver:
    require_budget(budget)
    _require_name_or_function("solver", solver)
    if not isinstance(solver, str):
        if options:
            raise ProblemError(
                f"Options {sorted(options)} go to the solver's own constructor when an instance is given."
            )
        _require_kind("solver", solver, family.solvers, [each.solvers for each in FAMILIES])
        return solver
    if solver not in family.solvers:
        raise ProblemError(
            f"There is no solver {solver!r} for this pattern; choose one of {', '.join(sorted(family.solvers))}."
        )
    if solver in BUDGETED:
        options = {"budget": budget, **options}
    try:
        return family.solvers[solver](**options)
    except TypeError as error:
        raise ProblemError(f"The solver {solver!r} does not take these options: {error}") from None


def require_known_solver(solver: str | Solver) -> None:
    """Raise unless a solver of some kind of patterns exists, before any work is done.

    Raises:
        ProblemError: neither a name of a solver nor a function.
    """
    _require_name_or_function("solver", solver)
    if isinstance(solver, str):
        families = [family for family in (ENTRIES, GRIDS, COLUMN_GROUPS, RATES) if solver in family.solvers]
        _solver([*families, ENTRIES][0], solver, "default", {})


def require_known_refinement(refine: str | Refinement | None) -> None:
    """Raise unless a refinement exists, before any work is done.

    Raises:
        ProblemError: neither None, a name of a refinement nor a function.
    """
    if refine is not None:
        _require_name_or_function("refine", refine)
        _refinement(ENTRIES, refine)


def _require_name_or_function(argument: str, value: object) -> None:
    if isinstance(value, type) or not (isinstance(value, str) or callable(value)):
        raise ProblemError(f"{argument} must be a name or a function such as iobs.ADMM(), got {value!r}.")


def _require_kind(
    argument: str, value: object, own: Mapping[str, object], every: Sequence[Mapping[str, object]]
) -> None:
    """Raise if a value is of a class of this library for other patterns, which would leave grids or rates out."""
    if type(value) not in own.values() and any(type(value) in kinds.values() for kinds in every):
        ways = f"choose one of {', '.join(sorted(own))}, by name" if own else "leave it out"
        raise ProblemError(f"{argument}={value!r} is for other patterns; {ways}.")


def _refinement(family: SolverFamily, refine: str | Refinement | None) -> Refinement | None:
    if refine is None:
        return None
    _require_name_or_function("refine", refine)
    if not isinstance(refine, str):
        _require_kind("refine", refine, family.refinements, [each.refinements for each in FAMILIES])
        return refine
    if refine not in family.refinements:
        names = ", ".join(sorted(family.refinements))
        ways = f"choose one of {names}" if names else "it has none: leave refine out"
        raise ProblemError(f"There is no refinement {refine!r} for this pattern; {ways}.")
    return family.refinements[refine]()


def _computable(quadratic: Quadratic) -> Quadratic:
    """A problem with the same minimisers in at least float32, with curvatures whose squares do not overflow."""
    wide = torch.promote_types(quadratic.dtype, torch.float32)
    quadratic = quadratic.to(wide) if wide != quadratic.dtype else quadratic
    amount = _power(_mean_curvature(quadratic))
    return quadratic if amount == 1 else quadratic.divided(amount)


def _unit(quadratic: Quadratic, pattern: Pattern) -> float:
    """Power of two to divide the weights by, so that their squares do not overflow or underflow in float32."""

    def largest(rows: Tensor) -> float:
        size = float(rows.abs().max())
        return pattern.most(size) if isinstance(pattern, RowsOf) else size

    if quadratic.centred:
        assert quadratic.anchor is not None
        return _power(largest(quadratic.anchor))
    mean = _mean_curvature(quadratic)  # the weights are not known yet: b / H estimates their size
    return _power(largest(quadratic.linear) / mean) if mean > 0 else 1.0


def _power(size: float) -> float:
    """The power of two nearest to a size outside 2^-30 to 2^30; 1 for other sizes."""
    power = round(math.log2(size)) if 0 < size < math.inf else 0
    return 2.0**power if abs(power) > _ORDINARY else 1.0


def _mean_curvature(quadratic: Quadratic) -> float:
    return float(quadratic.matrix.diagonal().double().mean())


def _without_dead_columns(quadratic: Quadratic) -> tuple[Quadratic, Tensor | None]:
    """Decouple dead columns (zero on the undamped diagonal), and return their boolean mask (d,), None without any.

    Decoupled columns have zero saliency, so solvers keep entries of live columns of the same group instead.
    """
    diagonal = quadratic.matrix.diagonal()
    dead = diagonal == 0
    if not bool(dead.any()):
        return quadratic, None
    if bool(dead.all()):
        raise ProblemError("The Hessian is zero: all inputs of this problem are zero; check the calibration data.")
    if not quadratic.centred:
        slope = quadratic.linear.abs().amax(0)
        # The square of a very small input underflows in H but not in b. Such entries of b count as zero.
        falling = dead & (slope > torch.finfo(slope.dtype).eps ** 0.5 * slope.max())
        if bool(falling.any()):
            raise NotPositiveDefiniteError(
                f"q has no minimum: it falls for ever along column {int(falling.nonzero()[0])}, where the Hessian "
                "is zero and the linear term is not. Compute both from the same samples."
            )
    return quadratic.without(dead), dead
