"""Whole parts that can be removed from a model, blocks or experts, and what a removal is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn


@dataclass(frozen=True)
class PartList:
    """Parts of one kind that stand side by side: the blocks of a list, or the experts of a mixture.

    Attributes:
        path: of the module that holds them.
        count: number of parts.
    """

    path: str
    count: int


class Parts(ABC):
    """The parts of one kind that a model has: its blocks, or its experts.

    A removal is a mapping from the path of every list to the indices of the parts that go.

    Args:
        model: with all parts.
        lists: in the order of the forward pass; each loses the same number.
        least: parts that must be left in each list.

    Attributes:
        errors: relative squared change of the output of every list, by its path, as far as `choose` measures it.
    """

    kind: ClassVar[str]

    def __init__(self, model: nn.Module, lists: Sequence[PartList], least: int) -> None:
        self.model, self.lists, self.least = model, tuple(lists), least
        self.errors: dict[str, float] = {}

    @abstractmethod
    def choose(self, keep: int, damage: Callable[[], float]) -> dict[str, list[int]]:
        """The parts to remove so that `keep` are left in each list; `damage` measures the whole model as it is.

        Raises:
            ModelError: the model does not compute with fewer parts.
        """

    @abstractmethod
    def least_removed(self, keep: int) -> int:
        """The fewest parameters that the model loses if `keep` parts are left in each list."""

    @abstractmethod
    def require_possible(self, keep: int) -> None:
        """Raise unless the class of the model can have `keep` parts in each list.

        Raises:
            ModelError: it cannot.
        """

    @abstractmethod
    def without(self, removed: Mapping[str, Sequence[int]]) -> AbstractContextManager[None]:
        """Context in which the model computes without the removed parts, within `unchanged_by_failure`."""

    @abstractmethod
    def first_changed(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Path of the first module that a removal changes."""

    @abstractmethod
    def unused(self, removed: Mapping[str, Sequence[int]]) -> list[str]:
        """Paths of modules that stay in the model until `finish`, and compute nothing."""

    @abstractmethod
    def finish(self, removed: Mapping[str, Sequence[int]]) -> None:
        """Delete the removed parts, and let the configuration follow.

        Raises:
            ModelError: the configuration cannot express this number of parts. The model is unchanged.
        """


def hidden_argument(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor | None:
    """The hidden state among a module's arguments: the first, or the one of that name."""
    value = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    return value if isinstance(value, Tensor) else None
