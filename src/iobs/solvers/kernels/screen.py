"""1-swaps among candidate columns of each row; the other members of the support are always at their optimum.

Let Q be the candidate columns, F the other members and H_FF = L L^T. Let X = L^-1 H_FQ. Minimised
over F, the quadratic on Q has the Hessian H_QQ - X^T X and the linear term b_Q - X^T L^-1 b_F.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.partition import Partition
from iobs.solvers.kernels.threads import over_rows


@dataclass
class Rows:
    """State of the search in all rows, changed in place.

    Attributes:
        mask: boolean (rows, d) contiguous.
        weight: float32 (rows, d) contiguous, the optimum on the mask for rows that were searched.
        prices: float32 (rows, 3). Column 0 is twice the cost of the cheapest removal. Column 1 is twice the gain of the
            best admission. Column 2 is the scale b H^-1 b of the row on its support.
        names: int64 (rows, 2): columns of the cheapest removal and of the best admission.
        swaps: int64 (rows,), number of swaps made.
    """

    mask: Tensor
    weight: Tensor
    prices: Tensor
    names: Tensor
    swaps: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The attributes, in their order."""
        return self.mask, self.weight, self.prices, self.names, self.swaps

    @classmethod
    def of(cls, mask: Tensor, weight: Tensor) -> Rows:
        """State before the search; the tensors are not copied."""
        rows = len(mask)
        prices = torch.tensor([torch.inf, 0.0, 0.0], device=mask.device).repeat(rows, 1)
        names = torch.zeros(rows, 2, dtype=torch.int64, device=mask.device)
        return cls(mask, weight, prices, names, torch.zeros(rows, dtype=torch.int64, device=mask.device))


def swap_rows(
    rows: Rows, hessian: Tensor, linear: Tensor, slots: Tensor, groups: Partition, tolerance: float, limit: int
) -> None:
    """In each row make the best swap among its candidate columns until no swap gains more than the tolerance.

    Rows with members that cannot be factorised are left unchanged.

    Args:
        rows: state to change.
        hessian: float32 (d, d) contiguous.
        linear: float32 (rows, d) contiguous.
        slots: int64 (rows, slots): candidate columns of each row, members first, for N:M in whole groups; -1 is
            padding. Rows with padding only are skipped.
        groups: groups of the pattern.
        tolerance: least gain of a swap, relative to the scale of the row.
        limit: largest number of swaps in each row.
    """
    # One row after another, with a decision after each swap, would leave a GPU idle. Cores of the CPU share the rows.
    from iobs.solvers.kernels import screen_numba

    copies = [tensor.cpu() for tensor in rows.tensors()]  # the tensors themselves on a CPU
    arrays = screen_numba.SearchArrays(*(tensor.numpy() for tensor in copies))
    matrix, right, columns = (tensor.cpu().contiguous().numpy() for tensor in (hessian, linear, slots))
    search, settings = screen_numba.swap_rows, screen_numba.SwapSettings(groups.keep, groups.size, tolerance, limit)
    over_rows(lambda start, stop: search(start, stop, arrays, matrix, right, columns, settings), len(right))
    if hessian.device.type != "cpu":
        for original, copied in zip(rows.tensors(), copies, strict=True):
            original.copy_(copied)
