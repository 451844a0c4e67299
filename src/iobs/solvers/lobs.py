"""L-OBS (Dong, Chen and Pan, 2017): one ranking by the saliency of OBS, its updates, and a bound of the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.masks import top_mask
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import ProblemError

_BATCH_ELEMENTS = 1 << 24  # entries of one batch of triangular systems: 128 MB in float64


@dataclass(frozen=True)
class LOBS:
    """Layer-wise Optimal Brain Surgeon: entries are ranked once, and the inverse Hessian is never updated.

    The saliency of entry j of a row is c_j^2 / (2 [H^-1]_jj). In the order of saliency each removed entry is set to
    zero by the step -(v_j / [H^-1]_jj) [H^-1]_j of Optimal Brain Surgeon. Here v is the row so far. Later steps change
    entries that were removed before; the mask sets them to zero at the end. `OBC` updates the inverse and ranks anew.

    `stats["bound"]` bounds what the layer loses, q(V) - q(C) <= bound. It follows from the triangle inequality in the
    norm of H. A step of saliency L has the length sqrt(2 L), and the entries that the mask sets to zero are one more
    step. With damping q is the damped quadratic; the bound then holds for the undamped one too if the anchor is the
    centre, as for a layer that matches its own weights. `network_bound` carries the errors of all layers to the output
    of a network.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Remove the entries of least saliency in one order, and report the bound of the error."""
        centre = problem.centre().double()
        inverse = problem.factors.get(("inverse", torch.float64), lambda: linalg.inverse(problem.matrix.double()))
        saliency = 0.5 * centre.square() / inverse.diagonal()
        mask = top_mask(saliency, pattern)
        multipliers, lengths = _multipliers(inverse, centre, mask, saliency)
        weight = centre - multipliers @ inverse
        remainder = weight.masked_fill(mask, 0)
        last = (remainder @ problem.matrix.double() * remainder).sum(1).clamp_min(0).sqrt()
        bound = 0.5 * float((lengths + last).square().sum())
        return Solution.of(problem, weight.to(problem.dtype), mask, bound=bound)


def _multipliers(inverse: Tensor, centre: Tensor, mask: Tensor, saliency: Tensor) -> tuple[Tensor, Tensor]:
    """Multiples of the rows of H^-1 that all steps together subtract, and the sum of the lengths of the steps.

    Step i subtracts a_i = v_i / G_ii times row i of H^-1, where v_i = c_i - sum_{j < i} G_ij a_j. So a solves the lower
    triangular system of G = [H^-1]_RR for the removed entries R in their order.

    Args:
        inverse: (d, d) float64.
        centre: (rows, d) float64.
        mask: boolean (rows, d), True where an entry is kept.
        saliency: (rows, d).

    Returns:
        Multipliers (rows, d), zero on kept entries, and lengths in the norm of H (rows,).
    """
    multipliers, lengths = torch.zeros_like(centre), centre.new_zeros(len(centre))
    removed = (~mask).sum(1)
    most = int(removed.max())
    if most == 0:
        return multipliers, lengths
    order = saliency.masked_fill(mask, torch.inf).argsort(dim=1, stable=True)[:, :most]
    real = torch.arange(most, device=centre.device) < removed[:, None]
    size = max(1, _BATCH_ELEMENTS // (most * most))
    for first in range(0, len(centre), size):
        rows = slice(first, first + size)
        index, there = order[rows], real[rows]
        systems = linalg.padded_systems(inverse, index, there)
        right = (centre[rows].gather(1, index) * there)[:, :, None]
        steps = torch.linalg.solve_triangular(systems.tril_(), right, upper=False)[:, :, 0]
        multipliers[rows].scatter_(1, index, steps)
        lengths[rows] = (steps.abs() * systems.diagonal(dim1=1, dim2=2).sqrt()).sum(1)
    return multipliers, lengths


def network_bound(errors: Sequence[float], weights: Sequence[Tensor]) -> float:
    """Bound of the output's error of a chain of pruned layers (Dong, Chen and Pan, 2017, theorem 3.2).

    The activations between the layers must not increase distances (ReLU, tanh, and the identity do not). With the
    errors e_l of the layers and the pruned weights V_l, the output changes by at most sum_l e_l prod_{m > l} norm(V_m).
    The spectral norm is used, which is at most the Frobenius norm of the paper.

    Args:
        errors: for each layer norm((V_l - W_l) X_l)_F on the inputs X_l of the dense network. Upper bounds of it are
            sqrt(2 bound) of `LOBS` for the Hessian X_l X_l^T, and the tolerance of `net_trim`.
        weights: pruned weight of each layer, in the same order.

    Returns:
        Bound of the Frobenius norm of the output's change.

    Raises:
        ProblemError: the numbers of errors and weights differ.
    """
    if len(errors) != len(weights):
        raise ProblemError(f"Give one error for each weight, got {len(errors)} errors for {len(weights)} weights.")
    total = 0.0
    for error, weight in zip(errors, weights, strict=True):
        total = total * float(torch.linalg.matrix_norm(weight.double(), 2)) + error
    return total
