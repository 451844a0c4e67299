"""1-swaps among screened entries: most of the gain of `swap` in a fraction of its time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.partition import Partition
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.kernels import over_rows
from iobs.solvers.protocols import require_whole, unless_worse
from iobs.solvers.refit import scaled
from iobs.solvers.swap import exchange_pairs

_REFIT = 5  # conjugate gradient steps after each pass, for rows that exchanged an entry with another row
_MOST = 64  # largest number of swaps in a row, before float32 rounding builds up
_TOLERANCE = 1e-6  # least gain of a swap, relative to the row's b H^-1 b on its support


@dataclass(frozen=True)
class ScreenedSwap:
    """1-swaps between the kept entries of least saliency and the pruned entries of largest gain in every row.

    Kept entries are members of the support, pruned entries outsiders. The candidates of a row are the members of least
    w_i^2 / [H^-1]_ii and the outsiders of largest g_j^2 [H^-1]_jj. These are a lower bound on the cost of removal and
    an upper bound on the gain of admission. A Schur complement eliminates all other members, so the gains of swaps
    among candidates are exact. If the layer shares one count, rows then exchange entries. Computed in float32; the
    result is not certified.

    Args:
        candidates: number of members, and number of outsiders, in each row.
        passes: passes over the rows; later passes skip rows that the previous pass did not change.

    Raises:
        ProblemError: an option is not a positive whole number.
    """

    candidates: int = 48
    passes: int = 3

    def __post_init__(self) -> None:
        require_whole("candidates", self.candidates, 1, "48 members and 48 outsiders of a row are usual")
        require_whole("passes", self.passes, 1, "3 are usual")

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """Return a solution of at most the same loss; `stats` counts its "swaps" and its "exchanges" between rows."""
        groups = pattern.groups(problem.shape)
        hessian, linear, scale = scaled(problem)
        rows = Rows.of(solution.mask.clone(), solution.weight.float() * scale)
        moved = torch.ones(len(linear), dtype=torch.bool, device=linear.device)
        exchanges = 0
        for _ in range(self.passes):
            before = rows.mask.clone()
            slots = candidate_columns(hessian, linear, rows, groups, self.candidates).masked_fill(~moved[:, None], -1)
            swap_rows(rows, hessian, linear, slots, groups, _TOLERANCE, _MOST)
            exchanges += _exchange(rows) if groups.size > problem.shape[1] else 0
            start = rows.weight.mul_(rows.mask)
            rows.weight, _ = linalg.masked_conjugate_gradients(hessian, linear, rows.mask, start, iterations=_REFIT)
            moved = (rows.mask != before).any(1)
        stats = {**solution.stats, "swaps": int(rows.swaps.sum()), "exchanges": exchanges}
        refined = Solution.of(problem, (rows.weight / scale).to(problem.dtype), rows.mask, **stats)
        return unless_worse(refined, solution)


def _exchange(rows: Rows) -> int:
    """Exchange entries between rows, the cheapest removals for the best admissions; return the number of exchanges."""
    removal, admission, scale = rows.prices.cpu().unbind(1)
    givers, takers = exchange_pairs(removal, admission, _TOLERANCE * float(scale.mean()))
    givers, takers = givers.to(rows.mask.device), takers.to(rows.mask.device)
    rows.mask[givers, rows.names[givers, 0]] = False
    rows.mask[takers, rows.names[takers, 1]] = True
    return len(givers)


def candidate_columns(hessian: Tensor, linear: Tensor, rows: Rows, groups: Partition, candidates: int) -> Tensor:
    """Candidate columns of every row, (rows, slots): members first, then outsiders; -1 fills rows with too few.

    Args:
        hessian: (d, d), scaled so that H_ii = [H^-1]_ii.
        linear: (rows, d), scaled.
        rows: masks and the optimal weights on them.
        groups: groups of the pattern; for N:M whole groups are candidates.
        candidates: number of members, and number of outsiders.
    """
    root = hessian.diagonal().sqrt()
    cost = (rows.weight / root).abs().masked_fill(~rows.mask, torch.inf)
    gain = ((linear - rows.weight @ hessian) * root).abs().masked_fill(rows.mask, -1.0)
    if groups.size >= len(root):
        return _candidates_of_rows(cost, gain, candidates)
    return _candidates_of_groups(cost, gain, rows.mask, groups.size, candidates)


def _candidates_of_rows(cost: Tensor, gain: Tensor, candidates: int) -> Tensor:
    count = min(candidates, cost.shape[1])
    leaving, entering = cost.topk(count, largest=False), gain.topk(count)
    members = leaving.indices.masked_fill(leaving.values.isinf(), -1)
    return torch.cat([members, entering.indices.masked_fill(entering.values < 0, -1)], 1)


def _candidates_of_groups(cost: Tensor, gain: Tensor, mask: Tensor, size: int, candidates: int) -> Tensor:
    """All columns of the N:M groups with the largest gain of an outsider minus cost of a member."""
    rows, d = mask.shape
    bold = gain.reshape(rows, -1, size).amax(2).square()
    cheap = cost.reshape(rows, -1, size).amin(2).square()
    count = min(d // size, max(1, 2 * candidates // size))
    starts = (bold - cheap).topk(count).indices.sort(1).values * size
    columns = (starts[:, :, None] + torch.arange(size, device=mask.device)).reshape(rows, -1)
    order = (~mask.gather(1, columns)).to(torch.int8).sort(dim=1, stable=True).indices
    return columns.gather(1, order)


# ---- The search in a row
# Let Q be the candidate columns, F the other members of the support, which are always at their optimum, and
# H_FF = L L^T. Let X = L^-1 H_FQ. Minimised over F, the quadratic on Q has the Hessian H_QQ - X^T X and the linear term
# b_Q - X^T L^-1 b_F.


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
