"""Copies of a model that run their own modules.

`copy.deepcopy` copies modules and bound methods, but no functions. A function on an instance, such as a hook or
`model.forward = torch.no_grad()(model.forward)`, would still run the modules of the original, which it holds as a
variable of the function around it, as a default or as a global name. Here the copy gets a function of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from iobs.errors import ModelError, first_line, unless_out_of_memory
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.modes import keeping_attributes, seeded
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch

M = TypeVar("M", bound=nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # tables of functions that a forward pass calls


def copied(model: M, shared: Mapping[int, object] | None = None) -> M:
    """A copy of a model whose functions run the modules of the copy.

    Args:
        model: the model.
        shared: what the copy has in place of some tensors of the model, by their `id`; other tensors are copied.
    """
    copies: dict[int, Any] = dict(shared or {})
    duplicate = copy.deepcopy(model, copies)
    functions = _Functions(copies)
    for module in duplicate.modules():
        tables = [vars(module), *(vars(module)[name] for name in _HOOKS)]
        for table in tables:
            for name, value in table.items():
                if callable(value) and not isinstance(value, nn.Module) and functions.reach(value):
                    table[name] = functions.of_copy(value)
    return duplicate


def dense_copy(model: M, shared: Mapping[int, object] | None = None) -> M:
    """A copy of a dense model; arguments as in `copied`.

    Raises:
        ModelError: an attribute of a module cannot be copied.
    """
    try:
        return copied(model, shared)
    except unless_out_of_memory(RuntimeError, TypeError) as error:  # results of a training step, locks and the like
        raise ModelError(
            "The dense model cannot be copied, because a module holds an attribute besides parameters and buffers that "
            f"cannot be copied: {first_line(error)}. Remove it, and prune again."
        ) from error


@torch.no_grad()
def require_own_modules(duplicate: nn.Module, model: nn.Module, batch: Batch) -> None:
    """Raise unless the copy of a model runs no module of the model, if functions on an instance could do so.

    Args:
        duplicate: the copy, in eval mode.
        model: the original.
        batch: calibration data, of which the first sample is run.

    Raises:
        ModelError: it does; names the module.
    """
    if not any(
        "forward" in vars(module) or any(vars(module)[name] for name in _HOOKS) for module in duplicate.modules()
    ):
        return

    def refuse(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        raise ModelError(
            f"The dense model cannot be copied: its copy runs the module {path or 'itself'!r} of the original, which a "
            "function that was set on a module (forward, or a hook) holds. Remove it, or write the change as a class."
        )

    device = next(duplicate.parameters()).device
    paths = [path for path, _ in model.named_modules()]
    with before_calls(model, paths, refuse), keeping_attributes(duplicate), seeded(duplicate, 0):
        batches.forward(duplicate, batches.to_device(batches.first_sample(batch), device))


class _Functions:
    """Functions with the copies in place of the objects of the original that they hold.

    Args:
        copies: by the `id` of the original, as `copy.deepcopy` fills it.
    """

    def __init__(self, copies: dict[int, Any]) -> None:
        self.copies = copies

    def reach(self, value: object) -> bool:
        """True if a value is or holds an object of the original."""
        seen, waiting = set[int](), [value]
        while waiting:
            part = waiting.pop()
            if id(part) in self.copies and self.copies[id(part)] is not part:
                return True
            if id(part) not in seen:
                seen.add(id(part))
                waiting += self._parts(part)
        return False

    def _parts(self, value: object) -> Iterator[object]:
        """The objects that a function, a method or a collection holds; of globals only those of its own file."""
        if isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, FunctionType):
            yield from _contents(value).values()
            yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values())
            for used in _globals_of(value).values():
                if not isinstance(used, FunctionType) or used.__globals__ is value.__globals__:
                    yield used
        elif type(value) is list or type(value) is tuple or type(value) is set:
            yield from value
        elif type(value) is dict:
            yield from value.values()
        elif _is_callable_object(value):
            yield from vars(value).values()

    def of_copy(self, value: Any) -> Any:
        """The value for the copy of the model."""
        if id(value) in self.copies:
            return self.copies[id(value)]
        if not self.reach(value):
            return value
        if isinstance(value, MethodType):
            return MethodType(self.of_copy(value.__func__), self.of_copy(value.__self__))
        if isinstance(value, partial):
            named = {name: self.of_copy(part) for name, part in value.keywords.items()}
            return partial(self.of_copy(value.func), *map(self.of_copy, value.args), **named)
        if isinstance(value, FunctionType):
            return self._function(value)
        if type(value) is dict:
            return {name: self.of_copy(part) for name, part in value.items()}
        if type(value) in (list, tuple, set):
            return type(value)(map(self.of_copy, value))
        duplicate = self.copies[id(value)] = copy.copy(value)
        vars(duplicate).update({name: self.of_copy(part) for name, part in vars(value).items()})
        return duplicate

    def _function(self, function: FunctionType) -> FunctionType:
        """The function with variables, defaults and globals of the copy."""
        cells = tuple(CellType() for _ in function.__closure__ or ())
        namespace = dict(function.__globals__)
        duplicate = FunctionType(function.__code__, namespace, function.__name__, None, cells)
        self.copies[id(function)] = duplicate  # before its contents, which may hold the function
        contents = _contents(function)
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if name in contents:
                cell.cell_contents = self.of_copy(contents[name])
        namespace.update({name: self.of_copy(value) for name, value in _globals_of(function).items()})
        duplicate.__defaults__ = self.of_copy(function.__defaults__)
        duplicate.__kwdefaults__ = self.of_copy(function.__kwdefaults__)
        duplicate.__qualname__ = function.__qualname__
        vars(duplicate).update({name: self.of_copy(value) for name, value in vars(function).items()})
        return duplicate


def _contents(function: FunctionType) -> dict[str, object]:
    """The variables of the functions around a function that it uses, by name; those without a value are left out."""
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            contents[name] = cell.cell_contents
    return contents


def _globals_of(function: FunctionType) -> dict[str, object]:
    """The global objects that a function and the functions inside it name."""
    names, waiting = set[str](), [function.__code__]
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def _is_callable_object(value: object) -> bool:
    """True for an instance of a class that can be called, but no class, module or function."""
    return callable(value) and not isinstance(value, (type, nn.Module)) and hasattr(value, "__dict__")
