"""Solvers of quadratics under a sparsity pattern: one file for each algorithm, one entry point, `solve`."""

from iobs.solvers.admm import ADMM as ADMM
from iobs.solvers.exact import Exact as Exact
from iobs.solvers.families import REFINEMENTS as REFINEMENTS
from iobs.solvers.families import SOLVERS as SOLVERS
from iobs.solvers.interface import require_known_refinement as require_known_refinement
from iobs.solvers.interface import require_known_solver as require_known_solver
from iobs.solvers.interface import solve as solve
from iobs.solvers.interface import solve_many as solve_many
from iobs.solvers.lobs import LOBS as LOBS
from iobs.solvers.lobs import network_bound as network_bound
from iobs.solvers.magnitude import Magnitude as Magnitude
from iobs.solvers.magnitude import Wanda as Wanda
from iobs.solvers.net_trim import NetTrim as NetTrim
from iobs.solvers.net_trim import Trimmed as Trimmed
from iobs.solvers.net_trim import net_trim as net_trim
from iobs.solvers.net_trim import within_tolerance as within_tolerance
from iobs.solvers.obc import OBC as OBC
from iobs.solvers.protocols import Budget as Budget
from iobs.solvers.protocols import Refinement as Refinement
from iobs.solvers.protocols import Solver as Solver
from iobs.solvers.refit import Refit as Refit
from iobs.solvers.screened_swap import ScreenedSwap as ScreenedSwap
from iobs.solvers.sparsegpt import SparseGPT as SparseGPT
from iobs.solvers.swap import Swap as Swap
