"""See what a network multiplies its weights with: through the modules that hold them, or through torch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from iobs.prune.layers import Layer, projections

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
                module = model.get_submodule(layer.path)
                before = _before_call(layer, note, direct)
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(_after_call(layer, direct)).remove)
        stack.enter_context(direct)
        yield


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
        self.places: dict[tuple[int, int], Layer] = {}
        for layer in layers:
            tensor = layer.tensor(model)
            if tensor.ndim == 2:
                self.places[_place(tensor)] = layer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at products before they are computed."""
        if func is nn.functional.linear:
            given = [*args, *(kwargs or {}).values()]
            self._seen(given[1], given[0], transpose=False)
        elif func is nn.functional.multi_head_attention_forward:
            self._look_into_attention(func, signature(func).bind(*args, **(kwargs or {})).arguments)
        elif func in _MATMULS:
            left, right = [*args, *(kwargs or {}).values()][:2]
            self._seen(right, left, transpose=False)
            self._seen(left, right, transpose=True)
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
            self._seen(weight, laid[id(value)], transpose=False)
        output = given["out_proj_weight"]
        if _place(output) in self.places:
            # The heads' results are never at hand but as what an identity makes of them.
            identity = torch.eye(len(output), dtype=output.dtype, device=output.device)
            heads, _ = func(**{**given, "out_proj_weight": identity, "out_proj_bias": None})
            self._seen(output, samples_first(heads), transpose=False)

    def _seen(self, weight: Any, value: Any, transpose: bool) -> None:
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            return
        layer = self.places.get(_place(weight))
        if layer is None or layer.name in self.inside or sorted(weight.shape) != sorted(layer.shape):
            return
        value = value.detach() if value.requires_grad else value  # the same tensor is the same object: layers share it
        self.note(layer, self.model.get_submodule(layer.path), value.mT if transpose else value)


def _place(weight: Tensor) -> tuple[int, int]:
    return weight.untyped_storage().data_ptr(), int(weight.storage_offset())
