"""A simulated GPU: tensors in CPU memory that report device "cuda:0" and refuse operations with CPU tensors.

`SimulatedGpu` intercepts every torch call: an operation on tensors of both devices raises CUDA's error, a CPU generator
is refused for a GPU tensor, and a GPU tensor does not convert to numpy. CUDA's own kernels are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Functions that accept tensors of both devices: copies, and indexing by a CPU tensor.
CROSSING = {"copy_", "to", "__getitem__", "__setitem__", "index_put_"}


class OnGpu(Tensor):
    """A tensor that reports a GPU as its device."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.clone()
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]  # type: ignore[no-any-return]


def on_gpu(model: nn.Module) -> nn.Module:
    """Move the parameters and buffers of a network to the simulated GPU in place; shared ones stay shared."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                parameter = moved.setdefault(id(value), nn.Parameter(value.detach().as_subclass(OnGpu)))
                module._parameters[name] = parameter.requires_grad_(value.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.as_subclass(OnGpu))
    return model


class SimulatedGpu(TorchFunctionMode):
    """Inside this context, torch checks devices as on a machine with a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check the devices of one call, run the call on the CPU, and set the device of its result."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        given = list(_tensors((args, kwargs)))
        there = any(isinstance(tensor, OnGpu) for tensor in given)
        if name == "__get__":
            return self._attribute(func, args[0], there)
        if name == "numpy" and there:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        here = any(tensor.ndim and not isinstance(tensor, OnGpu) for tensor in given)
        if there and here and name not in CROSSING:
            shapes = [(type(tensor).__name__, tuple(tensor.shape)) for tensor in given]
            raise RuntimeError(f"Expected all tensors to be on the same device, {resolve_name(func)}: {shapes}")
        asked, args, kwargs = _asked(args, kwargs)
        lies = GPU if there else CPU
        if name in ("to", "copy_", "__setitem__", "index_put_"):
            lies = GPU if isinstance(args[0], OnGpu) else CPU
        lies = asked or lies
        if name == "cpu":
            lies = CPU
        generator = kwargs.get("generator")
        if generator is not None and lies == GPU:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu', {resolve_name(func)}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _placed(result, lies)

    def _attribute(self, func: Any, tensor: Tensor, there: bool) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            value = func(tensor)
        if there and isinstance(value, torch.device):
            return GPU
        if there and func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return _placed(value, GPU if there else CPU)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _tensors(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)


def _asked(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, tuple[Any, ...], dict[str, Any]]:
    """The device that a call requests, and its arguments with the CPU in place of that device."""
    asked: list[torch.device] = []

    def own(value: Any) -> Any:
        if isinstance(value, torch.device) or value in ("cuda", "cuda:0", "cpu"):
            asked.append(GPU if torch.device(value).type == "cuda" else CPU)
            return CPU
        return value

    args = tuple(own(value) if isinstance(value, (torch.device, str)) else value for value in args)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": own(kwargs["device"])}
    return (asked[0] if asked else None), args, kwargs


def _placed(result: Any, device: torch.device) -> Any:
    if isinstance(result, Tensor):
        kind = OnGpu if device == GPU else Tensor
        if isinstance(result, OnGpu) == (device == GPU):
            return result
        return result.as_subclass(kind)
    if isinstance(result, (tuple, list)) and type(result) in (tuple, list):
        return type(result)(_placed(entry, device) for entry in result)
    if isinstance(result, tuple):  # a named tuple of torch
        return type(result)([_placed(entry, device) for entry in result])
    return result
