"""iobs: minimise a loss under a hard sparsity constraint, with second-order information."""

from iobs.core.patterns import NM, Unstructured
from iobs.core.quadratic import Quadratic, Solution
from iobs.solvers import solve

__version__ = "0.1.0"
__all__ = ["NM", "Quadratic", "Solution", "Unstructured", "solve"]
