"""Protocols of solvers and refinements, what they declare of their cost, and guards of their options."""

from __future__ import annotations

from dataclasses import dataclass, replace
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


def unless_worse(refined: Solution, before: Solution) -> Solution:
    """A refined solution; that before it, with the new stats, if rounding to the dtype has raised the loss."""
    return replace(before, stats=refined.stats) if float(refined.loss.sum()) > float(before.loss.sum()) else refined


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


@dataclass(frozen=True)
class SolveCost:
    """Cost of one call, for forecasts of time and memory.

    A solver or refinement declares it in a method `cost(rows, columns)`; `declared_cost` knows a usual one for others.

    Attributes:
        operations: additions and multiplications in products and factorisations; those in float64 count twice.
        bytes: largest size of the tensors that the call makes, at one time.
        loops: operations in loops over single entries, which run far below the speed of products.
    """

    operations: float
    bytes: float
    loops: float = 0.0


def usual_cost(rows: int, columns: int) -> SolveCost:
    """The cost of one factorisation in float64 and one product with a triangle, as in exact elimination."""
    square, matrix = columns**2, rows * columns
    return SolveCost(2 * columns**3 / 3 + rows * square, max(24 * square, 6 * square + 21 * matrix))


def declared_cost(solver: object, rows: int, columns: int) -> SolveCost:
    """The cost that a solver or refinement declares for a matrix (rows, columns); the usual one if it declares none."""
    declare = getattr(solver, "cost", usual_cost)
    cost: SolveCost = declare(rows, columns)
    return cost
