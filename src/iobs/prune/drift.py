"""How far a layer corrects the drift of its input: as far as held-out samples confirm.

A layer that is to put out what another network's layer does on inputs that have not drifted is fitted by regression,
and from few samples such a fit corrects noise. So the correction is a ridge regression of its own, away from what the
layer's current weights put out, whose damping is raised for as long as the error on held-out samples falls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.linalg import cholesky
from iobs.prune.gram import Statistics

DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SHARE = 0.05  # held-out rows for each one that is fitted to, at least: fewer say less than the fit does
_LEAST = 1e-4  # stands for less: a Gram of few samples is singular


@dataclass(frozen=True)
class Correction:
    """The linear term of a layer's problem, and how its drift was damped.

    Args:
        linear: (rows, columns).
        damping: relative to the mean of the Gram's diagonal; 0 where nothing is damped beyond what the solver does.
    """

    linear: Tensor
    damping: float = 0.0


def corrected(statistics: Statistics, group: int, target: Tensor, current: Tensor, damping: float) -> Correction:
    """The linear term B H of min ||V X - T D||^2, where B is the ridge regression that held-out samples confirm.

    B = S + (T D X^T - S H) (H + mu I)^-1 with H = X X^T. The least mu, the solver's own damping, is left to the solver:
    the linear term is then T D X^T itself.

    Args:
        statistics: Grams of the layer's inputs; with no or very few held-out ones nothing is damped.
        group: which group of the rows.
        target: (rows of the group, columns) weight T of the layer that is imitated on its own inputs D.
        current: (rows of the group, columns) weight S that the layer has.
        damping: of the solver, relative to the mean of the diagonal.

    Raises:
        NotPositiveDefiniteError: the Hessian cannot be factorised.
    """
    gram, heldout = statistics.calibration, statistics.heldout
    hessian = gram.own[group]
    plain = target @ gram.target_cross()[group]
    if gram.cross is None or heldout is None or heldout.cross is None or heldout.count < _SHARE * gram.count:
        return Correction(plain)
    metric, wanted = heldout.own[group], target @ heldout.cross[group]
    drift = plain - current @ hessian

    def regression(mu: float) -> Tensor:
        shifted = hessian.clone()
        shifted.diagonal().add_(mu * hessian.diagonal().mean())
        return current + torch.cholesky_solve(drift.T, cholesky(shifted)).T

    def error(weight: Tensor) -> float:
        """||B X - T D||^2 / count on the held-out samples, up to ||T D||^2."""
        return float(((weight @ metric).sub_(wanted, alpha=2)).mul_(weight).sum(dtype=torch.float64))

    chosen: Tensor | None = None
    strength = 0.0
    least = error(regression(max(damping, _LEAST)))
    for stronger in DAMPINGS:
        if stronger <= damping:
            continue
        weight = regression(stronger)
        found = error(weight)
        if found >= least:
            break
        chosen, strength, least = weight, stronger, found
    return Correction(plain if chosen is None else chosen @ hessian, strength)
