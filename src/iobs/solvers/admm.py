"""ADMM on the exact sparsity constraint, followed by a solve on the final support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.partition import Partition
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Factors, Quadratic, Solution
from iobs.solvers.exact import Exact
from iobs.solvers.kernels.project import largest, project, restart
from iobs.solvers.magnitude import Magnitude
from iobs.solvers.obc import OBC
from iobs.solvers.protocols import Budget, SolveCost, require_budget
from iobs.solvers.refit import Refit, is_cheap, scaled
from iobs.solvers.screened_swap import ScreenedSwap
from iobs.solvers.swap import Swap


@dataclass(frozen=True)
class Schedule:
    """Growth of the penalty and number of iterations for one budget.

    Attributes:
        penalties: penalty of the first and of the last stage; it grows geometrically between them.
        stages: number of penalties, each with one factorisation; 5/8 of it with fewer rows than half the columns.
        iterations: largest total number of iterations, shared evenly by the stages.
        relaxation: over-relaxation of the dense step.
        refit: conjugate gradient steps on the final support.
    """

    penalties: tuple[float, float]
    stages: int
    iterations: int
    relaxation: float
    refit: int


# "fast" gains 4 % of its error by the start at a penalty of 0.5 and with the multiplier of the centre's projection. The
# other two have no over-relaxation: it loses on other layers what it gains on ill-conditioned ones.
SCHEDULES = {
    "fast": Schedule((0.5, 1.0), stages=3, iterations=6, relaxation=1.4, refit=5),
    "default": Schedule((0.25, 2.0), stages=10, iterations=40, relaxation=1.0, refit=6),
    "best": Schedule((0.2, 2.0), stages=16, iterations=200, relaxation=1.0, refit=6),
}
_BALANCED = 0.7  # penalty from which an unchanged support ends the search; a little below the balanced penalty, 1
_REST = 1e-3  # mask entries that changed, relative to the kept entries, up to which a support counts as unchanged


@dataclass(frozen=True)
class ADMM:
    """Alternating direction method of multipliers: dense least-squares step, projection, multiplier update.

    Variables are scaled by (H_ii / [H^-1]_ii)^(1/4), the geometric mean of the metrics of diag(H) and of OBS. In this
    scale, variable i has curvature k_i if the others are fixed and 1/k_i if the others are free. A penalty near 1 lies
    between the two for every layer, so the penalty needs no tuning. It grows in stages, each with one factorisation:
    the support first moves freely and then settles. The search runs in float32.

    On small problems, whatever the budget, exact 1-swaps improve the solution, and the refitted magnitude support
    competes with it. Budget "best" adds exact greedy removal there, and screened swaps on large problems.

    Args:
        budget: "fast", "default" or "best", time against error.

    Raises:
        ProblemError: any other budget.
    """

    budget: Budget = "default"

    def __post_init__(self) -> None:
        require_budget(self.budget)

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """The best support found, with exact weights if they are cheap, else weights from conjugate gradients."""
        groups = pattern.groups(problem.shape)
        if groups.keep in (0, groups.size):
            mask = torch.full(problem.shape, groups.keep > 0, device=problem.device)
            return Solution.of(problem, problem.centre(), mask)
        solution = self._search(problem, groups)
        return _best_of(problem, pattern, _competitors(problem, pattern, solution, self.budget))

    def cost(self, rows: int, columns: int) -> SolveCost:
        """A product of the rows with a square in every iteration, and an inverse in every stage.

        The search holds the scaled Hessian, an inverse and half of another, and five matrices. The final weights need
        one square and nine matrices, more on a GPU than on a CPU.
        """
        schedule, square, matrix = SCHEDULES[self.budget], columns**2, rows * columns
        products = schedule.iterations + schedule.refit + 1
        inverses = _stages(schedule, rows, columns) * 4 / 3 + 2  # by halves; the first by a factorisation
        operations = 2.0 * matrix * columns * products + inverses * columns**3
        return SolveCost(operations, max(10 * square + 21 * matrix, 4 * square + 36 * matrix))

    def _search(self, problem: Quadratic, groups: Partition) -> Solution:
        schedule = SCHEDULES[self.budget]
        hessian, linear, scale = scaled(problem)
        start = (problem.centre().float() * scale).contiguous()
        mask, target = alternate(hessian, linear, start, groups, schedule, problem.factors)
        if is_cheap(mask):
            weight = linalg.solve_on_support(problem.matrix, problem.linear, mask)
        else:
            start = target.mul_(mask)
            weight, _ = linalg.masked_conjugate_gradients(hessian, linear, mask, start, iterations=schedule.refit)
            weight.div_(scale)
        return Solution.of(problem, weight.to(problem.dtype), mask)


def _stages(schedule: Schedule, rows: int, columns: int) -> int:
    """The number of stages for a matrix: fewer for few rows, where inverses take most of the time."""
    return schedule.stages if 2 * rows >= columns else max(2, schedule.stages * 5 // 8)


def alternate(
    hessian: Tensor, linear: Tensor, start: Tensor, groups: Partition, schedule: Schedule, factors: Factors
) -> tuple[Tensor, Tensor]:
    """Run ADMM in float32 until the support has settled or the schedule ends.

    It starts from the projected centre. The initial multiplier is the part that the projection removed.

    Args:
        hessian: (d, d), scaled.
        linear: (rows, d) contiguous, scaled.
        start: (rows, d) contiguous, the scaled centre; overwritten.
        groups: groups of the pattern, with 0 < keep < size.
        schedule: penalties and iterations.
        factors: cache for the factorisations of the stages.

    Returns:
        The mask of the last projection, with exact counts, and the target that was projected.
    """
    stages = _stages(schedule, groups.all_rows(len(linear)), len(hessian))
    low, high = schedule.penalties
    target, mask = start, largest(start, groups)
    dense, right = torch.empty_like(linear), torch.empty_like(linear)
    penalty, resting = low, 0
    for stage in range(stages):
        previous, penalty = penalty, low * (high / low) ** (stage / (stages - 1))
        solver = factors.get(("penalty", penalty), partial(linalg.shifted_inverse, hessian, penalty))
        restart(right, target, mask, linear, previous / penalty, penalty)
        steps = schedule.iterations * (stage + 1) // stages - schedule.iterations * stage // stages
        for _ in range(steps):
            before = mask.clone() if penalty > _BALANCED else None
            torch.mm(right, solver, out=dense)
            project(dense, target, mask, linear, groups, penalty, schedule.relaxation)
            dense, right = right, dense
            if before is not None:
                changed = int(groups.total((mask != before).sum()))
                # Require two iterations in a row: the first iteration of a stage may change little in any case.
                resting = resting + 1 if changed <= _REST * groups.all_kept else 0
                if resting == 2:
                    return largest(target, groups), target
        del solver  # free it before the next inverse is computed: 127 MB at 5,632 columns
    return largest(target, groups), target


# ---- The search and its competitors: the best solution, separately for every row if rows are independent

_SMALL = 1 << 24  # rows x columns^3 up to which magnitude and exact swaps compete whatever the budget
_ELIMINATION = 80  # (kept entries of a row)^3 / columns^2 up to which swaps cost no more than the search before them
_PROVABLE = 16  # columns up to which the optimum of a row is proven in milliseconds


def _competitors(problem: Quadratic, pattern: Pattern, solution: Solution, budget: Budget) -> Iterator[Solution]:
    """The given solution and its competitors, which depend on the budget and the size of the problem.

    On small problems the refitted magnitude support is a competitor. A solution that is never worse than it inherits
    the convergence rate that is proven for Top-k.
    """
    yield solution
    rows, columns = problem.shape
    operations = rows * columns**3
    if operations <= _SMALL:
        yield Refit()(problem, pattern, Magnitude()(problem, pattern))
        swap = Swap()
        yield swap(problem, pattern, solution)
        if budget == "best":
            yield swap(problem, pattern, OBC()(problem, pattern))
            if columns <= _PROVABLE and pattern.groups(problem.shape).size <= columns:
                yield Exact()(problem, pattern)
    elif budget == "best" and (int(solution.mask.sum()) / rows) ** 3 <= _ELIMINATION * columns**2:
        yield ScreenedSwap()(problem, pattern, solution)


def _best_of(problem: Quadratic, pattern: Pattern, solutions: Iterable[Solution]) -> Solution:
    """The candidate of least loss: for each row, or for the whole layer if its rows share one count."""
    first, *others = solutions
    if not others:
        return first
    if pattern.groups(problem.shape).size > problem.shape[1]:
        return min([first, *others], key=lambda candidate: float(candidate.loss.sum()))
    weight, mask, loss = first.weight, first.mask, first.loss
    for other in others:
        better = other.loss < loss
        weight = torch.where(better[:, None], other.weight, weight)
        mask = torch.where(better[:, None], other.mask, mask)
        loss = torch.where(better, other.loss, loss)
    return Solution.of(problem, weight, mask, **first.stats)
