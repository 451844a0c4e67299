"""What a solver is: a quadratic and a pattern in, a solution out."""

from __future__ import annotations

from typing import Literal, Protocol

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution

Budget = Literal["fast", "default", "best"]


class Solver(Protocol):
    """Minimise a quadratic under a pattern. Inputs are never modified.

    The door `iobs.solve` has already damped the problem and taken dead columns out of the race, so a solver sees a
    Hessian that it may factorise as it is; if that fails it raises `NotPositiveDefiniteError` and is called again
    with more damping.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Find a matrix of the problem's shape with exactly the pattern's count of kept entries."""
        ...


class Refinement(Protocol):
    """Improve a solution of the same problem; never makes it worse."""

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """A solution with loss at most the given one's, on the same pattern."""
        ...
