"""Solvers of quadratics under a sparsity pattern, one algorithm a file, one door: `solve`."""

from iobs.solvers.base import Budget, Refinement, Solver
from iobs.solvers.door import REFINEMENTS, SOLVERS, require_known, solve, solve_many
from iobs.solvers.heldout import solve_by_held_out
from iobs.solvers.swap import Swap

__all__ = [
    "REFINEMENTS",
    "SOLVERS",
    "Budget",
    "Refinement",
    "Solver",
    "Swap",
    "require_known",
    "solve",
    "solve_by_held_out",
    "solve_many",
]
