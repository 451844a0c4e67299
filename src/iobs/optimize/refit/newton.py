"""The exact minimiser of f on a given support: Option 2's second line of Algorithm 1, iterated to convergence.

For a quadratic this is one solve of H_QQ z = b_Q with one step of iterative refinement. Otherwise it is a damped Newton
method on the k variables of the support, which needs only k x k matrices.

Where every column of the Hessian takes a differentiation (functions of torch), early steps are solved by a few
conjugate gradients. The last refit of a support starts from one block of the Hessian and updates it by the gradients on
the way (BFGS). So a step takes one gradient, and the steps converge superlinearly.

Within bounds Newton's method moves the coordinates that are free to move, and is projected onto the bounds (Bertsekas
1982). For a quadratic it ends at the exact minimiser once the coordinates at their bounds no longer change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg.lapack import dposv, dpotrf, dpotri, sposv

from iobs.optimize.curvature import QuadraticObjective, conjugate_gradients
from iobs.optimize.objectives.autodiff import TorchObjective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Floats, Indices, add_to_diagonal
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.gram import GramLeastSquares
from iobs.optimize.objectives.linear import LeastSquares, LinearModel
from iobs.optimize.refit import kernels
from iobs.optimize.refit.within import Bounds

_JITTER = 1e-12  # relative to the diagonal: makes systems with duplicate columns solvable


@dataclass(frozen=True)
class Fit:
    """A minimiser of f on a support.

    Attributes:
        support: sorted coordinates Q (k,), forced coordinates included.
        theta: (d,), zero outside Q.
        value: f(theta).
        gradient: (d,), about zero on Q.
    """

    support: Indices
    theta: Array
    value: float
    gradient: Array

    def strictly_within(self, bounds: Bounds) -> Fit:
        """The fit with only those coordinates in its support that are not at a bound: the others are not estimated."""
        theta, limits = self.theta[self.support], bounds.extended(self.theta.size).on(self.support)
        return replace(self, support=self.support[(theta > limits.lower) & (theta < limits.upper)])


def newton_direction(hessian: Floats, gradient: Array) -> Array:
    """-(H + mu D)^-1 g with D = diag(H) and mu the smallest of 0, 1e-12, 1e-10, ... that makes the matrix definite.

    Solved in the Hessian's precision, float32 or float64.
    """
    if not gradient.size:
        return np.zeros(0)
    solve = sposv if hessian.dtype == np.float32 else dposv
    _, direction, info = solve(hessian, -gradient, lower=1)
    if info == 0 and np.isfinite(direction).all():
        return np.asarray(direction, dtype=np.float64)
    diagonal = np.abs(hessian.diagonal())
    floor = diagonal.max(initial=0.0) * 1e-14
    ridge = np.maximum(diagonal, floor if floor > 0 else 1.0)
    amount = _JITTER
    while amount < 1e8:
        _, direction, info = solve(hessian + np.diag(amount * ridge), -gradient, lower=1)
        if info == 0 and np.isfinite(direction).all():
            return np.asarray(direction, dtype=np.float64)
        amount = 100 * amount
    return np.asarray(-gradient / ridge)


def inverse_block(hessian: Array) -> Array:
    """H_QQ^-1, with the diagonal raised just enough for it to exist (duplicate columns)."""
    if not hessian.size:  # LAPACK complains on standard output about empty matrices
        return hessian.copy()
    amount = 0.0
    diagonal = hessian.diagonal()
    while amount < 1.0:
        matrix = hessian.copy()
        if amount:
            add_to_diagonal(matrix, amount * diagonal + 1e-300)
        factor, info = dpotrf(matrix, lower=1, overwrite_a=1)
        if info == 0:
            # A factor with pivots near zero would give an inverse that is mostly rounding.
            pivots = factor.diagonal() ** 2
            if amount or (pivots > 1e-13 * diagonal).all():
                lower, _ = dpotri(factor, lower=1, overwrite_c=1)  # zero above the diagonal, as the factor
                inverse = lower + lower.T
                add_to_diagonal(inverse, -lower.diagonal())
                return np.asarray(inverse)
        amount = _JITTER if amount == 0 else 100 * amount
    return np.asarray(np.diag(1.0 / np.maximum(diagonal, 1e-300)))


_STEPS = 50  # most steps of an exact refit
_SLOW = 0.1  # compute a new block if a full step lowers the decrement by less than this factor
_LOOSE = 0.1  # relative residual of an inexact Newton step


def refit_loosely(objective: Objective, support: Indices, start: Array, *, steps: int = 1) -> tuple[Fit, Array]:
    """Take a few inexact Newton steps on a support; return the fit and the approximate H_QQ that they learned.

    Args:
        objective: f.
        support: coordinates that may be non-zero (k,).
        start: first guess (d,); entries outside the support are dropped.
        steps: largest number of steps, each of at most k Hessian products.
    """
    fit = _begin(objective, support, start)
    hessian = np.zeros((support.size, support.size))
    for _ in range(steps):
        direction, hessian = _inexact_step(objective, fit)
        decrease = -float(fit.gradient[support] @ direction)
        better = line_search(objective, fit, direction, decrease, max(abs(fit.value), 1e-4))
        if better is None:
            break
        hessian = _updated(hessian, (better.theta - fit.theta)[support], (better.gradient - fit.gradient)[support])
        fit = better
        if decrease <= 1e-6 * abs(fit.value):
            break
    return fit, hessian


def refit_exactly(
    objective: Objective,
    support: Indices,
    start: Array,
    *,
    block: Array | None = None,
    begun: Fit | None = None,
) -> Fit:
    """The minimiser on a support, to rounding.

    Args:
        objective: f.
        support: coordinates that may be non-zero (k,).
        start: first guess (d,); entries outside the support are dropped.
        block: an approximate H_QQ (k, k) to start with; computed if not given.
        begun: the fit at the start, if known.
    """
    fit = _begin(objective, support, start) if begun is None else begun
    fresh = block is None
    hessian = objective.hessian_block(fit.theta, support) if block is None else block
    previous, size = np.inf, max(abs(fit.value), 1e-4)
    for _ in range(_STEPS):
        gradient = fit.gradient[support]
        direction = newton_direction(hessian, gradient)
        decrease = -float(gradient @ direction)
        slow = not fresh and decrease > _SLOW * previous
        better = None if slow else line_search(objective, fit, direction, decrease, size)
        if better is None:
            if fresh:
                break
            hessian, fresh, previous = objective.hessian_block(fit.theta, support), True, np.inf
            continue
        moved = (better.theta - fit.theta)[support]
        hessian = _updated(hessian, moved, better.gradient[support] - gradient)
        fit, previous, fresh = better, decrease, False
        if decrease <= 1e-28 * size:
            break
    return fit


def _begin(objective: Objective, support: Indices, start: Array) -> Fit:
    theta = np.zeros(objective.dimension)
    theta[support] = start[support]
    value, gradient = objective.value_and_gradient(theta)
    if not np.isfinite(value):
        theta = np.zeros(objective.dimension)
        value, gradient = objective.value_and_gradient(theta)
    return Fit(support, theta, value, gradient)


def line_search(objective: Objective, fit: Fit, direction: Array, decrease: float, size: float) -> Fit | None:
    """The fit at the first of the step lengths 1, 1/2, 1/4, ... that lowers f enough; None if there is none.

    Near a minimum the change of f is below its rounding error, relative to `size`, an earlier value of f. There a step
    is accepted if it halves the slope along the direction (compare the approximate Wolfe condition of Hager and Zhang
    2005).
    """
    rounding = 1e-9 * size
    length = 1.0
    for _ in range(30):
        theta = fit.theta.copy()
        theta[fit.support] += length * direction
        value, gradient = objective.value_and_gradient(theta)
        if np.isfinite(value):
            lower = value <= fit.value - 1e-4 * length * decrease
            flat = decrease <= rounding and abs(float(gradient[fit.support] @ direction)) <= 0.5 * decrease
            if lower or (flat and value <= fit.value + rounding):
                return Fit(fit.support, theta, value, gradient)
        if length * decrease <= 1e-7 * rounding:
            return None
        length *= 0.5
    return None


def _inexact_step(objective: Objective, fit: Fit) -> tuple[Array, Array]:
    """H_QQ^-1 (-g_Q) to a relative residual of `_LOOSE`, and a matrix that agrees with H_QQ along every direction used.

    The first direction is steepest descent; if its curvature is not positive, it is the step itself.
    """
    support = fit.support
    descent = -fit.gradient[support]
    size = float(descent @ descent)
    hessian: Array | None = None

    def product(direction: Array) -> Array:
        full = np.zeros(objective.dimension)
        full[support] = direction
        return objective.hessian_product(fit.theta, full)[support]

    def learn(direction: Array, image: Array) -> None:
        nonlocal hessian
        if hessian is None:
            hessian = np.eye(support.size) * (float(direction @ image) / size)
        hessian = _updated(hessian, direction, image)

    goal = _LOOSE**2 * size
    solution = conjugate_gradients(product, descent, goal=goal, steps=support.size, seen=learn)
    return (solution if solution.any() else descent), np.eye(support.size) if hessian is None else hessian


def _updated(hessian: Array, step: Array, change: Array) -> Array:
    """The BFGS update: the nearest definite matrix that maps the step to the change of the gradient."""
    along, product = float(step @ change), hessian @ step
    size = float(step @ product)
    if not (along > 1e-8 * size > 0):
        return hessian
    return np.asarray(hessian + np.outer(change, change) / along - np.outer(product, product) / size)


_COMPILED: dict[type, int] = {Logistic: kernels.LOGISTIC, Poisson: kernels.POISSON}
_SMALL = 200_000  # most entries of a restricted design for the compiled form
_REFINED = 1e-9  # relative change of a refinement after which no further one is needed
_CHORD = 1e-3  # a Hessian is reused while each step with it lowers the decrement by this factor


def refit(
    objective: Objective,
    support: Indices,
    start: Array | None = None,
    *,
    steps: int | None = None,
    block: Array | None = None,
    bounds: Bounds | None = None,
) -> Fit:
    """Minimise f over vectors that are zero outside `support`.

    Args:
        objective: f.
        support: coordinates that may be non-zero (k,).
        start: first guess (d,); zero if not given.
        steps: largest number of Newton steps, for an inexact fit; None iterates to the minimiser.
        block: H_QQ near the start (k, k), if known; used where every column of the Hessian takes a differentiation.
        bounds: of all coordinates; f must be convex for the result to be the minimiser within them.
    """
    if bounds is not None:
        theta = np.zeros(objective.dimension)
        if support.size:
            limits = bounds.on(support)
            first = limits.clip(np.zeros(support.size) if start is None else start[support])
            theta[support] = _minimise_within(_restricted(objective, support), first, limits)
        return Fit(support, theta, *objective.value_and_gradient(theta))
    if support.size and isinstance(objective, TorchObjective):
        first = np.zeros(objective.dimension) if start is None else start
        if steps is None:
            return refit_exactly(objective, support, first, block=block)
        return refit_loosely(objective, support, first, steps=steps)[0]
    theta = refitted(objective, support, start, steps=steps)
    return Fit(support, theta, *objective.value_and_gradient(theta))


def refitted(objective: Objective, support: Indices, start: Array | None = None, *, steps: int | None = None) -> Array:
    """The minimiser (d,) of `refit` alone, without f and its gradient, which take a pass over the data each."""
    theta = np.zeros(objective.dimension)
    if support.size and isinstance(objective, TorchObjective):
        return refit(objective, support, start, steps=steps).theta
    if isinstance(objective, GramLeastSquares):
        theta[support] = _solve(objective.hessian_block(theta, support), objective.linear[support])
    elif support.size:
        part = objective.restricted(support)
        first = np.zeros(support.size) if start is None else start[support]
        most = 50 if steps is None else steps
        compiled = _compiled(part, first, most)
        theta[support] = minimise_on_all(part, first, steps=most) if compiled is None else compiled
    return theta


def _compiled(part: Objective, start: Array, steps: int) -> Array | None:
    """The minimiser of a small logistic or Poisson model over all its coordinates; None for others."""
    family = _COMPILED.get(type(part))
    if family is None or not isinstance(part, LinearModel) or part.design.shape[0] * start.size > _SMALL:
        return None
    rows = np.ascontiguousarray(part.design.columns(np.arange(start.size)).T)
    offset = np.zeros(part.target.size) if part.offset is None else part.offset
    fine, theta = kernels.minimise(
        family, rows, part.target, part.weights, part.ridge, offset, np.ascontiguousarray(start), steps
    )
    return theta if fine else None


def _solve(block: Array, linear: Array) -> Array:
    """The solution of H_QQ z = c_Q, with one step of iterative refinement."""
    solution = newton_direction(block, -linear)
    return solution + newton_direction(block, block @ solution - linear)


def on_data(objective: Objective, fit: Fit) -> Fit:
    """A fit by the Gram matrix of least squares, refined by residuals of the data; any other fit unchanged."""
    if not isinstance(objective, LeastSquares) or not isinstance(objective.by_gram, GramLeastSquares):
        return fit
    theta, support = fit.theta.copy(), fit.support
    residual = objective.target
    if support.size:
        columns, block = objective.design.columns(support), objective.by_gram.hessian_block(theta, support)
        values, ridge = theta[support], objective.ridge[support]
        residual = objective.target - columns @ values
        for _ in range(2):
            change = newton_direction(block, ridge * values - columns.T @ residual)
            values = values + change
            residual = objective.target - columns @ values
            if np.abs(change).max() <= _REFINED * np.abs(values).max():  # a second round would change rounding only
                break
        theta[support] = values
    value = 0.5 * float(residual @ residual) + 0.5 * float(objective.ridge @ theta**2)
    return Fit(support, theta, value, objective.ridge * theta - objective.design.rmatvec(residual))


def minimise_on_all(objective: Objective, start: Array, *, steps: int = 50) -> Array:
    """Minimise f without constraints from any start, by Newton steps that are regularised and halved until f falls."""
    theta = start
    value, gradient = objective.value_and_gradient(theta)
    if not np.isfinite(value):
        theta = np.zeros_like(start)
        value, gradient = objective.value_and_gradient(theta)
    everything = np.arange(objective.dimension)
    block, previous = objective.hessian_block(theta, everything), np.inf
    if objective.quadratic:
        for _ in range(2):  # the second step is iterative refinement
            theta = theta + newton_direction(block, gradient)
            gradient = objective.value_and_gradient(theta)[1]
        return theta
    fresh = True
    for _ in range(steps):
        direction = newton_direction(block, gradient)
        decrease = -float(gradient @ direction)
        if not fresh and decrease > _CHORD * previous:
            block, fresh = objective.hessian_block(theta, everything), True
            direction = newton_direction(block, gradient)
            decrease = -float(gradient @ direction)
            if decrease > _CHORD * previous and decrease <= 1e-13 * abs(value):
                break  # even a fresh Hessian gives no progress: the rest is rounding
        step = _descend(objective, (theta, value, gradient), direction)
        if step is None:
            if fresh:
                break
            previous = 0.0  # the reused Hessian gives no progress: compute a new one
            continue
        theta, value, gradient = step
        if decrease <= 1e-30 * max(1.0, abs(value)) or decrease <= 1e-26 * abs(value):
            break
        previous, fresh = decrease, False
    return theta


def _descend(
    objective: Objective, point: tuple[Array, float, Array], direction: Array, bounds: Bounds | None = None
) -> tuple[Array, float, Array] | None:
    """The first point of the steps 1, 1/2, 1/4, ... that lowers f enough; None if there is none.

    Args:
        objective: f.
        point: theta (d,), f and its gradient (d,) there; the result has the same form.
        direction: of the steps (d,).
        bounds: of the coordinates, onto which steps are projected.
    """
    theta, value, gradient = point
    rounding, decrease = 1e-15 * max(abs(value), 1e-300), -float(gradient @ direction)
    length = 1.0
    for _ in range(kernels.HALVINGS):
        trial, expected = theta + length * direction, length * decrease
        if bounds is not None:
            trial = bounds.clip(trial)
            expected = float(gradient @ (theta - trial))
        trial_value, trial_gradient = objective.value_and_gradient(trial)
        uphill = bounds is not None and expected < 0  # a projected step may be one where a shorter one is not
        if np.isfinite(trial_value) and not uphill and trial_value <= value - 1e-4 * expected + rounding:
            return trial, trial_value, trial_gradient
        if expected <= rounding and not uphill:
            return None
        length *= 0.5
    return None


_BOUNDED_STEPS = 200  # most Newton steps within bounds, each of which may move coordinates to or from their bounds


def _restricted(objective: Objective, support: Indices) -> Objective:
    """f on a support, all other coordinates zero; by the Gram matrix where f is given by it."""
    if isinstance(objective, GramLeastSquares):
        block = objective.hessian_block(np.zeros(objective.dimension), support)
        return QuadraticObjective(block, objective.linear[support], constant=objective.constant)
    return objective.restricted(support)


def _minimise_within(objective: Objective, theta: Array, bounds: Bounds) -> Array:
    """Minimise f within bounds on all coordinates, from a point within them."""
    value, gradient = objective.value_and_gradient(theta)
    if not np.isfinite(value):
        theta = np.zeros_like(theta)
        value, gradient = objective.value_and_gradient(theta)
    everything = np.arange(theta.size)
    block = objective.hessian_block(theta, everything)
    for _ in range(_BOUNDED_STEPS):
        stuck = ((theta <= bounds.lower) & (gradient >= 0)) | ((theta >= bounds.upper) & (gradient <= 0))
        free = ~stuck
        if not free.any():
            break
        if not objective.quadratic:
            block = objective.hessian_block(theta, everything)
        direction = np.zeros_like(theta)
        direction[free] = newton_direction(block[np.ix_(free, free)], gradient[free])
        step = _descend(objective, (theta, value, gradient), direction, bounds)
        if step is None or step[1] >= value:
            steepest = np.where(free, -gradient / np.maximum(np.abs(block.diagonal()), 1e-300), 0.0)
            step = _descend(objective, (theta, value, gradient), steepest, bounds) or step
        if step is None:
            break
        change, fall = np.abs(step[0] - theta).max(), value - step[1]
        theta, value, gradient = step[0], min(value, step[1]), step[2]
        if fall <= 1e-15 * abs(value) and change <= 1e-12 * np.abs(theta).max(initial=0.0):
            break
    return theta
