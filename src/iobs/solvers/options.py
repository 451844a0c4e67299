"""Checks of solver options, shared by the constructors of all solvers."""

from __future__ import annotations

from numbers import Integral
from typing import get_args

from iobs.errors import ProblemError, is_a
from iobs.solvers.protocols import Budget


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
