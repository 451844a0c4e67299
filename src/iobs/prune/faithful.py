"""Whether layers multiply their input by their weight as both are, or change one of them first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from iobs.errors import LayerSelectionError
from iobs.prune import batches
from iobs.prune.batches import Batch
from iobs.prune.layers import Selection, linear_maps

_SAME = 1e-3  # relative difference of two outputs that are the same but for rounding
_ROUNDINGS = 2  # the same in units of a coarse dtype's precision: bfloat16 rounds to 0.8 %
_REASON = "its class changes the weight or the input before it multiplies"
_PRODUCTS = {
    functional.linear,
    *(getattr(functional, f"conv{kind}{size}d") for kind in ("", "_transpose") for size in (1, 2, 3)),
}
# Of their arguments the first three; those behind differ between them.
_NAMES = ("input", "weight", "bias", "3", "4", "5", "6", "7")


@torch.no_grad()
def multiplied_as_they_are(model: nn.Module, selection: Selection, batch: Batch) -> Selection:
    """Leave out layers whose class has a forward of its own that changes the weight or the input first.

    Zeros of a weight that is standardised before it multiplies are none in what multiplies, and the Gram matrix of an
    input that is padded first is another; what is done to the product does not matter. It is seen on one sample, beside
    the forward of the class below; a layer that this sample does not reach stays selected.

    Args:
        model: in eval mode; called only if it has layers of such a class.
        selection: of its layers.
        batch: that the model accepts; its first sample is used.

    Raises:
        LayerSelectionError: no layer is left.
    """
    changing: set[str] = set()
    with ExitStack() as stack:
        handles = []
        for path in {layer.path for layer in selection.layers if layer.is_called}:
            module = model.get_submodule(path)
            below = next((one for one in linear_maps() if isinstance(module, one)), None)
            if below is not None and type(module).forward is not below.forward:
                compare = _comparison(path, below, changing)
                handles.append(module.register_forward_pre_hook(compare, with_kwargs=True))
                stack.callback(handles[-1].remove)
        if not handles:
            return selection
        batches.forward(model, batches.first_sample(batch))
    reasons = {layer.name: _REASON for layer in selection.layers if layer.path in changing}
    layers = tuple(layer for layer in selection.layers if layer.name not in reasons)
    if not layers:
        raise LayerSelectionError(
            f"Nothing is left to prune: of every selected layer ({', '.join(reasons)}) {_REASON}, so that zeros in the "
            "weight would not be zeros of the network. Select layers of other classes, or replace these by plain ones."
        )
    return Selection(layers, {**selection.skipped, **reasons})


def _comparison(path: str, below: type[nn.Module], changing: set[str]) -> Callable[..., None]:
    """A hook that notes the path of a module that multiplies something else than the class below would."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            first = (*args, *kwargs.values())[:1]  # what else it takes the class below does not know
            with _Products() as plain:
                expected = batches.logits(below.forward(module, *_copied(first))).float()
            with _Products() as own:
                given = batches.logits(type(module).forward(module, *_copied(args), **_copied(kwargs))).float()
        except batches.REFUSALS:  # it takes or gives something else; what is truly wrong the network says itself
            changing.add(path)
            return
        if any(_same_product(one, other) for one in plain.seen for other in own.seen):
            return
        tolerance = max(_SAME, _ROUNDINGS * torch.finfo(module.get_parameter("weight").dtype).eps)
        if expected.shape != given.shape or not _near(given, expected, tolerance):
            changing.add(path)

    return before


class _Products(TorchFunctionMode):
    """Keeps the arguments of the products of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, dict[str, Any]]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at products before they are computed."""
        if func in _PRODUCTS:
            given = dict(zip(_NAMES, args, strict=False)) | (kwargs or {})
            self.seen.append((func, {name: value for name, value in given.items() if name != "bias"}))
        return func(*args, **(kwargs or {}))


def _same_product(one: tuple[Any, dict[str, Any]], other: tuple[Any, dict[str, Any]]) -> bool:
    (function, given), (other_function, other_given) = one, other
    if function is not other_function or given.keys() != other_given.keys():
        return False
    rest = all(given[name] == other_given[name] for name in given.keys() - {"input", "weight"})
    same_weight = given["weight"].data_ptr() == other_given["weight"].data_ptr()
    same_weight = same_weight and given["weight"].stride() == other_given["weight"].stride()
    return rest and same_weight and torch.equal(given["input"].nan_to_num(), other_given["input"].nan_to_num())


def _near(values: Tensor, expected: Tensor, tolerance: float) -> bool:
    values, expected = values.nan_to_num(), expected.nan_to_num()  # padded positions may hold NaN in both
    return float((values - expected).norm()) <= tolerance * float(expected.norm())


def _copied(values: Any) -> Any:
    """Copies of the tensors among a call's arguments: a forward may work on them in place."""
    if isinstance(values, Tensor):
        return values.clone()
    if isinstance(values, dict):
        return {name: _copied(value) for name, value in values.items()}
    return tuple(_copied(value) for value in values) if isinstance(values, tuple) else values
