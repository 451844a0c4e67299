"""The convex program of Net-Trim for a layer with a ReLU, by ADMM on the samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.errors import ProblemError

_RELAXED = 1.6  # over-relaxation of ADMM, between 1 and 2
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
