"""`iobs.minimize`: one loop for every method, with a trace.

minimise f(theta)   subject to   norm(theta)_0 <= k
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from threadpoolctl import ThreadpoolController

from iobs.core.quadratic import Quadratic
from iobs.errors import NonFiniteError, ProblemError
from iobs.optimize.designs import Array, Indices, as_vector
from iobs.optimize.methods import Method, State
from iobs.optimize.models import QuadraticObjective
from iobs.optimize.objective import Objective
from iobs.optimize.presets import METHODS
from iobs.optimize.problem import Problem

_ONE_THREAD = 4_000_000  # entries of a design below which linear algebra stays on one thread


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


@dataclass(frozen=True)
class Record:
    """One step of a run.

    Attributes:
        step: 0 is the start.
        loss: f after the step.
        support_changes: coordinates that entered or left the support.
        step_norm: norm of the change of theta.
        seconds: since the run began.
        note: what the method says about the step.
    """

    step: int
    loss: float
    support_changes: int
    step_norm: float
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Result:
    """What `minimize` found.

    Attributes:
        theta: (d,) float64, at most k non-zeros besides forced coordinates; without the intercept.
        support: sorted indices of the non-zeros.
        loss: f(theta).
        converged: whether the method stopped by its own criterion.
        message: why it stopped, and what holds at the answer.
        history: one `Record` a step, the start included.
        intercept: the constant of the model, 0 without one.
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
) -> Result:
    """Minimise a smooth function under a hard limit on the number of non-zeros.

    Args:
        objective: one of `iobs.objectives`, any `Objective`, or an `iobs.Quadratic` of one row.
        k: at most so many non-zeros; forced coordinates (an intercept) come on top.
        method: "auto" (best known) or a name of `iobs.optimize.presets.METHODS`, or an instance with its own settings.
        theta0: (d,) start; zero if not given. It may be dense.
        damping: relative to mean diag(H), for methods that factorise H or its like; None lets them choose. The
            Newton methods that adapt it or do without ("regularised_newton", "cubic_newton", "nhtp", "fnhtp") do not
            ask for it.
        max_steps: at most so many steps.
        tol: stop once a step changes theta by less than this, relative to its norm.
        seed: of everything random.
        callback: called with the record and theta of every step; returning True stops the run.

    Returns:
        The feasible iterate of least loss after the start, with the trace of all.

    Raises:
        ProblemError: k outside [0, d], an unknown method, a start of the wrong length, tol or max_steps out of range.
        NonFiniteError: NaN or infinity in the start, or in f or its gradient at zero.
    """
    if isinstance(objective, Quadratic):
        objective = QuadraticObjective.of(objective)
    if max_steps < 1 or not tol >= 0:
        raise ProblemError(f"max_steps must be at least 1 and tol not negative, got {max_steps} and {tol}.")
    problem = Problem(objective, k, damping, np.random.default_rng(seed))
    # Overflow far from a minimiser is met everywhere by looking at the value, never by a warning. Threads only wait for
    # each other on small systems: on a busy machine they cost a factor of a hundred.
    limit = 1 if objective.rank * objective.dimension <= _ONE_THREAD else None
    with _blas().limit(limits=limit, user_api="blas"), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _require_finite(problem)
        return run(problem, _method(method), _start(objective, theta0), max_steps, tol, callback)


def run(
    problem: Problem,
    method: Method,
    theta0: Array | None,
    max_steps: int,
    tol: float,
    callback: Callable[[Record, Array], bool | None] | None = None,
) -> Result:
    """The loop."""
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


def _result(problem: Problem, best: State, converged: bool, message: str, history: list[Record]) -> Result:
    theta, intercept = problem.objective.split(best.theta)
    return Result(theta, np.flatnonzero(theta), best.value, converged, message, history, intercept)


def _method(method: str | Method) -> Method:
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ProblemError(f"There is no method {method!r}; choose one of {', '.join(METHODS)}.")
    return METHODS[method]()


def _require_finite(problem: Problem) -> None:
    """Sparse vectors lie about zero, and methods measure from there, wherever they start."""
    value, gradient = problem.at_zero
    if not (np.isfinite(value) and np.isfinite(gradient).all()):
        raise NonFiniteError("f or its gradient is NaN or infinite at zero; give a function that is finite there.")


def _start(objective: Objective, theta0: Array | None) -> Array | None:
    if theta0 is None:
        return None
    theta = as_vector(theta0, "start theta0").copy()
    features = objective.split(np.zeros(objective.dimension))[0].size
    if theta.size not in (features, objective.dimension):
        raise ProblemError(f"The start theta0 must have {features} entries, got {theta.size}.")
    if theta.size == features:
        return np.concatenate([theta, np.zeros(objective.dimension - features)])
    theta[-1] += theta[-1] - objective.split(theta)[1]  # the constant where columns are about their means
    return theta
