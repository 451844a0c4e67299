"""`iobs.minimize`: one loop for every method, with a history of its steps.

minimise f(theta)   subject to   norm(theta)_0 <= k
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from iobs.errors import NonFiniteError, ProblemError, is_a
from iobs.optimize.curvature import as_objective
from iobs.optimize.methods import METHODS
from iobs.optimize.methods.base import Method, State
from iobs.optimize.methods.best_known import BestKnown, Exact
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices, VectorLike, as_vector, few_threads
from iobs.optimize.objectives.tabled import Tabled
from iobs.optimize.problem import Problem, generator_of
from iobs.optimize.refit.newton import Fit
from iobs.optimize.refit.separation import warn_of_separation
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search.saddles import NO_MINIMUM, lower_point

if TYPE_CHECKING:
    from iobs.core.quadratic import Quadratic


@dataclass(frozen=True)
class Record:
    """One step of a run.

    Attributes:
        step: number of the step; 0 is the start.
        loss: f after the step.
        support_changes: number of coordinates that entered or left the support.
        step_norm: norm of the change of theta.
        seconds: time since the start of the run.
        note: the method's note on the step.
    """

    step: int
    loss: float
    support_changes: int
    step_norm: float
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class MinimizeResult:
    """The result of `minimize`.

    Attributes:
        theta: (d,) float64 without the intercept; at most k non-zeros, forced coordinates not counted.
        support: sorted indices of the non-zeros.
        loss: f(theta).
        converged: whether the method stopped by its own criterion.
        message: why the run stopped, and which optimality is known.
        history: one `Record` per step, the start included.
        intercept: the constant of the model; 0 if it has none.
    """

    theta: Array
    support: Indices
    loss: float
    converged: bool
    message: str
    history: list[Record] = field(repr=False)
    intercept: float = 0.0


def minimize(
    objective: Objective | Quadratic,
    k: int,
    *,
    method: str | Method = "auto",
    theta0: Array | None = None,
    damping: float | None = None,
    max_steps: int = 1000,
    tol: float = 1e-10,
    seed: int = 0,
    callback: Callable[[Record, Array], bool | None] | None = None,
    lower: float | VectorLike | None = None,
    upper: float | VectorLike | None = None,
) -> MinimizeResult:
    """Minimise a smooth function under a hard limit on the number of non-zeros.

    Args:
        objective: one of `iobs.objectives`, any `Objective`, or an `iobs.Quadratic` of one row.
        k: largest number of non-zeros; forced coordinates (such as an intercept) are not counted.
        method: "auto" (best known), "exact" (the best support, proved, however long it takes; Ctrl+C ends the proof,
            and the message has the gap; `Exact(checkpoint=FILE)` of `iobs.optimize.methods.best_known` goes on from a
            file), a name in `iobs.optimize.methods.METHODS`, or an instance.
        theta0: start (d,), possibly dense; zero if not given.
        damping: relative to mean diag(H), for methods that factorise H or an approximation of it; None lets the method
            choose. "regularised_newton", "cubic_newton", "nhtp" and "fnhtp" adapt their damping or have none, and
            ignore it.
        max_steps: largest number of steps.
        tol: stop once the norm of a step is at most `tol` times the norm of theta.
        seed: seed of every random choice.
        callback: called with the record and theta after every step; returning True stops the run.
        lower: least value of every coefficient, a number or one for each (d,). It is at most 0, because a coefficient
            that is not chosen is 0. With 0 the coefficients are non-negative. An intercept has no bound.
        upper: largest value of every coefficient, at least 0. Bounds work with the methods "auto" and "exact" only.

    Returns:
        The feasible iterate with the lowest loss after the start, and the history of all steps.

    Raises:
        ProblemError: no objective, k outside [0, d], an unknown method, a start of the wrong length, tol, max_steps or
            seed out of range, bounds that exclude zero, bounds with another method, or an objective with several
            coefficients per feature.
        NonFiniteError: NaN or infinity in the start, or in f or its gradient at zero.
    """
    objective = as_objective(objective)
    if isinstance(objective, Tabled):
        raise ProblemError(
            f"iobs.minimize would count every coefficient of {type(objective).__name__}, which has several for a "
            "feature; use SparseMultiTaskRegressor or SparseClassifier, whose k counts features."
        )
    if not is_a(Integral, max_steps) or max_steps < 1 or not tol >= 0:
        raise ProblemError(f"max_steps must be at least 1 and tol not negative, got {max_steps} and {tol}.")
    problem = Problem(objective, k, damping, generator_of(seed))
    # Overflow far from a minimiser is detected by the value, not by a warning.
    with (
        few_threads(objective.rank * objective.dimension),
        np.errstate(over="ignore", invalid="ignore", divide="ignore"),
    ):
        _require_finite(problem)
        bounds = Bounds.on_objective(lower, upper, objective)
        chosen = _method(method) if bounds is None else _bounded(method, bounds)
        start = _start(objective, theta0)
        # Bounds are tried by f itself; without them a start that is a saddle or a maximum would be the end.
        lower_start = None if bounds is not None else _leave(problem, start)
        start = start if lower_start is None else lower_start
        result = run(problem, chosen, start, max_steps, tol, callback)
        if bounds is None and result.converged and lower_point(problem, result.theta) is not None:
            return replace(result, message=NO_MINIMUM)
        return result


def run(
    problem: Problem,
    method: Method,
    theta0: Array | None,
    max_steps: int,
    tol: float,
    callback: Callable[[Record, Array], bool | None] | None = None,
) -> MinimizeResult:
    """Run a method: its start, then steps until it is done, theta stops changing, or the callback stops it."""
    begun = time.perf_counter()
    state = method.begin(problem, theta0)
    history = [Record(0, state.value, 0, 0.0, time.perf_counter() - begun, state.message)]
    best: State | None = None
    converged, message = False, f"stopped after max_steps = {max_steps} steps; raise it to go on"
    for number in range(1, max_steps + 1):
        new = method.step(problem, state)
        if not np.isfinite(new.value):
            message = (
                f"the loss became {new.value} at step {number}: the method diverges here; damp it or shorten its step"
            )
            break
        record = _record(number, state, new, time.perf_counter() - begun)
        history.append(record)
        if problem.feasible(new.theta) and (best is None or new.value <= best.value):
            best = new
        stop = callback is not None and callback(record, new.theta)
        small = record.step_norm <= tol * max(float(np.linalg.norm(new.theta)), 1e-300)
        state = new
        if new.done or stop or (small and not new.busy):
            converged = not stop
            message = new.message if new.done else "stopped by the callback" if stop else "theta no longer changes"
            break
    if best is None:
        truncated = problem.truncate(state.theta)
        best = State(truncated, *problem.objective.value_and_gradient(truncated))
    return _result(problem, best, converged, message, history)


def _record(number: int, old: State, new: State, seconds: float) -> Record:
    changes = int(np.count_nonzero((old.theta != 0) != (new.theta != 0)))
    return Record(number, new.value, changes, float(np.linalg.norm(new.theta - old.theta)), seconds, new.message)


def _result(problem: Problem, best: State, converged: bool, message: str, history: list[Record]) -> MinimizeResult:
    support = np.union1d(np.flatnonzero(best.theta), problem.forced).astype(np.int64)
    warn_of_separation(problem.objective, Fit(support, best.theta, best.value, best.gradient))
    theta, intercept = problem.objective.split(best.theta)
    return MinimizeResult(theta, np.flatnonzero(theta), best.value, converged, message, history, intercept)


def _method(method: str | Method) -> Method:
    if not isinstance(method, str):
        if isinstance(method, type) or not hasattr(method, "step"):
            raise ProblemError(f"method must be a name or an instance of a method, got {method!r}.")
        return method
    if method not in METHODS:
        raise ProblemError(f"There is no method {method!r}; choose one of {', '.join(METHODS)}.")
    return METHODS[method]()


def _bounded(method: str | Method, bounds: Bounds) -> Method:
    if isinstance(method, Exact):
        return replace(method, bounds=bounds)
    if method not in ("auto", "exact"):
        raise ProblemError('Bounds on the coefficients work with the methods "auto" and "exact" only.')
    return BestKnown(bounds=bounds) if method == "auto" else Exact(bounds=bounds)


def _leave(problem: Problem, start: Array | None) -> Array | None:
    """A point below a start that is stationary but no minimum; None for any other start."""
    point = problem.truncate(np.zeros(problem.dimension) if start is None else start)
    return lower_point(problem, point)


def _require_finite(problem: Problem) -> None:
    """Require a finite f and gradient at zero, to which methods compare, whatever their start.

    Raises:
        NonFiniteError: f or its gradient is not finite at zero.
    """
    value, gradient = problem.at_zero
    if not (np.isfinite(value) and np.isfinite(gradient).all()):
        raise NonFiniteError("f or its gradient is NaN or infinite at zero; give a function that is finite there.")


def _start(objective: Objective, theta0: Array | None) -> Array | None:
    if theta0 is None:
        return None
    theta = as_vector(theta0, "start theta0").copy()
    features = objective.coefficient_count
    if theta.size not in (features, objective.dimension):
        raise ProblemError(f"The start theta0 must have {features} entries, got {theta.size}.")
    if theta.size == features:
        return np.concatenate([theta, np.zeros(objective.dimension - features)])
    theta[-1] += theta[-1] - objective.split(theta)[1]  # theta's last entry is the constant at the column means
    return theta
