"""Calls of modules, observed during a forward pass of the model around them, and arguments of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch import nn

Argument: TypeAlias = Any  # an argument or the result of a function of torch
Note: TypeAlias = Callable[[str, nn.Module, tuple[object, ...], dict[str, object]], None]
NoteOutput: TypeAlias = Callable[[str, nn.Module, tuple[object, ...], dict[str, object], object], None]
_FACTORS = ("input", "weight", "other", "mat2", "vec")  # torch's names, in the order of arguments


def factors(args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> list[Argument]:
    """The two factors in a call of a product, a linear map or a convolution of torch; each may be given by name."""
    return [*args, *(kwargs[name] for name in _FACTORS if name in kwargs)][:2]


@contextmanager
def before_calls(model: nn.Module, paths: Iterable[str], note: Note) -> Iterator[None]:
    """Call `note(path, module, args, kwargs)` before every call of the modules at some paths."""
    with ExitStack() as stack:
        for path in paths:
            handle = model.get_submodule(path).register_forward_pre_hook(partial(note, path), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def after_calls(model: nn.Module, paths: Iterable[str], note: NoteOutput) -> Iterator[None]:
    """Call `note(path, module, args, kwargs, output)` after every call of the modules at some paths."""
    with ExitStack() as stack:
        for path in paths:
            handle = model.get_submodule(path).register_forward_hook(partial(note, path), with_kwargs=True)
            stack.callback(handle.remove)
        yield
