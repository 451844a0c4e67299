"""Solvers for whole groups of columns under one mask for all rows; here the best known set of groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers.grouped.exchange import Tableau, exchanged
from iobs.solvers.grouped.proof import prove
from iobs.solvers.grouped.removal import removal_path
from iobs.solvers.grouped.system import GroupSystem, groups_of, refitted
from iobs.solvers.protocols import Budget, require_budget

_PROVABLE = 16  # groups up to which the best set is always proved
_LIMIT = 1_000_000  # nodes of a search; more than the number of sets of 16 groups
_PASSES = {"fast": 0, "default": 20, "best": None}


@dataclass(frozen=True)
class GroupSearch:
    """Greedy removal with exact updates, then exchanges, then branch and bound for at most 16 groups.

    Budget "fast" leaves out the exchanges, and "best" continues them until no exchange helps.

    Args:
        budget: "fast", "default" or "best", time against error.

    Raises:
        ProblemError: any other budget.
    """

    budget: Budget = "default"

    def __post_init__(self) -> None:
        require_budget(self.budget)

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Kept groups with exact weights.

        `stats["swaps"]` counts the exchanges. `stats["certified"]` is True if no exchange of two groups lowers the
        loss. `stats["proved"]` is True if no other set of as many groups has a smaller loss. More than 16 groups are
        not proved, except for trivial counts.
        """
        labels, keep = groups_of(pattern, problem.shape[1])
        groups = int(labels.max()) + 1
        if keep == groups:
            every = torch.ones(groups, dtype=torch.bool, device=problem.device)
            return refitted(problem, labels, every, swaps=0, certified=True, proved=True)
        trivial = keep == 0
        system = GroupSystem.of(problem, labels)
        kept = removal_path(system, keep).kept(groups, keep).to(problem.device)
        passes = _PASSES[self.budget]
        swaps, certified = 0, trivial
        if passes != 0 and not trivial:
            kept, swaps, certified = exchanged(Tableau.of(problem, labels), kept, passes)
        proved = trivial
        if groups <= _PROVABLE and not trivial:
            proof = prove(system, kept, _LIMIT)
            kept, proved = proof.kept, proof.proved
        return refitted(problem, labels, kept, swaps=swaps, certified=certified or proved, proved=proved)
