"""Calls of modules, observed during a forward pass of the model around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias

from torch import nn

Note: TypeAlias = Callable[[str, nn.Module, tuple[object, ...], dict[str, object]], None]
NoteOutput: TypeAlias = Callable[[str, nn.Module, tuple[object, ...], dict[str, object], object], None]


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
