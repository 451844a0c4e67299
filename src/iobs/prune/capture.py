"""See what a network multiplies its weights with: through the modules that hold them, or through torch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from iobs.prune.layers import CONVOLUTIONS, Layer, projections

Note = Callable[[Layer, nn.Module, Tensor], None]

_MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)


@contextmanager
def captured_inputs(model: nn.Module, layers: Sequence[Layer], note: Note) -> Iterator[None]:
    """Tell `note` of every input of these layers.

    A layer that is called as a module is seen by a hook. Slices of fused experts, projections of
    nn.MultiheadAttention, and weights that a network multiplies itself, are seen where torch is called with them.
    """
    with ExitStack() as stack:
        direct = _DirectUses(model, layers, note)
        for layer in layers:
            if layer.is_called:
                for module in _holders(model, layer):
                    before = _before_call(layer, note, direct)
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(_after_call(layer, direct)).remove)
        stack.enter_context(direct)
        yield


def _holders(model: nn.Module, layer: Layer) -> list[nn.Module]:
    """The layer's module and other convolutions with its kernel; other matrices are seen where torch multiplies."""
    own = model.get_submodule(layer.path)
    if not isinstance(own, CONVOLUTIONS):
        return [own]
    kernel = layer.stored(model)
    convolutions = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    return [one for one in convolutions if one._parameters.get("weight") is kernel and one.groups == own.groups]


def _before_call(layer: Layer, note: Note, direct: _DirectUses) -> Callable[..., None]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        direct.inside.add(layer.name)
        note(layer, module, args[0] if args else next(iter(kwargs.values())))

    return before


def _after_call(layer: Layer, direct: _DirectUses) -> Callable[..., None]:
    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        direct.inside.discard(layer.name)

    return after


class _DirectUses(TorchFunctionMode):
    """Recognises a weight by where it lies in memory, since slices and transposes of it share its storage."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], note: Note) -> None:
        super().__init__()
        self.model, self.note = model, note
        self.inside: set[str] = set()  # layers whose module is running: its own product is not seen twice
        self.places: dict[tuple[int, int] | None, tuple[Layer, Tensor]] = {}  # with the matrix, (rows, columns)
        for layer in layers:
            tensor = layer.tensor(model)
            if tensor.ndim == 2:
                self.places[_place(tensor)] = layer, tensor.mT if layer.transposed else tensor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at products before they are computed."""
        if func is nn.functional.linear:
            given = [*args, *(kwargs or {}).values()]
            self._seen(given[1], given[0])
        elif func is nn.functional.multi_head_attention_forward:
            self._look_into_attention(func, signature(func).bind(*args, **(kwargs or {})).arguments)
        elif func in _MATMULS:
            left, right = [*args, *(kwargs or {}).values()][:2]
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                self._seen(_turned(right), left)
                self._seen(left, _turned(right))
        return func(*args, **(kwargs or {}))

    def _look_into_attention(self, func: Any, given: dict[str, Any]) -> None:
        """What torch's attention multiplies its projections with, as (samples, positions, channels)."""

        def samples_first(value: Tensor) -> Tensor:
            return value.transpose(0, 1) if value.ndim == 3 else value

        if given.get("use_separate_proj_weight"):
            weights = [given[f"{name}_proj_weight"] for name in ("q", "k", "v")]
        else:
            weights = [*projections(given["in_proj_weight"]).values()]
        fed = [given[name] for name in ("query", "key", "value")]
        laid = {id(value): samples_first(value) for value in fed}  # one tensor stays one: it shares its Gram
        for weight, value in zip(weights, fed, strict=True):
            self._seen(weight, laid[id(value)])
        output = given["out_proj_weight"]
        if _place(output) in self.places:
            # The heads' results are never at hand but as what an identity makes of them.
            identity = torch.eye(len(output), dtype=output.dtype, device=output.device)
            heads, _ = func(**{**given, "out_proj_weight": identity, "out_proj_bias": None})
            self._seen(output, samples_first(heads))

    def _seen(self, matrix: Any, value: Tensor) -> None:
        """Take note of value @ matrix.T, where the matrix is a layer's: in the same place, and the same way round."""
        if not isinstance(matrix, Tensor) or matrix.ndim != 2:
            return
        if (found := self.places.get(_place(matrix))) is None:
            return
        layer, own = found
        if layer.name in self.inside or matrix.shape != own.shape or matrix.stride() != own.stride():
            return
        value = value.detach() if value.requires_grad else value  # the same tensor is the same object: layers share it
        self.note(layer, self.model.get_submodule(layer.path), value)


def _turned(value: Tensor) -> Tensor:
    return value.mT if value.ndim > 1 else value


def _place(weight: Tensor) -> tuple[int, int] | None:
    try:
        return weight.untyped_storage().data_ptr(), int(weight.storage_offset())
    except NotImplementedError:  # sparse, or one of many within vmap
        return None
