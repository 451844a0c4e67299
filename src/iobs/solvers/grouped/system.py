"""A quadratic seen by groups of columns, in float64, and the exact weights on a set of groups.

Let P be the inverse Hessian and M = C^T C the Gram matrix of the centre's columns. Removing the groups R and refitting
all other weights raises the loss by 1/2 tr(P_RR^-1 M_RR): the rows enter only through M.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.column_groups import Groups
from iobs.core.linalg import cholesky
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import NotPositiveDefiniteError, PatternError


@dataclass(frozen=True)
class GroupSystem:
    """Matrices of a problem with the columns sorted by group; short groups are padded to equal size.

    Padding has no coupling, unit curvature and zero weight, so it changes no cost.

    Attributes:
        columns: int64 (groups, size), the column in each slot, -1 for padding.
        inverse: P, (groups size, groups size) float64.
        energy: M, (groups size, groups size) float64.
    """

    columns: Tensor
    inverse: Tensor
    energy: Tensor

    @classmethod
    def of(cls, problem: Quadratic, labels: Tensor) -> GroupSystem:
        """The system of a problem.

        Args:
            problem: the quadratic.
            labels: int64 (d,), group of every column.

        Raises:
            NotPositiveDefiniteError: the Hessian is singular up to the rounding of its dtype.
        """
        columns = columns_of(labels).to(problem.device)
        factor = definite_factor(problem.matrix)
        inverse = torch.cholesky_inverse(factor)
        centre = problem.centre().double()
        return cls(columns, spread(inverse, columns, 1.0), spread(centre.T @ centre, columns, 0.0))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of groups, and slots in each."""
        return self.columns.shape[0], self.columns.shape[1]


def groups_of(pattern: Pattern, columns: int) -> tuple[Tensor, int]:
    """Labels of the columns (columns,) and number of groups to keep.

    Raises:
        PatternError: the pattern is not `Groups`, or does not fit the columns.
    """
    if not isinstance(pattern, Groups):
        raise PatternError(f"Solvers of whole groups take the pattern iobs.Groups, got {pattern}.")
    return pattern.labels(columns), pattern.kept(columns)


def columns_of(labels: Tensor) -> Tensor:
    """Columns of each group in ascending order, int64 (groups, largest size), -1 for padding."""
    counts = torch.bincount(labels)
    order = labels.sort(stable=True).indices
    slot = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[labels[order]]
    columns = torch.full((len(counts), int(counts.max())), -1, device=labels.device)
    columns[labels[order], slot] = order
    return columns


def spread(matrix: Tensor, columns: Tensor, diagonal: float) -> Tensor:
    """Matrix (d, d) with its rows and columns in the slots of the groups; padding has this diagonal."""
    slots = columns.flatten()
    chosen = matrix[slots.clamp_min(0)][:, slots.clamp_min(0)]
    padding = slots < 0
    if bool(padding.any()):
        chosen[padding] = 0
        chosen[:, padding] = 0
        chosen.diagonal()[padding] = diagonal
    return chosen


def definite_factor(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor in float64 of a matrix that is definite beyond the rounding of its dtype.

    Raises:
        NotPositiveDefiniteError: a pivot is only rounding, for example that of a duplicate column.
    """
    factor = cholesky(matrix.double())
    least = 4 * torch.finfo(matrix.dtype).eps * matrix.diagonal().double()
    if bool((factor.diagonal().square() <= least).any()):
        raise NotPositiveDefiniteError(
            f"A {len(matrix)} x {len(matrix)} Hessian is singular up to rounding: raise the damping, "
            "or give more calibration samples than the layer has inputs."
        )
    return factor


def blocks(matrix: Tensor, groups: int) -> Tensor:
    """Diagonal blocks of a (groups size, groups size) matrix, (groups, size, size), as a copy."""
    size = len(matrix) // groups
    return matrix.reshape(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def traces(inverse: Tensor, energy: Tensor) -> Tensor:
    """tr(P_g^-1 M_g) of every group, (..., groups): twice the cost of removing it alone.

    Args:
        inverse: diagonal blocks of P, (..., groups, size, size).
        energy: diagonal blocks of M, (..., groups, size, size).

    Raises:
        NotPositiveDefiniteError: a block of P is not positive definite.
    """
    if inverse.shape[-1] == 1:
        variance = inverse[..., 0, 0]
        if bool((variance <= 0).any()):
            raise NotPositiveDefiniteError("Rounding made a variance negative: raise the damping.")
        return energy[..., 0, 0] / variance
    solved = torch.cholesky_solve(energy, cholesky(inverse))
    return solved.diagonal(dim1=-2, dim2=-1).sum(-1)


def refitted(problem: Quadratic, labels: Tensor, kept: Tensor, **stats: object) -> Solution:
    """The exact weights on the kept groups, by one Cholesky factor of H_SS for all rows, in float64.

    Args:
        problem: the quadratic.
        labels: int64 (d,), group of every column.
        kept: boolean (groups,).
        **stats: statistics of the solution.

    Raises:
        NotPositiveDefiniteError: H_SS is singular.
    """
    support = kept.to(problem.device)[labels.to(problem.device)]
    weight = torch.zeros(problem.shape, dtype=torch.float64, device=problem.device)
    if bool(support.any()):
        index = support.nonzero().flatten()
        factor = definite_factor(problem.matrix[index][:, index])
        weight[:, index] = torch.cholesky_solve(problem.linear.double()[:, index].T, factor).T
    return Solution.of(problem, weight.to(problem.dtype), support.expand(problem.shape).contiguous(), **stats)


def kept_groups(mask: Tensor, labels: Tensor) -> Tensor:
    """Boolean (groups,), groups that a mask (rows, d) of whole groups keeps."""
    kept = torch.zeros(int(labels.max()) + 1, dtype=torch.bool, device=mask.device)
    kept[labels.to(mask.device)[mask[0]]] = True
    return kept
