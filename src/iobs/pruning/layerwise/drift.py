"""Correction of drift: a layer compensates the errors of its inputs, as far as held-out samples confirm it.

Pruned layers before a layer change its inputs (drift). To match the output of another model on inputs without drift,
the layer is fitted by regression, which from few samples also fits noise. The correction is therefore a separate ridge
regression, centred at the output of the layer's current weights. Its damping is raised while the held-out error falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.linalg import cholesky
from iobs.errors import NotPositiveDefiniteError
from iobs.pruning.calibration.gram import SEARCH_COLUMNS, Statistics
from iobs.pruning.runtime.ranks import ALONE, Ranks

DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_LEAST_SHARE = 0.05  # held-out rows per calibration row, below which their error is too noisy
_SAFE_DAMPING = 1e-3  # from which regressions of wide layers are computed in float32
_LEAST_DAMPING = 1e-4  # the smallest damping used here, because the Gram of few samples is singular


@dataclass(frozen=True)
class Correction:
    """The linear term of a layer's problem, and the damping of its drift.

    Args:
        linear: (rows, columns).
        damping: relative to the mean of the Gram's diagonal; 0 for no damping besides that of the solver.
    """

    linear: Tensor
    damping: float = 0.0


def corrected(
    statistics: Statistics, group: int, target: Tensor, current: Tensor, damping: float, ranks: Ranks = ALONE
) -> Correction:
    """The linear term B H of min ||V X - T D||^2 over V, with B from the ridge regression that held-out samples select.

    Target outputs Y in the statistics take the place of T D. A mu below the rounding of H is left out.

    B = S + (T D X^T - S H) (H + mu I)^-1 with H = X X^T. If the smallest mu is best, the damping is left to the solver,
    and the linear term is T D X^T.

    Args:
        statistics: Grams of the layer's inputs; without enough held-out samples nothing is damped.
        group: number of the group.
        target: (rows of the group, columns) weight T of the layer whose output on the inputs D is matched.
        current: (rows of the group, columns) current weight S of the layer.
        damping: of the solver, relative to the mean of the diagonal.
        ranks: processes that each have some rows of the layer, and select one damping together.
    """
    gram, heldout = statistics.calibration, statistics.heldout
    hessian = gram.own[group]
    plain = gram.linear(target, group)
    if gram.cross is None or heldout is None or heldout.cross is None or heldout.count < _LEAST_SHARE * gram.count:
        return Correction(plain)
    # Damping bounds the condition, so that float32 chooses as well as float64 in half of the time.
    single = len(hessian) >= SEARCH_COLUMNS and damping >= _SAFE_DAMPING
    dtype = torch.float32 if single else hessian.dtype
    metric, heldout_linear = heldout.own[group].to(dtype), heldout.linear(target, group).to(dtype)
    drift, base, start = (plain - current @ hessian).to(dtype), hessian.to(dtype), current.to(dtype)

    def regression(mu: float) -> Tensor | None:
        """The weights; None if rounding makes the Gram indefinite even with this damping."""
        shifted = base.clone()
        shifted.diagonal().add_(mu * base.diagonal().mean())
        try:
            factor = cholesky(shifted)
        except NotPositiveDefiniteError:
            return None
        return start + torch.cholesky_solve(drift.T, factor).T

    def error(weight: Tensor | None) -> float:
        """||B X - T D||^2 / count on the held-out samples, without the constant ||T D||^2 / count."""
        if weight is None:
            return ranks.total(math.inf)
        return ranks.total(
            float(((weight @ metric).sub_(heldout_linear, alpha=2)).mul_(weight).sum(dtype=torch.float64))
        )

    chosen: Tensor | None = None
    strength = 0.0
    least = error(regression(max(damping, _LEAST_DAMPING)))
    for stronger in DAMPINGS:
        if stronger <= damping:
            continue
        weight = regression(stronger)
        heldout_error = error(weight)
        if least <= heldout_error < math.inf:
            break
        if heldout_error < least:
            chosen, strength, least = weight, stronger, heldout_error
    return Correction(plain if chosen is None else chosen.to(hessian.dtype) @ hessian, strength)
