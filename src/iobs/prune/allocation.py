"""How a network's sparsity is spread over its layers."""

from __future__ import annotations

from iobs.core.patterns import Pattern
from iobs.errors import ProblemError
from iobs.prune.layers import Layer


def allocate(name: str, pattern: Pattern, layers: tuple[Layer, ...]) -> dict[Layer, Pattern]:
    """The pattern of every layer.

    Raises:
        ProblemError: an unknown allocation.
    """
    if name != "uniform":
        raise ProblemError(f'There is no allocation {name!r}; choose "uniform".')
    return dict.fromkeys(layers, pattern)
