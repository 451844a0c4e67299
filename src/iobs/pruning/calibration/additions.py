"""Residual additions: where the output of a layer is added to a tensor that was computed before the layer's call.

The output is followed through dropout, changes of layout, factors per channel, batch norm and further additions, to an
operation of another kind. The residual is the sum of all tensors that were added on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from iobs.pruning.network.calls import Args, Function, Kwargs, Observer
from iobs.pruning.network.layers import Layer

NoteAddition = Callable[[Layer, Tensor], None]
Back = Callable[[Tensor], Tensor]

_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_PRODUCTS = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_LAYOUTS = {"permute", "transpose", "swapaxes", "movedim", "reshape", "view", "flatten", "unflatten", "contiguous"}
_LAYOUTS |= {"squeeze", "unsqueeze", "roll", "clone"}
_LEAST_FACTOR = 0.1  # channels whose factor is this small (relative to the root mean square) keep the plain target


@dataclass
class _FollowedOutput:
    """The output of a layer on its way to an addition.

    Args:
        layer: the layer.
        began: number of the function call before which the layer was called.
        value: the output, or what was computed from it.
        back: maps a tensor in the layout of `value` to the layout and scale of the layer's output.
    """

    layer: Layer
    began: int
    value: Tensor
    back: Back


@contextmanager
def captured_additions(model: nn.Module, layers: Sequence[Layer], note: NoteAddition) -> Iterator[None]:
    """Call `note(layer, term)` at every residual addition of every layer, before it is computed.

    The term is detached, in the layout and scale of the layer's output. Layers are followed that are called as modules.
    """
    additions = _Additions(note)
    with ExitStack() as stack:
        for layer in layers:
            if layer.is_called:
                module = model.get_submodule(layer.path)
                stack.callback(module.register_forward_pre_hook(partial(additions.begin, layer)).remove)
                stack.callback(module.register_forward_hook(partial(additions.follow, layer)).remove)
        stack.enter_context(Observer(additions))
        yield


class _Additions:
    """A subscriber that follows the outputs of layers through calls of torch functions."""

    def __init__(self, note: NoteAddition) -> None:
        self.note = note
        self.calls = 0
        self.began: dict[str, int] = {}  # number of the call at which a layer was called, by name
        self.born: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()  # number of the call that made a tensor
        self.followed: list[_FollowedOutput] = []

    def begin(self, layer: Layer, module: nn.Module, args: Args) -> None:
        """Note the time at which a layer is called."""
        self.began[layer.name] = self.calls

    def follow(self, layer: Layer, module: nn.Module, args: Args, output: object) -> None:
        """Follow the output of a layer."""
        if isinstance(output, Tensor):
            self.followed.append(_FollowedOutput(layer, self.began[layer.name], output, _same))

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> Callable[[object], None]:
        """Note an addition before it is computed, and continue behind other functions."""
        name = getattr(func, "__name__", "")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self.calls += 1
        backs: list[tuple[_FollowedOutput, Back | None]] = []
        for output in self.followed:
            if any(output.value is value for value in tensors):
                added = self._note_addition(output, name, tensors, kwargs)
                backs.append((output, _same if added else _back(name, func, args, kwargs, output.value)))

        def go_on(result: object) -> None:
            for output, back in backs:
                # Dropout in eval mode returns its input, which is followed as it was.
                if back is not None and isinstance(result, Tensor):
                    output.value, output.back = result, _after(output.back, back)
            if isinstance(result, Tensor) and (name.endswith("_") or all(result is not value for value in tensors)):
                self.born[result] = self.calls

        return go_on

    def _note_addition(self, output: _FollowedOutput, name: str, tensors: list[Tensor], kwargs: Kwargs) -> bool:
        """Note the other term if a function is a residual addition; returns False otherwise."""
        terms = [value for value in tensors if value is not output.value]
        if (
            name not in _ADDITIONS
            or len(terms) != 1
            or terms[0].shape != output.value.shape
            or kwargs.get("alpha", 1) != 1
        ):
            return False
        if self.born.get(terms[0], -1) > output.began:
            return False  # computed from layers that are pruned later
        with torch._C.DisableTorchFunctionSubclass():
            self.note(output.layer, output.back(terms[0].detach().clone()))
        return True


def _same(value: Tensor) -> Tensor:
    """The way back through an addition."""
    return value


def _after(first: Back, then: Back) -> Back:
    """The way back through two functions: the later function is undone first."""
    return lambda value: first(then(value))


def _back(name: str, func: Function, args: Args, kwargs: Kwargs, value: Tensor) -> Back | None:
    """The way back through a function of the followed value; None if the function cannot be followed."""
    if name in _LAYOUTS and args and args[0] is value:
        return _back_through_layout(func, args[1:], kwargs, value.shape)
    if name == "batch_norm":
        return _back_through_batch_norm(args, kwargs, value)
    if name in _PRODUCTS and len(args) == 2 and not kwargs:
        factor = args[1] if args[0] is value else args[0]
        return _back_through_factor(factor, value)
    if name in _ADDITIONS and len(args) == 2 and not kwargs:
        other = args[1] if args[0] is value else args[0]
        # A bias or an embedding of positions, which has not drifted.
        plain = not isinstance(other, Tensor) or (other.shape != value.shape and other.numel() <= value[:1].numel())
        return _same if plain else None
    return None


def _back_through_layout(func: Function, args: Args, kwargs: Kwargs, shape: torch.Size) -> Back:
    """The inverse of a change of layout: the places of all entries are sent through the function."""

    def back(term: Tensor) -> Tensor:
        places = func(torch.arange(shape.numel(), device=term.device).reshape(shape), *args, **kwargs)
        flat = torch.empty(shape.numel(), dtype=term.dtype, device=term.device)
        flat[places.flatten()] = term.flatten()
        return flat.reshape(shape)

    return back


def _back_through_batch_norm(args: Args, kwargs: Kwargs, value: Tensor) -> Back | None:
    """Division by the scale of a batch norm in eval mode; its arguments are those of torch's function."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    variance, weight = arguments.get("running_var"), arguments.get("weight")
    if arguments.get("training") or variance is None:
        return None
    scale = (variance + arguments.get("eps", 1e-5)).rsqrt()
    scale = scale if weight is None else scale * weight
    return _back_through_factor(scale.reshape(-1, *[1] * (value.ndim - 2)), value, fixed=True)


def _back_through_factor(factor: object, value: Tensor, fixed: bool = False) -> Back | None:
    """Division by a number or by fixed factors per channel; None for factors that depend on the input."""
    if isinstance(factor, (int, float)):
        return (lambda term: term / factor) if factor else None
    if not isinstance(factor, Tensor):
        return None
    if not (fixed or isinstance(factor, nn.Parameter) or isinstance(factor._base, nn.Parameter)):
        return None
    if factor.numel() > max(value.shape):
        return None
    factors = factor.detach().clone()
    least = _LEAST_FACTOR * factors.square().mean().sqrt()
    inverse = torch.where(factors.abs() > least, 1 / factors, torch.zeros_like(factors))
    return lambda term: term * inverse
