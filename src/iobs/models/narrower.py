"""Widths of a network that is narrower than its code builds it: kept beside the weights, and given back at load.

A network from a Python function or from timm has no configuration with its widths. So its directory names
the tensors whose shapes differ from those that the code builds, and the numbers of modules that follow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from iobs.errors import ModelError
from iobs.pruning.network.layers import joined
from iobs.pruning.structure.removal import CONFIG, set_number

Number = int | list[int]  # tuples are lists, as in JSON
# New parameters by identity of the old one, which is kept: its identity could go to another parameter otherwise.
Made = dict[int, tuple[nn.Parameter, nn.Parameter]]


@dataclass(frozen=True)
class Form:
    """The widths of a network that its code decides.

    Attributes:
        shapes: of parameters and buffers, by name.
        numbers: whole numbers, and tuples of them, of modules and their configurations: by path, then by name.
        rebuilt: names of the buffers that no file of weights holds.
    """

    shapes: dict[str, list[int]]
    numbers: dict[str, dict[str, Number]]
    rebuilt: frozenset[str]


def form_of(module: nn.Module) -> Form:
    """The form of a network."""
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    rebuilt = [joined(path, name) for path, one in module.named_modules() for name in one._non_persistent_buffers_set]
    return Form(
        {name: list(tensor.shape) for name, tensor in every if not is_lazy(tensor)},
        {path: dict(_numbers(child)) for path, child in module.named_modules()},
        frozenset(rebuilt),
    )


def changes(built: Form, now: Form) -> dict[str, dict[str, object]]:
    """Differences between a network and the one that its code builds; empty if there are none.

    Args:
        built: the form that the code builds.
        now: the form of the network that is written.

    Raises:
        ModelError: modules or tensors are gone, or a changed buffer is in no file of weights.
    """
    if gone := sorted({*built.numbers} - {*now.numbers}) or sorted({*built.shapes} - {*now.shapes}):
        raise ModelError(f"The code of this network builds {gone[0]}, which is gone; use torch.save(model, file).")
    shapes: dict[str, object] = {name: shape for name, shape in now.shapes.items() if built.shapes.get(name) != shape}
    if lost := [name for name in shapes if name in now.rebuilt]:
        raise ModelError(f"The buffer {lost[0]} has another shape, but no file holds it; use torch.save(model, file).")
    numbers: dict[str, object] = {}
    for path, own in now.numbers.items():
        changed = {name: value for name, value in own.items() if built.numbers.get(path, {}).get(name, value) != value}
        numbers |= {path: changed} if changed else {}
    return {"shapes": shapes, "numbers": numbers} if shapes else {}


def narrow(module: nn.Module, wanted: Mapping[str, Mapping[str, object]]) -> None:
    """Give a network the shapes and numbers of `changes`; the changed tensors have no values yet.

    Raises:
        ModelError: the network has no such module.
    """
    made: Made = {}
    done: set[tuple[int, str]] = set()  # a module may have several names
    try:
        for name, shape in wanted["shapes"].items():
            path, _, own = name.rpartition(".")
            holder = module.get_submodule(path)
            if (id(holder), own) not in done:
                _reshape(module, holder, own, [int(size) for size in shape], made)  # type: ignore[attr-defined]
                done.add((id(holder), own))
        for path, numbers in wanted["numbers"].items():
            for name, value in numbers.items():  # type: ignore[attr-defined]
                _set(module.get_submodule(path), name, value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"The widths do not fit the network that its code builds: {error}.") from error


def _numbers(module: nn.Module) -> Iterator[tuple[str, Number]]:
    """The whole numbers and tuples of whole numbers of a module; of its configuration also "has a bias"."""
    config = vars(module).get("config")
    for prefix, holder in (("", module), (CONFIG, config)):
        for name, value in getattr(holder, "__dict__", {}).items():
            if name.startswith("_"):
                continue
            if isinstance(value, int) and (prefix or not isinstance(value, bool)):  # a module's own are its modes
                yield prefix + name, value
            elif isinstance(value, tuple) and value and all(type(one) is int for one in value):
                yield prefix + name, list(value)


def _reshape(whole: nn.Module, module: nn.Module, name: str, shape: list[int], made: Made) -> None:
    """Replace a tensor of a module by an empty one of another shape; a bias may be new."""
    if name in module._buffers:
        old = module._buffers[name]
        assert old is not None
        module._buffers[name] = old.new_empty(shape)
        return
    if name not in module._parameters:
        raise ValueError(f"no parameter {name!r}")
    before = module._parameters[name]
    like = next(whole.parameters()) if before is None else before
    fresh = made[id(before)][1] if before is not None and id(before) in made else None
    if fresh is None:
        fresh = nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device), like.requires_grad)
    if before is not None:
        made[id(before)] = before, fresh
    module._parameters[name] = fresh


def _set(module: nn.Module, name: str, value: object) -> None:
    """Set a number of a module, of the type that it has."""
    holder = module.config if name.startswith(CONFIG) else module
    before = getattr(holder, name.removeprefix(CONFIG))
    set_number(module, name, type(before)(value))
