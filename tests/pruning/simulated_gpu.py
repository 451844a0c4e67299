"""A simulated GPU: tensors in CPU memory that report device "cuda:0" and refuse operations with CPU tensors.

`SimulatedGpu` intercepts every torch call: an operation on tensors of both devices raises CUDA's error, a CPU generator
is refused for a GPU tensor, and a GPU tensor does not convert to numpy. A copy to the other device has memory of its
own. `Operations` repeats the check below the Python calls, for every kernel, also of a backward pass. CUDA's own
kernels are not simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Functions that accept tensors of both devices: copies, and indexing by a CPU tensor.
CROSSING = {"copy_", "to", "__getitem__", "__setitem__", "index_put_", "_has_compatible_shallow_copy_type"}
KERNELS_CROSSING = {"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "set_"}
SUMS = {"cumsum", "cumsum_"}  # of floating-point numbers: not deterministic on a GPU
READS = {"item", "tolist", "cpu", "__float__", "__int__", "__bool__", "__index__"}


class OnGpu(Tensor):
    """A tensor that reports a GPU as its device."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.clone()
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]  # type: ignore[no-any-return]


def on_gpu(model: nn.Module) -> nn.Module:
    """Move a network to the simulated GPU in place, inside its context; shared tensors stay shared."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                parameter = moved.setdefault(id(value), nn.Parameter(value.detach().to(GPU)))
                module._parameters[name] = parameter.requires_grad_(value.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(GPU))
    return model


class Places:
    """The device of every storage: an identity is not used again while a weak reference to it exists."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}  # storages on the GPU, with their bytes
        self.peak: int | None = None  # None: not measured

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Record the device of a tensor's storage."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._known[reference.cdata] = reference, device
        self._there.pop(reference.cdata, None)
        if device == GPU:
            self._there[reference.cdata] = reference, storage.nbytes()
            self.peak = None if self.peak is None else max(self.peak, self.bytes)
        if len(self._known) > 10_000:
            self._there = {key: value for key, value in self._there.items() if not value[0].expired()}
            self._known = {key: value for key, value in self._known.items() if not value[0].expired()}

    @property
    def bytes(self) -> int:
        """Bytes of the storages on the GPU that are alive."""
        self._there = {key: one for key, one in self._there.items() if not one[0].expired()}
        return sum(size for _, size in self._there.values())

    def of(self, tensor: Tensor) -> torch.device | None:
        """The device of a tensor's storage; None if it is not known."""
        with torch._C.DisableTorchFunctionSubclass():
            found = self._known.get(tensor.untyped_storage()._cdata)
        return None if found is None or found[0].expired() else found[1]


class Operations(TorchDispatchMode):
    """Refuse kernels that get storages of both devices; their results are on the device of their arguments."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and torch would import its compiler, which takes seconds, to skip it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check and run one kernel."""
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        found = [(tensor.ndim, self.places.of(tensor)) for tensor in given]
        places = {place for dimensions, place in found if dimensions}
        if {GPU, CPU} <= places and func.overloadpacket.__name__ not in KERNELS_CROSSING:
            raise RuntimeError(f"Expected all tensors to be on the same device in the kernel {func}")
        if (
            GPU in places
            and func.overloadpacket.__name__ in SUMS
            and given[0].is_floating_point()
            and torch.are_deterministic_algorithms_enabled()
        ):
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        result = func(*args, **kwargs)
        if any(place == GPU for _, place in found):
            for tensor in _tensors(result):
                if self.places.of(tensor) is None:
                    self.places.put(tensor, GPU)
        return result


class SimulatedGpu(TorchFunctionMode):
    """Inside this context, torch checks devices as on a machine with a GPU.

    Attributes:
        reads: number of calls that wait for the GPU to give a value or a tensor to the CPU, by name of the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self._places = Places()
        self._operations = Operations(self._places)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors on the GPU."""
        return self._places.bytes

    @property
    def peak(self) -> int:
        """The most bytes at one time since `reset_peak`."""
        return self._places.peak or 0

    def reset_peak(self) -> int:
        """Begin to measure the peak anew; returns the bytes now."""
        self._places.peak = self.bytes
        return self.bytes

    def __enter__(self) -> SimulatedGpu:
        self._operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)

    def _there(self, tensor: Tensor) -> bool:
        """Check for a tensor on the GPU; gradients and saved tensors lose their class, but not their storage."""
        return isinstance(tensor, OnGpu) or self._places.of(tensor) == GPU

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check the devices of one call, run the call on the CPU, and set the device of its result."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if func is torch.device or name == "_parse_to":  # `Module.to` reads its arguments by the latter
            return func(*args, **kwargs)
        # The second argument of `__deepcopy__` holds everything that was copied before, on any device.
        given = list(_tensors(args[:1] if name == "__deepcopy__" else (args, kwargs)))
        there = any(self._there(tensor) for tensor in given)
        if name == "__get__":
            return self._attribute(func, args[0], there)
        if name in READS and there:
            self.reads[name] += 1
        if name in ("numpy", "__array__") and there:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        here = any(tensor.ndim and not self._there(tensor) for tensor in given)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]  # the data of another device, as `Module.to` gives
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if there and here and name not in CROSSING:
            shapes = [(type(tensor).__name__, tuple(tensor.shape)) for tensor in given]
            raise RuntimeError(f"Expected all tensors to be on the same device, {resolve_name(func)}: {shapes}")
        asked, args, kwargs = _asked(args, kwargs)
        lies = GPU if there else CPU
        if name in ("to", "copy_", "__setitem__", "index_put_"):
            like = args[1] if name == "to" and len(args) > 1 and isinstance(args[1], Tensor) else args[0]
            lies = GPU if self._there(like) else CPU
        lies = asked or lies
        if name == "cpu":
            lies = CPU
        generator = kwargs.get("generator")
        if generator is not None and lies == GPU:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu', {resolve_name(func)}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return self._placed(result, lies)

    def _attribute(self, func: Any, tensor: Tensor, there: bool) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            value = func(tensor)
        if there and isinstance(value, torch.device):
            return GPU
        if there and func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return self._placed(value, GPU if there else CPU)

    def _placed(self, result: Any, device: torch.device) -> Any:
        """The result of a call as a tensor of a device; a tensor of the other device is copied."""
        if isinstance(result, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                if result.is_meta:
                    return result.as_subclass(Tensor) if isinstance(result, OnGpu) else result
                before = self._places.of(result) or (GPU if isinstance(result, OnGpu) else None)
                if before not in (None, device):
                    result = result.clone()
                self._places.put(result, device)
                if isinstance(result, OnGpu) == (device == GPU):
                    return result
                return result.as_subclass(OnGpu if device == GPU else Tensor)
        if isinstance(result, (tuple, list)) and type(result) in (tuple, list):
            return type(result)(self._placed(entry, device) for entry in result)
        if isinstance(result, tuple):  # a named tuple of torch
            return type(result)([self._placed(entry, device) for entry in result])
        return result


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
