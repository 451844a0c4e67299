"""Net-Trim (Aghasi et al., 2017): the weights of least l1 norm whose outputs stay within a tolerance, by ADMM.

    min norm(V)_1   subject to   norm((V - C) X)_F <= tolerance

This is the program of a layer without activation. Its multiplier form 1/2 tr((V - C) H (V - C)^T) + penalty norm(V)_1
needs only the Gram matrix H = X X^T. `net_trim`, below, solves the program of a layer with a ReLU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.masks import top_mask
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import ProblemError
from iobs.solvers.protocols import require_whole
from iobs.solvers.refit import scaled, solve_weights

_RELAXED = 1.6  # over-relaxation of ADMM, between 1 and 2


@dataclass(frozen=True)
class NetTrim:
    """Net-Trim with a given count: the l1 penalty is bisected until as many entries are nonzero as the pattern keeps.

    The solution of the convex program chooses the mask. The penalty also shrinks the kept weights, so they are solved
    for again on the mask unless `refit` is False. `within_tolerance` solves the form with a tolerance.

    Args:
        refit: exact weights on the mask; False keeps the weights of the convex program.
        steps: penalties tried by bisection.
        iterations: of ADMM for each penalty.

    Raises:
        ProblemError: `steps` or `iterations` is not a positive whole number.
    """

    refit: bool = True
    steps: int = 20
    iterations: int = 20

    def __post_init__(self) -> None:
        require_whole("steps", self.steps, 1, "20 are usual")
        require_whole("iterations", self.iterations, 1, "20 are usual")

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Bisect the penalty to the count of the pattern; the largest thresholded entries are kept."""
        groups = pattern.groups(problem.shape)
        count = groups.count * groups.keep
        if groups.keep in (0, groups.size):
            mask = torch.full(problem.shape, groups.keep > 0, device=problem.device)
            return Solution.of(problem, problem.centre(), mask)
        hessian, linear, scale = scaled(problem)
        search = _Lasso(hessian, linear, scale, (problem.centre().float() * scale).contiguous())
        low, high = 0.0, search.largest_penalty()
        chosen, scores = high, search.scores()
        for _ in range(self.steps):
            penalty = 0.5 * high if low == 0 else math.sqrt(low * high)
            search.run(penalty, self.iterations)
            scores, chosen = search.scores(), penalty
            kept = int((scores > penalty).sum())
            if kept == count:
                break
            low, high = (penalty, high) if kept > count else (low, penalty)
        mask = top_mask(scores, pattern)
        if self.refit:
            return Solution.of(problem, solve_weights(problem, mask), mask)
        shrunk = (problem.linear - chosen * search.signs()).double()
        return Solution.of(
            problem, linalg.solve_on_support(problem.matrix, shrunk, mask).to(problem.dtype), mask, penalty=chosen
        )


def within_tolerance(
    problem: Quadratic, tolerance: float, *, accuracy: float = 1e-7, iterations: int = 20_000
) -> Solution:
    """The weights of least l1 norm with an error of at most the tolerance, for a layer without activation.

    Args:
        problem: the layer, (rows, d), with a positive definite Hessian H = X X^T.
        tolerance: largest norm((V - C) X)_F, where C is the centre.
        accuracy: relative, of the error and of the fixed point of ADMM.
        iterations: largest number of ADMM iterations for each penalty.

    Returns:
        The weights; `stats` holds their "l1" norm, "error" and "penalty".

    Raises:
        ProblemError: the tolerance is negative.
        NotPositiveDefiniteError: the Hessian is singular.
    """
    if not tolerance >= 0:
        raise ProblemError(f"The tolerance must not be negative, got {tolerance}.")
    double = problem.to(torch.float64)
    centre = double.centre()
    linalg.cholesky(double.matrix)
    scale = double.matrix.diagonal().sqrt()
    search = _Lasso(double.matrix / scale / scale[:, None], double.linear / scale, scale, centre * scale)

    def error(weight: Tensor) -> float:
        change = weight - centre
        return math.sqrt(max(0.0, float((change @ double.matrix * change).sum())))

    low, high = 0.0, search.largest_penalty()
    weight, penalty = centre, 0.0
    if error(torch.zeros_like(centre)) <= tolerance:
        low, weight, penalty = high, torch.zeros_like(centre), high
    while high - low > 1e-3 * accuracy * high and abs(error(weight) - tolerance) > accuracy * tolerance:
        middle = 0.5 * (low + high)
        search.run(middle, iterations, 1e-2 * accuracy)
        candidate = search.polished(double, middle)
        if error(candidate) > tolerance:
            high = middle
        else:
            low, weight, penalty = middle, candidate, middle
    mask = weight != 0
    stats = {"l1": float(weight.abs().sum()), "error": error(weight), "penalty": penalty}
    return Solution.of(problem, weight.to(problem.dtype), mask, **stats)


