"""Detect layers whose forward transforms the weight or the input (weight standardisation, padding)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from iobs.errors import LayerSelectionError, is_out_of_memory
from iobs.pruning.calibration.hooks import Args, Kwargs
from iobs.pruning.coverage import Reason
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.layers import Layer, linear_maps
from iobs.pruning.network.selection import Selection
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples.batches import Batch

Product: TypeAlias = tuple[Callable[..., object], Kwargs]

_TOLERANCE = 1e-3  # relative difference up to which two outputs are equal up to rounding
_ROUNDINGS = 2  # the tolerance in units of the dtype's precision, for coarse dtypes: bfloat16 rounds to 0.8 %
_CHANGES = "its class changes the weight or the input before it multiplies"
_PRODUCTS = {
    functional.linear,
    *(getattr(functional, f"conv{kind}{size}d") for kind in ("", "_transpose") for size in (1, 2, 3)),
}
# Only the first three positional arguments have the same names in all of them.
_NAMES = ("input", "weight", "bias", "3", "4", "5", "6", "7")


@torch.no_grad()
def multiplied_as_they_are(model: nn.Module, selection: Selection, batch: Batch) -> Selection:
    """Deselect layers whose class overrides forward and transforms the weight or the input before the product.

    If a weight is standardised first, its zeros are not zeros of the matrix that multiplies. If an input is padded
    first, its Gram matrix is another one. Changes of the product do not matter. The test compares the forward of the
    class with that of its parent (Linear, Conv) on one sample. Layers that this sample does not reach stay selected.

    Args:
        model: in eval mode; called only if it has layers of such a class.
        selection: the selected layers.
        batch: a batch that the model accepts; its first sample is used.

    Raises:
        LayerSelectionError: no layer is left.
    """
    changing = changing_modules(model, selection.layers, batch)
    if not changing:
        return selection
    reasons = {layer.name: Reason("transformed", _CHANGES) for layer in selection.layers if layer.path in changing}
    layers = tuple(layer for layer in selection.layers if layer.name not in reasons)
    if not layers:
        raise LayerSelectionError(
            f"Nothing is left to prune: of every selected layer ({', '.join(reasons)}) {_CHANGES}, so that zeros in "
            "the weight would not be zeros of the model. Select layers of other classes, or replace these by plain "
            "ones."
        )
    return Selection(layers, {**selection.skipped, **reasons})


def changing_modules(model: nn.Module, layers: Sequence[Layer], batch: Batch) -> set[str]:
    """The paths of modules that transform the weight or the input before the product, on the first sample of a batch.

    The model is called only if one of the layers has a class with a forward of its own.
    """
    below: dict[str, type[nn.Module]] = {}
    for path in {layer.path for layer in layers if layer.is_called}:
        module = model.get_submodule(path)
        plain = next((one for one in linear_maps() if isinstance(module, one)), None)
        if plain is not None and type(module).forward is not plain.forward:
            below[path] = plain
    changing: set[str] = set()

    def compare(path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if _changes(module, below[path], args, kwargs):
            changing.add(path)

    if below:
        with before_calls(model, below, compare):
            batches.forward(model, batches.first_sample(batch))
    return changing


def _changes(module: nn.Module, below: type[nn.Module], args: Args, kwargs: Kwargs) -> bool:
    """Check if the product of a module differs from that of the class below its own."""
    try:
        first = (*args, *kwargs.values())[:1]  # the class below takes no further arguments
        with _Products() as plain:
            expected = outputs.logits(below.forward(module, *_copied(first))).float()
        with _Products() as own:
            given = outputs.logits(type(module).forward(module, *_copied(args), **_copied(kwargs))).float()
    except batches.REFUSALS as error:  # other arguments or outputs than the class below
        if is_out_of_memory(error):  # other true errors recur in the model
            raise
        return True
    if any(_same_product(one, other) for one in plain.seen for other in own.seen):
        return False
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(module.get_parameter("weight").dtype).eps)
    return expected.shape != given.shape or not _near(given, expected, tolerance)


class _Products(TorchFunctionMode):
    """Record the arguments of the products in a forward, except the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Product] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        """Record the arguments of a product before it is computed."""
        if func in _PRODUCTS:
            given = dict(zip(_NAMES, args, strict=False)) | (kwargs or {})
            self.seen.append((func, {name: value for name, value in given.items() if name != "bias"}))
        return func(*args, **(kwargs or {}))


def _same_product(one: Product, other: Product) -> bool:
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


def _copied(values: object) -> Any:
    """Copies of the tensors in the arguments of a call, because a forward may change them in place."""
    if isinstance(values, Tensor):
        return values.clone()
    if isinstance(values, dict):
        return {name: _copied(value) for name, value in values.items()}
    return tuple(_copied(value) for value in values) if isinstance(values, tuple) else values
