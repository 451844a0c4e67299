"""Exact 1-swaps inside one row, in closed form, until no swap lowers the loss.

Let S be the support of a row, P the other variables, A = H_SS^-1 and w = A b_S the optimal weights. Let T = H_PS A,
s the diagonal of the Schur complement H_PP - T H_SP, and g = b_P - H_PS w. Admitting j gains g_j^2 / (2 s_j). Then
removing i costs (w_i - T_ji g_j / s_j)^2 / (2 (A_ii + T_ji^2 / s_j)). Each swap is two updates of rank one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg


@dataclass
class RowState:
    """State of one row for swaps. An admitted variable takes the slot of the removed one, so slots keep their group.

    Attributes:
        support: int64 (k,), the variables of S; ascending when built.
        rest: int64 (p,), the variables of P; ascending when built.
        inverse: (k, k), A.
        spread: (p, k), T.
        schur: (p,), s.
        gradient: (p,), g.
        weight: (k,), w.
    """

    support: Tensor
    rest: Tensor
    inverse: Tensor
    spread: Tensor
    schur: Tensor
    gradient: Tensor
    weight: Tensor

    @classmethod
    def build(cls, hessian: Tensor, linear: Tensor, mask: Tensor) -> RowState:
        """Build the state of a row from its support.

        Args:
            hessian: (d, d).
            linear: (d,).
            mask: boolean (d,).

        Raises:
            NotPositiveDefiniteError: H_SS is singular.
        """
        support, rest = mask.nonzero().flatten(), (~mask).nonzero().flatten()
        columns = hessian.index_select(0, support)
        square, crossed = columns.index_select(1, support), columns.index_select(1, rest).T
        inverse = linalg.inverse(square).contiguous() if len(support) else square
        spread = crossed @ inverse
        weight = inverse @ linear[support]
        schur = hessian.diagonal()[rest] - (spread * crossed).sum(1)
        gradient = (linear[rest] - crossed @ weight).masked_fill(~independent(schur, hessian, rest), 0)
        # The Schur complement of a definite matrix is positive; rounding must not make it negative.
        schur = torch.maximum(schur, torch.finfo(schur.dtype).eps * hessian.diagonal()[rest])
        return cls(support, rest, inverse, spread, schur, gradient, weight)

    def admissions(self) -> Tensor:
        """Twice the gain of admitting each variable of P alone, (p,)."""
        return self.gradient.square() / self.schur

    def removals(self) -> Tensor:
        """Twice the cost of removing each variable of S alone, (k,)."""
        return self.weight.square() / self.inverse.diagonal()


def independent(schur: Tensor, hessian: Tensor, rest: Tensor) -> Tensor:
    """True where a variable of P does not depend on S, as a duplicate of a member does; others gain nothing, (p,)."""
    return schur > 4 * torch.finfo(schur.dtype).eps * hessian.diagonal()[rest]


def swap_until_optimal(
    state: RowState, hessian: Tensor, inside: int, outside: int, tolerance: float, limit: int
) -> int:
    """Make the best swap until no swap gains more than the tolerance; the state is changed in place.

    Args:
        state: state of the row.
        hessian: (d, d) contiguous.
        inside: slots of S in a group: k for an unstructured row, N for N:M.
        outside: slots of P in a group: p, or M - N.
        tolerance: least gain of a swap, as twice the decrease of the loss.
        limit: largest number of swaps.

    Returns:
        The number of swaps made.
    """
    if state.spread.numel() == 0:
        return 0
    if hessian.device.type != "cpu":
        return swap_until_optimal_torch(state, hessian, inside, outside, tolerance, limit)
    from iobs.solvers.kernels import swaps_numba

    # This form skips variables of P with too small a gain of admission.
    arrays = swaps_numba.RowArrays(*(tensor.numpy() for tensor in vars(state).values()))
    return swaps_numba.swap_until_optimal(arrays, hessian.numpy(), inside, outside, tolerance, limit)


def swap_until_optimal_torch(
    state: RowState, hessian: Tensor, inside: int, outside: int, tolerance: float, limit: int
) -> int:
    """Torch form of `swap_until_optimal`."""
    made = 0
    while made < limit:
        gain, leave, enter = best_swap(state, hessian, inside, outside)
        if not gain > tolerance:
            break
        make_swap(state, hessian, leave, enter)
        made += 1
    return made


def best_swap(state: RowState, hessian: Tensor, inside: int, outside: int) -> tuple[float, int, int]:
    """Twice the gain of the best swap within a group, the slot of S to remove and the slot of P to admit."""
    groups = len(state.rest) // outside
    spread = state.spread.reshape(groups, outside, groups, inside).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    schur, step = state.schur.reshape(groups, outside, 1), (state.gradient / state.schur).reshape(groups, outside, 1)
    weight = state.weight.reshape(groups, 1, inside)
    variance = state.inverse.diagonal().reshape(groups, 1, inside)
    removal = (weight - spread * step).square() / (variance + spread.square() / schur)
    gain = state.admissions().reshape(groups, outside, 1) - removal
    gain = gain.masked_fill(~independent(state.schur, hessian, state.rest).reshape(groups, outside, 1), 0).flatten()
    best = int(gain.argmax())
    group, pair = divmod(best, inside * outside)
    enter, leave = divmod(pair, inside)
    return float(gain[best]), group * inside + leave, group * outside + enter


def make_swap(state: RowState, hessian: Tensor, leave: int, enter: int) -> None:
    """Exchange the variable in slot `enter` of P and the variable in slot `leave` of S."""
    entering = int(state.rest[enter])
    x, s = state.spread[enter].clone(), float(state.schur[enter])
    step = float(state.gradient[enter]) / s
    # Admit: row sigma of the Schur complement is the coupling of the admitted variable to P.
    sigma = hessian[entering, state.rest] - state.spread @ hessian[entering, state.support]
    state.spread.addr_(sigma, x, alpha=-1 / s)
    state.schur -= sigma.square() / s
    state.gradient -= sigma * step
    state.weight -= x * step
    state.inverse.addr_(x, x, alpha=1 / s)
    # Remove: v is the removed variable's column of the enlarged inverse, with the admitted variable in its slot.
    variance, value = float(state.inverse[leave, leave]), float(state.weight[leave])
    v = state.inverse[:, leave].clone()
    v[leave] = -x[leave] / s
    state.inverse[leave] = state.inverse[:, leave] = -x / s
    state.inverse[leave, leave] = 1 / s
    state.weight[leave] = step
    state.inverse.addr_(v, v, alpha=-1 / variance)
    state.weight -= v * (value / variance)
    towards = state.spread[:, leave].clone()
    state.spread[:, leave] = sigma / s
    state.spread.addr_(towards, v, alpha=-1 / variance)
    state.schur += towards.square() / variance
    state.gradient += towards * (value / variance)
    state.spread[enter] = -v / variance
    state.schur[enter] = 1 / variance
    state.gradient[enter] = value / variance
    state.rest[enter] = state.support[leave]
    state.support[leave] = entering
