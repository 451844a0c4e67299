"""A solver of one layer written from the paper of ALPS (Meng et al., 2024): the peer of `ADMM` inside `iobs.prune`.

    min 1/2 tr(V H V^T) - tr(V B^T),  V under the pattern

Variables are scaled to a Hessian of unit diagonal. ADMM alternates a dense solve, a projection and a multiplier update.
Every third iteration the penalty grows, by the number of mask entries that changed, until none changes. The paper then
takes ten steps of conjugate gradients on the mask; here the weights on the mask are exact, which is never worse.
`layer_race.py` runs the authors' own code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.masks import top_mask
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution

_FIRST_PENALTY, _CHECKED_EVERY, _MOST_CHECKS = 0.1, 3, 100
_GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # (share of kept entries that changed, factor of the penalty)


@dataclass(frozen=True)
class ALPSLike:
    """ADMM with the published schedule of ALPS, then exact weights on the mask."""

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The mask of the last projection, with exact weights."""
        scale = problem.matrix.diagonal().sqrt().clamp_min(1e-12)
        values, vectors = torch.linalg.eigh(problem.matrix / scale / scale[:, None])
        mask = _mask(problem.centre() * scale, problem.linear / scale, values, vectors, pattern)
        return Solution.of(problem, linalg.solve_on_support(problem.matrix, problem.linear, mask), mask)


def _mask(start: Tensor, linear: Tensor, values: Tensor, vectors: Tensor, pattern: Pattern) -> Tensor:
    """The mask at which ADMM rests; all arguments are scaled, and the Hessian is given by its eigenvectors."""
    mask = top_mask(start.abs(), pattern)
    sparse, multiplier, penalty, checked = start * mask, torch.zeros_like(start), _FIRST_PENALTY, mask
    for _ in range(_MOST_CHECKS):
        for _ in range(_CHECKED_EVERY):
            dense = ((linear - multiplier + penalty * sparse) @ vectors / (values + penalty)) @ vectors.T
            target = dense + multiplier / penalty
            mask = top_mask(target.abs(), pattern)
            sparse = target * mask
            multiplier += penalty * (dense - sparse)
        changed = float((mask != checked).sum() / mask.sum())
        if changed == 0:
            break
        penalty *= next(factor for share, factor in _GROWTH if changed >= share)
        checked = mask
    return mask