class _Lasso:
    """ADMM for 1/2 u H u^T - b u^T + penalty sum_j |u_j| / scale_j in scaled variables u = scale v, from a warm start.

    The parameter of ADMM is 1: the variables are scaled to curvatures near 1.
    """

    def __init__(self, hessian: Tensor, linear: Tensor, scale: Tensor, start: Tensor) -> None:
        self.linear = linear
        self.scale = scale
        self.inverse = linalg.shifted_inverse(hessian, 1.0)
        self.target = start.clone()
        self.multiplier = torch.zeros_like(start)
        self.argument = start.clone()  # what the last projection thresholded

    def largest_penalty(self) -> float:
        """The least penalty whose solution is zero."""
        return float((self.linear * self.scale).abs().max())

    def run(self, penalty: float, iterations: int, tolerance: float = 0.0) -> None:
        """Iterate until the primal and dual residuals are at most `tolerance`, relative to the target."""
        threshold = penalty / self.scale
        for count in range(iterations):
            dense = (self.linear + self.target - self.multiplier) @ self.inverse
            relaxed = _RELAXED * dense + (1 - _RELAXED) * self.target
            self.argument = relaxed + self.multiplier
            target = self.argument.sign() * (self.argument.abs() - threshold).clamp_min(0)
            self.multiplier = self.argument - target
            if tolerance and count % 10 == 9:
                size = max(float(target.norm()), 1e-300)
                if float((dense - target).norm()) + float((target - self.target).norm()) <= tolerance * size:
                    self.target = target
                    return
            self.target = target

    def scores(self) -> Tensor:
        """Sizes (rows, d) of what was thresholded, in units of the penalty: an entry above the penalty is not zero."""
        return self.argument.abs() * self.scale

    def signs(self) -> Tensor:
        """Signs (rows, d) of what was thresholded."""
        return self.argument.sign()

    def polished(self, problem: Quadratic, penalty: float) -> Tensor:
        """Exact solution on the support and signs of the target; the target where that changes a sign."""
        mask = self.target != 0
        weight = linalg.solve_on_support(problem.matrix, problem.linear - penalty * self.target.sign(), mask)
        if bool((weight.sign() != self.target.sign()).any()):
            return self.target / self.scale
        return weight


# ---- The convex program of Net-Trim for a layer with a ReLU, by ADMM on the samples

_BALANCE = 10.0  # ratio of the residuals from which the parameter of ADMM is changed
_BALANCED_UNTIL = 1000  # last iteration that changes it; ADMM converges for any fixed parameter
_CHECKED_EVERY = 25  # iterations between looks at the residuals
_BISECTIONS = 10  # tolerances tried for a budget: the least is found to a thousandth of norm(Y)


@dataclass(frozen=True)
class Trimmed:
    """Weights of a layer that `net_trim` found.

    Attributes:
        weight: (rows, d), the dtype of the given weight.
        error: norm(relu(V X) - relu(W X))_F.
        tolerance: bound of the error that the convex program had.
        iterations: of ADMM.
        converged: whether the residuals of ADMM fell below the accuracy.
    """

    weight: Tensor = field(repr=False)
    error: float
    tolerance: float
    iterations: int
    converged: bool

    @property
    def nonzeros(self) -> int:
        """Number of entries that are not zero."""
        return int((self.weight != 0).sum())


