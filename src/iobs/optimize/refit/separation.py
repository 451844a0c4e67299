"""Separation: columns that tell the outcomes apart, so that a coefficient has no finite best value.

Along such a coefficient the loss falls for ever, as exp(-t). Its information vanishes against that of the model without
features, while a Newton step keeps the length that it had. Both are measured without the ridge term.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from iobs.errors import SeparationWarning, listed
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.cox import Cox
from iobs.optimize.objectives.design import Array, Indices
from iobs.optimize.objectives.linear import LinearModel
from iobs.optimize.objectives.tabled import Multinomial
from iobs.optimize.refit.newton import Fit, refit

_LITTLE = 1e-6  # share of its first information below which a coefficient may have no finite best value
_NOTHING = 1e-12  # share below which it has none, since rounding hides the steps
_SOME = 1e-2  # share below which a long step that was not taken is no sign of an early stop
# Length of a step that a fit has not taken although f falls along it, over the coefficient and its standard error.
_LONG = 0.1
_STEP = 1e-3  # length of a Newton step, relative to the coefficient, that shows that it still grows


def separating_columns(objective: Objective, fit: Fit) -> Indices:
    """The columns of a fit whose coefficients grow without bound, sorted.

    Args:
        objective: f; only generalised linear models, Cox and multinomial models can have such columns.
        fit: a fit of f; its support holds no coordinate that is at a bound.
    """
    if not isinstance(objective, (LinearModel, Cox, Multinomial)) or objective.quadratic or not fit.support.size:
        return np.zeros(0, np.int64)
    support, theta = fit.support, fit.theta
    free = np.isin(support, np.setdiff1d(support, _constants(objective)))
    first = refit(objective, _constants(objective)).theta
    scale = np.sqrt(np.maximum(objective.hessian_diagonal(first) - objective.ridge, 1e-300))[support]
    before, now = (_inverse(_hessian(objective, at, support, scale)) for at in (first, theta))
    share = before.diagonal() / now.diagonal()
    slope = fit.gradient[support] - objective.ridge[support] * theta[support]
    step = np.abs(now @ (slope / scale)) / scale
    growing = (share < _LITTLE) & (step > _STEP * np.abs(theta[support])) | (share < _NOTHING)
    left = np.abs(now @ (fit.gradient[support] / scale)) / scale
    size = np.maximum(np.abs(theta[support]), np.sqrt(np.maximum(now.diagonal(), 0.0)) / scale)
    growing |= (share < _SOME) & (left > _LONG * size)  # f overflows before the information vanishes
    return np.unique(support[free & growing] // objective.outputs).astype(np.int64)


def warn_of_separation(objective: Objective, fit: Fit, names: Sequence[str] | None = None) -> None:
    """Warn of the columns of a fit whose coefficients grow without bound.

    Args:
        objective: f.
        fit: a fit of f.
        names: of the columns; their numbers if not given.
    """
    columns = separating_columns(objective, fit).tolist()
    if columns:
        shown = listed([f"column {j}" if names is None else names[j] for j in columns])
        warnings.warn(
            f"The outcomes are separated by {shown}: the best coefficient is infinite there, and the value and the "
            "standard error that are given mean nothing. Leave the column out, or give a ridge, such as 0.001.",
            SeparationWarning,
            stacklevel=2,
        )


def _constants(objective: LinearModel | Cox | Multinomial) -> Indices:
    """The coordinates of the intercepts."""
    if isinstance(objective, Multinomial):
        return objective.forced
    has_one = isinstance(objective, LinearModel) and objective.mean is not None
    return np.arange(objective.dimension - has_one, objective.dimension)


def _hessian(objective: LinearModel | Cox | Multinomial, theta: Array, support: Indices, scale: Array) -> Array:
    """The scaled Hessian of the likelihood on a support, without the zeros of softmax: shifts of all classes."""
    block = (objective.hessian_block(theta, support) - np.diag(objective.ridge[support])) / np.outer(scale, scale)
    shifts = np.ones((objective.outputs, objective.outputs)) if objective.outputs > 1 else np.zeros((1, 1))
    return np.asarray(block + np.kron(np.eye(support.size // objective.outputs), shifts))


def _inverse(matrix: Array) -> Array:
    """The inverse of a semidefinite matrix; eigenvalues of nearly zero give nearly infinite entries."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors / np.maximum(values, 1e-30)) @ vectors.T)
