"""Parts of one kind that can be removed from a model, and what a removal is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor, nn

from iobs.errors import ModelError, first_line
from iobs.pruning.structure import config_fields, shapes

PartName: TypeAlias = Literal["blocks", "experts"]
Effect: TypeAlias = Callable[[], float]  # damage of the model as it is


@dataclass(frozen=True)
class Stack:
    """Parts of one kind that stand side by side: the blocks of a list, or the experts of a mixture.

    Attributes:
        path: of the module that holds them.
        count: number of parts.
    """

    path: str
    count: int


class Parts(Protocol):
    """The parts of one kind that a model has: its blocks, or its experts."""

    @property
    def name(self) -> PartName:
        """Name of the kind."""
        ...

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Places with parts, in the order of the forward pass; each loses the same number."""
        ...

    @property
    def least(self) -> int:
        """Parts that must be left."""
        ...

    @property
    def errors(self) -> Mapping[str, float]:
        """Relative squared change of the output of every stack, by its path, as far as `chosen` measures it."""
        ...

    def chosen(self, keep: int, damage: Effect) -> dict[str, list[int]]:
        """The parts to remove, by path of the stack, so that `keep` are left; `damage` measures the whole model."""
        ...

    def least_removed(self, keep: int) -> int:
        """The fewest parameters that the model loses if `keep` parts are left in each stack."""
        ...

    def require_possible(self, keep: int) -> None:
        """Check that the class of the model can have `keep` parts in each stack.

        Raises:
            ModelError: it cannot.
        """
        ...

    def without(self, removed: Mapping[str, Sequence[int]]) -> AbstractContextManager[None]:
        """Context in which the model computes without the removed parts, within `unchanged_by_failure`."""
        ...

    def first(self, removed: Mapping[str, Sequence[int]]) -> str:
        """Path of the first module that a removal changes."""
        ...

    def unused(self, removed: Mapping[str, Sequence[int]]) -> list[str]:
        """Paths of modules that stay in the model until the end of a run, and compute nothing."""
        ...

    def finish(self, removed: Mapping[str, Sequence[int]]) -> None:
        """Delete the removed parts, and let the configuration follow.

        Raises:
            ModelError: the configuration cannot express this number of parts. The model is unchanged.
        """
        ...


def configured(model: nn.Module, count: int, name: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Fields of a model's configuration with a value, as (configuration, field); the names for which `name` is true."""
    return [
        (inner, field)
        for inner, one in config_fields.configurations(model.config)
        for field, value in vars(one).items()
        if type(value) is int and value == count and name(field)
    ]


def shapes_with(
    model: nn.Module, fields: Sequence[tuple[str, str]], count: int, dropped: Sequence[int] = ()
) -> tuple[config_fields.Configuration, dict[str, tuple[int, ...]]] | str:
    """A configuration with another number, and the shapes that the model's class has with it; or why it has none.

    Args:
        model: its own configuration is unchanged.
        fields: that get the number, as (configuration, field).
        count: the number.
        dropped: places that are left out of lists with one value for each part.
    """
    config = copy.deepcopy(model.config)
    try:
        before = {getattr(config_fields.config_inside(model.config, inner), field) for inner, field in fields}
        for inner, field in fields:
            place = config_fields.config_inside(config, inner)
            for name, value in list(vars(place).items()):
                if dropped and isinstance(value, (list, tuple)) and len(value) in before:
                    setattr(place, name, type(value)(one for at, one in enumerate(value) if at not in dropped))
            setattr(place, field, count)
    except Exception as error:  # configurations check their values
        return first_line(error)
    found = shapes.built(model, config)
    return found if isinstance(found, str) else (config, found)


def require_configured(model: nn.Module, kind: str) -> None:
    """Check that a model is built from a configuration.

    Raises:
        ModelError: it is not.
    """
    if not shapes.is_configured(model):
        raise ModelError(
            f"{kind} are removed from models of transformers, whose configuration says their number; "
            f"{type(model).__name__} has none."
        )


def hidden_argument(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor | None:
    """The hidden state among a module's arguments: the first, or the one of that name."""
    value = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
    return value if isinstance(value, Tensor) else None
