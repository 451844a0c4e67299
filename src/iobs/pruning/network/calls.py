"""Calls of modules and of torch's functions, observed during a forward pass of the model around them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Argument: TypeAlias = Any  # an argument or the result of a function of torch
Args: TypeAlias = tuple[Any, ...]  # of a module or a torch function
Kwargs: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., Any]
# Called before a function of torch runs; what it returns, if anything, is called with the result.
Subscriber: TypeAlias = Callable[[Function, Args, Kwargs], Callable[[Any], None] | None]
Note: TypeAlias = Callable[[str, nn.Module, tuple[object, ...], dict[str, object]], None]
NoteOutput: TypeAlias = Callable[[str, nn.Module, tuple[object, ...], dict[str, object], object], object]
_FACTORS = ("input", "weight", "other", "mat2", "vec")  # torch's names, in the order of arguments


def first_argument(args: Args, kwargs: Kwargs) -> Any:
    """The first argument of a call, by place or by name."""
    return args[0] if args else next(iter(kwargs.values()))


@torch.no_grad()
def rows_read(embedding: nn.Embedding, args: Args, kwargs: Kwargs) -> Tensor:
    """The rows of its table that a call of an embedding gives.

    A subclass may compute them from its arguments, as tables of positions do from a mask or from the shape of token
    ids. It then computes once more with a table of the numbers of the rows. The ones beside them tell by what a
    subclass multiplies its rows.
    """
    argument = first_argument(args, kwargs)
    if type(embedding).forward is nn.Embedding.forward:
        return argument  # type: ignore[no-any-return]
    count = len(embedding.weight)
    numbers = torch.stack([torch.arange(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)], 1)
    numbered = copy.copy(embedding)
    numbered._parameters = {**embedding._parameters, "weight": nn.Parameter(numbers.to(argument.device))}
    try:
        multiplied, by = type(embedding).forward(numbered, *args, **kwargs).unbind(-1)
    except (RuntimeError, ValueError):  # it needs all columns
        return argument  # type: ignore[no-any-return]
    return (multiplied / by).round().long()


class Interceptor(TorchFunctionMode):
    """A context in which a function computes every call of a function of torch.

    Args:
        compute: called with the function of torch, its arguments and its keyword arguments; returns the result.
    """

    def __init__(self, compute: Callable[[Function, Args, Kwargs], Any]) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """The result of `compute`."""
        return self.compute(func, args, kwargs or {})


class Observer(Interceptor):
    """A context in which subscribers see every call of a function of torch, with its tensors; nothing is changed.

    Args:
        subscribers: each is called before the function with `(function, args, kwargs)`. It may return a function that
            is called with the result.
    """

    def __init__(self, *subscribers: Subscriber) -> None:
        super().__init__(self._compute)
        self.subscribers = subscribers

    def _compute(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call the function, and tell the subscribers."""
        listeners = [subscriber(func, args, kwargs) for subscriber in self.subscribers]
        result = func(*args, **kwargs)
        for listener in listeners:
            if listener is not None:
                listener(result)
        return result


@contextmanager
def recorded_calls(functions: Collection[Function]) -> Iterator[list[tuple[Function, Args, Kwargs]]]:
    """Context that records the calls of some functions of torch, in order: function, arguments and keyword arguments.

    A call is recorded before it is computed.
    """
    calls: list[tuple[Function, Args, Kwargs]] = []

    def record(func: Function, args: Args, kwargs: Kwargs) -> None:
        if func in functions:
            calls.append((func, args, kwargs))

    with Observer(record):
        yield calls


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
    """Call `note(path, module, args, kwargs, output)` after every call of the modules at some paths.

    What it returns, unless that is None, takes the place of the output.
    """
    with ExitStack() as stack:
        for path in paths:
            handle = model.get_submodule(path).register_forward_hook(partial(note, path), with_kwargs=True)
            stack.callback(handle.remove)
        yield
