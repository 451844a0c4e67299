"""Solvers of quadratics under a sparsity pattern: one file for each algorithm, one entry point, `solve`."""

from iobs.solvers.admm import ADMM
from iobs.solvers.exact import Exact
from iobs.solvers.interface import (
    REFINEMENTS,
    SOLVERS,
    require_known_refinement,
    require_known_solver,
    solve,
    solve_many,
)
from iobs.solvers.lobs import LOBS, network_bound
from iobs.solvers.magnitude import Magnitude, Wanda
from iobs.solvers.net_trim import NetTrim, Trimmed, net_trim, within_tolerance
from iobs.solvers.obc import OBC
from iobs.solvers.protocols import Budget, Refinement, Solver
from iobs.solvers.refit import Refit
from iobs.solvers.screened_swap import ScreenedSwap
from iobs.solvers.sparsegpt import SparseGPT
from iobs.solvers.swap import Swap

__all__ = [
    "ADMM",
    "LOBS",
    "OBC",
    "REFINEMENTS",
    "SOLVERS",
    "Budget",
    "Exact",
    "Magnitude",
    "NetTrim",
    "Refinement",
    "Refit",
    "ScreenedSwap",
    "Solver",
    "SparseGPT",
    "Swap",
    "Trimmed",
    "Wanda",
    "net_trim",
    "network_bound",
    "require_known_refinement",
    "require_known_solver",
    "solve",
    "solve_many",
    "within_tolerance",
]
