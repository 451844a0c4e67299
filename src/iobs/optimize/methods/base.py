"""The protocol of a method: an immutable `State`, a start and a step."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from iobs.optimize.objectives.design import Array
from iobs.optimize.problem import Problem


@dataclass(frozen=True)
class State:
    """An iterate and the memory of its method.

    Attributes:
        theta: (d,).
        value: f(theta).
        gradient: of f at theta (d,).
        memory: private to the method, which passes it from step to step.
        done: the method has finished.
        busy: the method has more to do even if theta did not change.
        message: a note on this step.
    """

    theta: Array
    value: float
    gradient: Array
    memory: Any = None
    done: bool = False
    busy: bool = False
    message: str = ""


def state_at(problem: Problem, theta: Array | None, **details: Any) -> State:
    """The state at theta, or at zero if theta is None; the details are further attributes of `State`."""
    theta = np.zeros(problem.dimension) if theta is None else theta
    return State(theta, *problem.objective.value_and_gradient(theta), **details)


class Method(Protocol):
    """An algorithm. Its settings are its fields; all that changes is in the `State`."""

    def begin(self, problem: Problem, theta: Array | None) -> State:
        """The start: theta if given, else zero."""
        return state_at(problem, theta)

    @abstractmethod
    def step(self, problem: Problem, state: State) -> State:
        """The next iterate."""
        ...
