"""Protocols of solvers and refinements, and guards of the options that their constructors take."""

from __future__ import annotations

from numbers import Integral
from typing import Literal, Protocol, get_args

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import ProblemError, is_a

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


def require_budget(budget: object) -> None:
    """Raise unless a budget is "fast", "default" or "best".

    Raises:
        ProblemError: any other value.
    """
    if budget not in get_args(Budget):
        raise ProblemError(f'budget must be "fast", "default" or "best", got {budget!r}.')


def require_whole(name: str, value: int, least: int, advice: str) -> None:
    """Raise unless an option is a whole number, not a bool, of at least `least`.

    Args:
        name: the option's name, for the message.
        value: the value given by the user.
        least: the smallest allowed value.
        advice: end of the message, for example "128 columns are usual".

    Raises:
        ProblemError: any other value.
    """
    if not is_a(Integral, value) or isinstance(value, bool) or value < least:
        raise ProblemError(f"{name} must be a whole number of at least {least}, got {value!r}; {advice}.")
