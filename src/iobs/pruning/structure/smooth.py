"""Functions without flat parts in place of those whose flat parts would hide that an output depends on an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from iobs.pruning.network.calls import Argument

_FACTOR = 0.7310586  # of added gradients: no simple one, so that they do not cancel those of the function itself
_MASKED = 1e4  # absolute values from which entries count as masked; float16 holds them
_Functions: TypeAlias = tuple[Callable[..., Argument], ...]


def _dependent(value: Argument, *inputs: Argument) -> Argument:
    """A value that depends on all finite entries of some tensors, which broadcast to it; its entries are the same."""
    for each in inputs:
        if isinstance(each, Tensor) and each.requires_grad and value.is_floating_point():
            finite = _finite(each)
            value = value + _FACTOR * (finite - finite.detach())
    return value


def _finite(value: Tensor) -> Tensor:
    """A copy with zeros in place of entries that are not finite; code may write into the value before the gradient."""
    return torch.nan_to_num(value.clone(), 0.0, 0.0, 0.0)


def passing(value: Tensor) -> Tensor:
    """The same value, of its own graph; its gradients do not cancel those of x in x + (round(x) - x).detach()."""
    copied = value.clone()
    if copied.requires_grad:
        copied.register_hook(lambda gradient: _FACTOR * gradient)  # type: ignore[no-untyped-call]
    return copied


def _entrywise(func: Callable[..., Argument]) -> Callable[..., Argument]:
    """A function whose entries depend on the same entries of all inputs, of which it may choose one."""

    def dependent(*args: Argument, **kwargs: Argument) -> Argument:
        result = func(*args, **kwargs)
        return _dependent(result, *args, *kwargs.values()) if isinstance(result, Tensor) else result

    return dependent


def _product(func: Callable[..., Argument]) -> Callable[..., Argument]:
    """A product that also depends on an input where a mask is zero."""

    def dependent(input: Argument, other: Argument) -> Argument:
        result = func(input, other)
        masked = any(
            isinstance(each, Tensor) and not each.requires_grad and bool((each == 0).any()) for each in (input, other)
        )
        return _dependent(result, input, other) if masked else result

    return dependent


def _largest(func: Callable[..., Argument]) -> Callable[..., Argument]:
    """A maximum or minimum, of two tensors or along dimensions, that depends on all entries."""

    def dependent(input: Tensor, *args: Argument, **kwargs: Argument) -> Argument:
        result = func(input, *args, **kwargs)
        if not input.is_floating_point():
            return result
        if any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
            return _dependent(result, input, *args, *kwargs.values())
        mean = _finite(input).mean(*args, **kwargs)  # a sum may overflow in float16
        if isinstance(result, Tensor):
            return _dependent(result, mean)
        return type(result)((_dependent(result[0], mean), result[1]))  # values and indices

    return dependent


def _visible_mean(input: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The mean along dimensions, which are kept, of the entries that no mask has made very negative."""
    return torch.where(input.abs() < _MASKED, input, 0.0).mean(dims, keepdim=True)


def _softmax(func: Callable[..., Argument]) -> Callable[..., Argument]:
    """A softmax that depends on its inputs where one of them has all the weight, such as the key of one position."""

    def dependent(input: Tensor, *args: Argument, **kwargs: Argument) -> Argument:
        result = func(input, *args, **kwargs)
        dim = args[0] if args else kwargs.get("dim")
        if dim is None or not input.is_floating_point():
            return result
        return _dependent(result, _visible_mean(input, dim))

    return dependent


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Argument, **kwargs: Argument) -> Tensor:
    """Fused attention whose heads depend on their queries and keys, also where one key has all the weight."""
    result = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    keys = _visible_mean(key, (-2, -1))
    if key.ndim > 3 and key.shape[-3] < query.shape[-3]:  # grouped queries
        keys = keys.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    dependent: Tensor = _dependent(result, _visible_mean(query, -1), keys)
    return dependent


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    shaped = weight.view(-1, *(1,) * (input.ndim - 2)) if input.ndim > 1 else weight
    return torch.relu(input) + shaped * input  # depends on its slope on both sides


OF_ONE: dict[Callable[..., Argument], Callable[[Tensor], Tensor]] = {
    F.relu: F.softplus,
    torch.relu: F.softplus,
    torch.relu_: F.softplus,
    Tensor.relu: F.softplus,
    Tensor.relu_: F.softplus,
    F.relu6: F.softplus,
    F.hardtanh: F.softplus,
    F.hardswish: F.silu,
    F.hardsigmoid: torch.sigmoid,
    torch.clamp: torch.clone,
    Tensor.clamp: torch.clone,
}
_PRELU: _Functions = (F.prelu, torch.prelu, Tensor.prelu)
_ENTRYWISE: _Functions = (torch.where, Tensor.where, torch.maximum, Tensor.maximum, torch.minimum, Tensor.minimum)
_FILLED: _Functions = (torch.masked_fill, Tensor.masked_fill)
_PRODUCTS: _Functions = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_LARGEST: _Functions = (torch.max, Tensor.max, torch.min, Tensor.min, torch.amax, Tensor.amax, torch.amin, Tensor.amin)
_SOFTMAX: _Functions = (F.softmax, torch.softmax, Tensor.softmax)
OF_SEVERAL: dict[Callable[..., Argument], Callable[..., Argument]] = {
    **dict.fromkeys(_PRELU, _prelu),
    **{func: _entrywise(func) for func in (*_ENTRYWISE, *_FILLED)},
    **{func: _product(func) for func in _PRODUCTS},
    **{func: _largest(func) for func in _LARGEST},
    **{func: _softmax(func) for func in _SOFTMAX},
    torch._C._nn.scaled_dot_product_attention: _attention,  # what torch.nn.functional calls, whoever replaces it there
}