def net_trim(
    weight: Tensor,
    inputs: Tensor,
    tolerance: float | None = None,
    *,
    keep: int | None = None,
    accuracy: float = 1e-6,
    iterations: int = 20_000,
) -> Trimmed:
    """Weights of least l1 norm whose outputs after the ReLU stay near those of the dense layer (Aghasi et al., 2017).

        min norm(V)_1   subject to   norm((V X - Y)_A)_F <= tolerance,   (V X)_B <= 0

    Y = relu(W X), A are the entries where Y is positive, B the others. The constraint implies
    norm(relu(V X) - Y)_F <= tolerance.

    Args:
        weight: W (rows, d) of the dense layer.
        inputs: X (d, samples), a sample in each column.
        tolerance: largest error, Frobenius norm over all samples.
        keep: largest number of non-zero weights; the least tolerance that needs no more is found by bisection, to a
            thousandth of norm(Y)_F. Alternative to `tolerance`. Fewer may be kept: the second constraint lets a row
            start only with several non-zeros at once.
        accuracy: of the residuals of ADMM, relative.
        iterations: largest number for each tolerance.

    Returns:
        The weights, exactly zero where the program sets them to zero.

    Raises:
        ProblemError: shapes do not fit, or not exactly one of `tolerance` and `keep` is given and possible.
    """
    if weight.ndim != 2 or inputs.ndim != 2 or weight.shape[1] != inputs.shape[0]:
        raise ProblemError(
            f"net_trim needs a (rows, d) weight and (d, samples) inputs, got {tuple(weight.shape)} and "
            f"{tuple(inputs.shape)}."
        )
    if (tolerance is None) == (keep is None):
        raise ProblemError("Give exactly one of tolerance= and keep= to net_trim.")
    if tolerance is not None and not tolerance >= 0:
        raise ProblemError(f"The tolerance must not be negative, got {tolerance}.")
    if keep is not None and not 0 <= keep <= weight.numel():
        raise ProblemError(f"keep must lie between 0 and the {weight.numel()} weights there are, got {keep}.")
    program = _Program(weight.double(), inputs.double())
    if tolerance is not None:
        trimmed = program.solve(tolerance, accuracy, iterations)
        return replace(trimmed, weight=trimmed.weight.to(weight.dtype))
    assert keep is not None
    low, high = 0.0, program.size
    best = program.solve(0.0 if keep == weight.numel() else high, accuracy, iterations)
    for _ in range(_BISECTIONS if 0 < keep < weight.numel() else 0):
        middle = 0.5 * (low + high)
        trimmed = program.solve(middle, accuracy, iterations)
        if trimmed.nonzeros <= keep:
            high, best = middle, trimmed
        else:
            low = middle
    return replace(best, weight=best.weight.to(weight.dtype))


class _Program:
    """ADMM for min norm(V)_1 with Z = U X in the constraint set and U = V, from the last solution.

    U is a least-squares step with one factorisation; V a threshold; Z a projection. The inputs are divided by their
    root mean square, so that the parameter of ADMM means the same for both constraints.
    """

    def __init__(self, weight: Tensor, inputs: Tensor) -> None:
        self.inputs = inputs
        self.outputs = (weight @ inputs).relu()
        self.active = self.outputs > 0
        self.size = float(self.outputs.norm())
        self.unit = max(float(inputs.square().sum(1).mean().sqrt()), 1e-300)
        self.scaled = inputs / self.unit
        gram = self.scaled @ self.scaled.T
        gram.diagonal().add_(1.0)
        self.inverse = linalg.inverse(gram)
        self.target = weight.clone()
        self.image = self.outputs / self.unit
        self.multipliers = torch.zeros_like(self.target), torch.zeros_like(self.image)
        self.parameter = 1.0 / max(float(weight.abs().mean()), 1e-300)

    def solve(self, tolerance: float, accuracy: float, iterations: int) -> Trimmed:
        """Iterate until the primal and dual residuals are at most `accuracy`, relative to the variables."""
        if tolerance >= self.size:
            return Trimmed(torch.zeros_like(self.target), self.size, tolerance, 0, True)
        target, image = self.target, self.image
        first, second = self.multipliers
        converged, count = False, 0
        while not converged and count < iterations:
            count += 1
            dense = (target - first + (image - second) @ self.scaled.T) @ self.inverse
            product = dense @ self.scaled
            loose = _RELAXED * dense + (1 - _RELAXED) * target + first
            moved = _RELAXED * product + (1 - _RELAXED) * image + second
            new_target = loose.sign() * (loose.abs() - 1 / self.parameter).clamp_min(0)
            new_image = self._project(moved, tolerance / self.unit)
            first, second = loose - new_target, moved - new_image
            if count % _CHECKED_EVERY == 0:
                primal = _norm(dense - new_target, product - new_image)
                dual = _norm(new_target - target, new_image - image)
                converged = max(primal, dual) <= accuracy * max(_norm(new_target, new_image), 1e-300)
                if not converged and count <= _BALANCED_UNTIL:
                    factor = 2.0 if primal > _BALANCE * dual else 0.5 if dual > _BALANCE * primal else 1.0
                    self.parameter *= factor
                    first, second = first / factor, second / factor
            target, image = new_target, new_image
        self.target, self.image, self.multipliers = target, image, (first, second)
        error = float(((target @ self.inputs).relu() - self.outputs).norm())
        return Trimmed(target, error, tolerance, count, converged)

    def _project(self, image: Tensor, radius: float) -> Tensor:
        """Nearest outputs in the set: a ball about Y where Y is positive, not positive elsewhere."""
        centre = self.outputs / self.unit
        change = (image - centre).masked_fill(~self.active, 0)
        length = float(change.norm())
        change *= min(1.0, radius / length) if length > 0 else 0.0
        return torch.where(self.active, centre + change, image.clamp_max(0))


def _norm(first: Tensor, second: Tensor) -> float:
    return float((first.square().sum() + second.square().sum()).sqrt())
