"""Protocols of solvers and refinements."""

from __future__ import annotations

from typing import Literal, Protocol

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution

Budget = Literal["fast", "default", "best"]


class Solver(Protocol):
    """Minimise a quadratic under a pattern. Inputs are never modified.

    `iobs.solve` damps the problem and decouples dead columns first, so a solver may factorise the Hessian directly.
    If that fails, the solver raises `NotPositiveDefiniteError` and `iobs.solve` calls it again with more damping.
    """

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Return weights of the problem's shape with exactly the number of kept entries that the pattern gives."""
        ...


class Refinement(Protocol):
    """Improve a solution of a problem, or return one with the same loss."""

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """Return a solution under the same pattern with at most the loss of the given solution."""
        ...
