"""Published scores of groups as baselines: the groups of highest score are kept, the weights do not change."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import ProblemError
from iobs.solvers.grouped.system import groups_of, kept_groups, refitted


@dataclass(frozen=True)
class GroupMagnitude:
    """Keep the groups of largest Frobenius norm."""

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Keep whole groups of the centre unchanged."""
        return _kept(problem, pattern, problem.centre().double().square().sum(0))


@dataclass(frozen=True)
class GroupWanda:
    """Wanda (Sun et al., 2023) for groups: the sum of |weight| times the norm of the input."""

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Keep whole groups of the centre unchanged."""
        norm = problem.matrix.diagonal().double().sqrt()
        return _kept(problem, pattern, problem.centre().double().abs().sum(0) * norm)


@dataclass(frozen=True)
class Flap:
    """FLAP (An et al., 2024): the variance of the input times the squared norm of its column.

    The diagonal of the Hessian must hold the variances of the inputs, as that of `FreeBias.eliminated` does.
    `FreeBias.best` gives the bias that FLAP adds.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Keep whole groups of the centre unchanged."""
        fluctuation = problem.matrix.diagonal().double()
        return _kept(problem, pattern, problem.centre().double().square().sum(0) * fluctuation)


@dataclass(frozen=True)
class RandomGroups:
    """Keep groups drawn at random.

    Args:
        seed: of the draw.
    """

    seed: int = 0

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Keep whole groups of the centre unchanged."""
        labels, keep = groups_of(pattern, problem.shape[1])
        generator = torch.Generator().manual_seed(self.seed)
        return _highest(problem, labels, torch.rand(int(labels.max()) + 1, generator=generator), keep)


@dataclass(frozen=True)
class GivenScores:
    """Keep the groups of highest given score, for scores that need more than the quadratic.

    The Fisher gates of Kwon et al. (2022) are the sums of squared gradients of the loss with respect to a factor of
    each group: `scores = gradients.square().sum(0)`.

    Args:
        scores: (groups,), real numbers.

    Raises:
        ProblemError: the scores are no vector of finite numbers. The call raises it if there is not one for each group.
    """

    scores: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        scores = torch.as_tensor(self.scores)
        if scores.ndim != 1 or len(scores) == 0 or not bool(torch.isfinite(scores).all()):
            raise ProblemError('Give the solver "scores" one finite number for each group: scores=tensor.')
        object.__setattr__(self, "scores", scores)

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Keep whole groups of the centre unchanged."""
        labels, keep = groups_of(pattern, problem.shape[1])
        if len(self.scores) != int(labels.max()) + 1:
            raise ProblemError(f"There are {int(labels.max()) + 1} groups and {len(self.scores)} scores.")
        return _highest(problem, labels, self.scores, keep)


KEEPING = GroupMagnitude, GroupWanda, Flap, RandomGroups, GivenScores  # solvers that do not change kept weights


@dataclass(frozen=True)
class GroupRefit:
    """Keep the groups and solve for all weights on them, with one Cholesky factor for all rows."""

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """Return the optimal weights on the kept groups of the solution."""
        labels, _ = groups_of(pattern, problem.shape[1])
        return refitted(problem, labels, kept_groups(solution.mask, labels), **solution.stats)


def _kept(problem: Quadratic, pattern: Pattern, scores: Tensor) -> Solution:
    """Keep the groups whose columns have the largest sum of scores; `scores` is (d,)."""
    labels, keep = groups_of(pattern, problem.shape[1])
    total = torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add_(0, labels, scores.cpu())
    return _highest(problem, labels, total, keep)


def _highest(problem: Quadratic, labels: Tensor, scores: Tensor, keep: int) -> Solution:
    """Keep the groups of highest score; of equal scores the group of lower number is kept."""
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[scores.sort(descending=True, stable=True).indices[:keep].cpu()] = True
    mask = kept[labels].to(problem.device).expand(problem.shape).contiguous()
    return Solution.of(problem, problem.centre(), mask)
