"""Tables of the solvers and refinements by name: one family for each kind of pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from iobs.core.column_groups import Groups
from iobs.core.patterns import Budget, Grid, Pattern, Rate, SparseGrid, require_pattern
from iobs.errors import PatternError
from iobs.solvers.admm import ADMM
from iobs.solvers.exact import Exact
from iobs.solvers.gridded.baselines import GPTQ, JointSparseGPT, OBROrder, RoundToNearest
from iobs.solvers.gridded.search import GridSearch
from iobs.solvers.grouped import GroupSearch
from iobs.solvers.grouped.exchange import Exchange
from iobs.solvers.grouped.proof import GroupExact
from iobs.solvers.grouped.removal import Osscar, Removal
from iobs.solvers.grouped.scores import Flap, GivenScores, GroupMagnitude, GroupRefit, GroupWanda, RandomGroups
from iobs.solvers.lobs import LOBS
from iobs.solvers.magnitude import Magnitude, Wanda
from iobs.solvers.net_trim import NetTrim
from iobs.solvers.obc import OBC
from iobs.solvers.protocols import Refinement, Solver
from iobs.solvers.refit import Refit
from iobs.solvers.sparsegpt import SparseGPT
from iobs.solvers.successive_rounding import SuccessiveRounding
from iobs.solvers.swap import Swap

Solvers = Mapping[str, Callable[..., Solver]]
Refinements = Mapping[str, Callable[..., Refinement]]

SOLVERS: Solvers = {
    "magnitude": Magnitude,
    "wanda": Wanda,
    "sparsegpt": SparseGPT,
    "obc": OBC,
    "lobs": LOBS,
    "nettrim": NetTrim,
    "admm": ADMM,
    "exact": Exact,
}
REFINEMENTS: Refinements = {"refit": Refit, "swap": Swap}
GROUP_SOLVERS: Solvers = {
    "search": GroupSearch,
    "greedy": Removal,
    "exact": GroupExact,
    "osscar": Osscar,
    "random": RandomGroups,
    "magnitude": GroupMagnitude,
    "wanda": GroupWanda,
    "flap": Flap,
    "scores": GivenScores,
}
UNIT_SOLVERS = tuple(sorted(GROUP_SOLVERS.keys() - {"scores"}))  # those that need no values of the caller
GROUP_REFINEMENTS: Refinements = {"refit": GroupRefit, "swap": Exchange}
GRID_SOLVERS: Solvers = {
    "admm": GridSearch,
    "gptq": GPTQ,
    "sparsegpt": JointSparseGPT,
    "obr": OBROrder,
    "magnitude": RoundToNearest,
}
RATE_SOLVERS: Solvers = {"rounding": SuccessiveRounding}
BUDGETED = {"admm", "search"}  # solvers with a `budget` option


@dataclass(frozen=True)
class SolverFamily:
    """Solvers of one kind of pattern.

    Attributes:
        solvers: by name.
        refinements: by name.
        default: name of the solver that is used if none is given.
        whole_columns: masks hold whole columns, also columns whose input is always zero.
    """

    solvers: Solvers
    refinements: Refinements
    default: str
    whole_columns: bool = False


ENTRIES = SolverFamily(SOLVERS, REFINEMENTS, "admm")
COLUMN_GROUPS = SolverFamily(GROUP_SOLVERS, GROUP_REFINEMENTS, "search", whole_columns=True)
GRIDS = SolverFamily(GRID_SOLVERS, {}, "admm")
RATES = SolverFamily(RATE_SOLVERS, {}, "rounding")


FAMILIES = (ENTRIES, COLUMN_GROUPS, GRIDS, RATES)


def family_of(pattern: Pattern) -> SolverFamily:
    """The family of a pattern.

    Raises:
        PatternError: the object is no pattern.
    """
    require_pattern(pattern)
    if isinstance(pattern, Budget):
        raise PatternError("A budget is divided among the layers of a network by iobs.prune; give a pattern here.")
    if isinstance(pattern, (Grid, SparseGrid)):
        return GRIDS
    if isinstance(pattern, Rate):
        return RATES
    return COLUMN_GROUPS if isinstance(pattern, Groups) else ENTRIES


def require_fit(pattern: Pattern, shape: tuple[int, int]) -> None:
    """Raise unless a pattern fits a matrix of this shape.

    Raises:
        PatternError: it does not.
    """
    if isinstance(pattern, Groups):
        pattern.kept(shape[1])
        return
    groups = pattern.groups(shape)
    if groups.count > 1 and shape[1] % groups.size:
        raise PatternError(
            f"The pattern {pattern} has groups of {groups.size} entries; a group must lie within one row, here of "
            f"{shape[1]} columns, or be the whole matrix."
        )
