"""Capture the inputs of layers: by hooks on their modules, or where torch multiplies with their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from iobs.pruning.calibration.products import outside_vmap
from iobs.pruning.calibration.recurrent import matrix_inputs
from iobs.pruning.calibration.uses import captured_products
from iobs.pruning.network.calls import factors
from iobs.pruning.network.layers import CONVOLUTIONS, RECURRENT, Layer, projections

Note = Callable[[Layer, nn.Module, Tensor], None]
Args: TypeAlias = tuple[Any, ...]  # of a module or a torch function
Kwargs: TypeAlias = dict[str, Any]

_MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)


@contextmanager
def captured_inputs(
    model: nn.Module, layers: Sequence[Layer], note: Note, used: dict[Layer, bool] | None = None
) -> Iterator[None]:
    """Call `note(layer, module, input)` for every input of the layers, and mark layers that torch functions use.

    Layers that are called as modules get a hook, and so do recurrent modules. Slices of fused experts, projections of
    nn.MultiheadAttention, and weights that the model multiplies itself are recognised in the calls of torch functions.

    Args:
        model: the model.
        layers: layers whose inputs are captured.
        note: called with every input.
        used: set to True for layers whose weight is an argument of any torch function, also without a product; None:
            not recorded.
    """
    with ExitStack() as stack:
        stack.enter_context(captured_products(model, [layer for layer in layers if layer.view is not None], note))
        layers = [layer for layer in layers if layer.view is None]
        direct = _DirectUses(model, layers, note, used)
        for layer in layers:
            if layer.is_called:
                for module in _holders(model, layer):
                    before = _before_call(layer, note, direct)
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(_after_call(layer, direct)).remove)
        for recurrence, held in _recurrences(model, layers):
            noted = _before_recurrence(held, note)
            stack.callback(recurrence.register_forward_pre_hook(noted, with_kwargs=True).remove)
        stack.enter_context(direct)
        yield


def _holders(model: nn.Module, layer: Layer) -> list[nn.Module]:
    """The layer's module, and other convolutions with the same kernel.

    Other modules that share a matrix are covered by `_DirectUses`.
    """
    own = model.get_submodule(layer.path)
    if not isinstance(own, CONVOLUTIONS):
        return [own]
    kernel = layer.stored(model)
    convolutions = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    return [one for one in convolutions if one._parameters.get("weight") is kernel and one.groups == own.groups]


def _before_call(layer: Layer, note: Note, direct: _DirectUses) -> Callable[..., None]:
    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        direct.inside.add(layer.name)
        note(layer, module, outside_vmap(args[0] if args else next(iter(kwargs.values()))))

    return before


def _recurrences(model: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[nn.Module, list[tuple[Layer, str]]]]:
    """The recurrent modules with matrices of the layers: each layer with the name of its parameter there.

    Modules, and the directions of one module, may share a parameter.
    """
    own: dict[int, list[Layer]] = {}
    for layer in layers:
        if isinstance(model.get_submodule(layer.path), RECURRENT):
            own.setdefault(id(layer.stored(model)), []).append(layer)
    for module in model.modules() if own else ():
        if isinstance(module, RECURRENT):
            held = [(layer, name) for name, value in module._parameters.items() for layer in own.get(id(value), ())]
            if held:
                yield module, held


def _before_recurrence(held: Sequence[tuple[Layer, str]], note: Note) -> Callable[..., None]:
    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        found = matrix_inputs(module, args, kwargs)
        for layer, name in held:
            note(layer, module, found[name])

    return before


def _after_call(layer: Layer, direct: _DirectUses) -> Callable[..., None]:
    def after(module: nn.Module, args: Args, output: object) -> None:
        direct.inside.discard(layer.name)

    return after


class _DirectUses(TorchFunctionMode):
    """Capture products of torch functions with weights of layers.

    A weight is recognised by its address in memory, since its slices and transposes share its storage.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], note: Note, used: dict[Layer, bool] | None = None
    ) -> None:
        super().__init__()
        self.model, self.note, self.used = model, note, used
        self.parameters: dict[tuple[int, int] | None, list[Layer]] = {}  # layers of each parameter, by address
        self.inside: set[str] = set()  # layers whose module is running; a hook has already captured their input
        self.matrices: dict[tuple[int, int] | None, tuple[Layer, Tensor]] = {}  # (rows, columns), by address
        for layer in layers:
            tensor = layer.tensor(model)
            self.parameters.setdefault(_address(layer.stored(model)), []).append(layer)
            if tensor.ndim == 2:
                self.matrices[_address(tensor)] = layer, tensor.mT if layer.transposed else tensor

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        """Capture the factors of a product before it is computed."""
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            given, weight = factors(args, kwargs)
            self._capture(weight, given)
        elif func is nn.functional.multi_head_attention_forward:
            self._capture_attention(func, signature(func).bind(*args, **kwargs).arguments)
        elif func in _MATMULS:
            left, right = factors(args, kwargs)
            if isinstance(left, Tensor) and isinstance(right, Tensor):
                self._capture(_transposed(right), left)
                self._capture(left, _transposed(right))
        result = func(*args, **kwargs)
        if self.used is not None and isinstance(result, (Tensor, list, tuple)) and not isinstance(result, torch.Size):
            self._mark([*args, *kwargs.values()], self.used)
        return result

    def _mark(self, arguments: Iterable[object], used: dict[Layer, bool]) -> None:
        """Mark the layers whose parameter is among the arguments of a function, also within a list."""
        for value in arguments:
            if isinstance(value, (list, tuple)):
                self._mark(value, used)
            elif isinstance(value, Tensor):
                used.update(dict.fromkeys(self.parameters.get(_address(value), ()), True))

    def _capture_attention(self, func: Callable[..., tuple[Tensor, object]], given: Kwargs) -> None:
        """Capture the inputs of the projections of torch's attention, (samples, positions, channels)."""

        def samples_first(value: Tensor) -> Tensor:
            return value.transpose(0, 1) if value.ndim == 3 else value

        if given.get("use_separate_proj_weight"):
            weights = [given[f"{name}_proj_weight"] for name in ("q", "k", "v")]
        else:
            weights = [*projections(given["in_proj_weight"]).values()]
        fed = [given[name] for name in ("query", "key", "value")]
        inputs = {id(value): samples_first(value) for value in fed}  # equal objects stay equal and share a Gram
        for weight, value in zip(weights, fed, strict=True):
            self._capture(weight, inputs[id(value)])
        output = given["out_proj_weight"]
        if _address(output) in self.matrices:
            # The input of the output projection is internal to torch; an identity as projection returns it.
            identity = torch.eye(len(output), dtype=output.dtype, device=output.device)
            heads, _ = func(**{**given, "out_proj_weight": identity, "out_proj_bias": None})
            self._capture(output, samples_first(heads))

    def _capture(self, matrix: object, value: Tensor) -> None:
        """Note the input of the product value @ matrix.T if the matrix is a layer's, with the same orientation."""
        if not isinstance(matrix, Tensor) or matrix.ndim != 2:
            return
        if (found := self.matrices.get(_address(matrix))) is None:
            return
        layer, own = found
        if layer.name in self.inside or matrix.shape != own.shape or matrix.stride() != own.stride():
            return
        # A new object only if necessary, because layers with the same input are recognised by its identity.
        value = outside_vmap(value.detach() if value.requires_grad else value)
        self.note(layer, self.model.get_submodule(layer.path), value)


def version_of(value: Tensor) -> int:
    """The number of in-place changes of a tensor so far; 0 in inference mode, which does not count them."""
    return 0 if value.is_inference() else value._version


def _transposed(value: Tensor) -> Tensor:
    return value.mT if value.ndim > 1 else value


def _address(weight: Tensor) -> tuple[int, int] | None:
    """Storage and offset of a tensor; None if it has no storage of its own."""
    try:
        return weight.untyped_storage().data_ptr(), int(weight.storage_offset())
    except NotImplementedError:  # a sparse tensor, or a tensor inside vmap
        return None
