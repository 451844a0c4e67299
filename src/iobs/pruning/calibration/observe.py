"""Observation of a model before a run: which of its matrices a forward pass multiplies with, and as they are.

Some layers transform the weight or the input in their forward (weight standardisation, padding). Other matrices are
multiplied without a class that shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from iobs.errors import CalibrationError, LayerSelectionError, ModelError, unless_out_of_memory
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.calibration.uses import LayersByUse
from iobs.pruning.coverage import Reason
from iobs.pruning.network.calls import Args, Function, Kwargs, before_calls, recorded_calls
from iobs.pruning.network.layers import Layer, found_by_use, linear_maps
from iobs.pruning.network.modes import evaluating, keeping_attributes, keeping_buffers, seeded
from iobs.pruning.network.selection import Selection
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples.batches import Batch

Call: TypeAlias = tuple[Function, Args, Kwargs]

_TOLERANCE = 1e-3  # relative difference up to which two outputs are equal up to rounding
_ROUNDINGS = 2  # the tolerance in units of the dtype's precision, for coarse dtypes: bfloat16 rounds to 0.8 %
_CHANGES = "its class changes the weight or the input before it multiplies"
_PRODUCTS = {
    functional.linear,
    *(getattr(functional, f"conv{kind}{size}d") for kind in ("", "_transpose") for size in (1, 2, 3)),
}
_copied = partial(tree_map_only, Tensor, Tensor.clone)  # arguments of a call, which a forward may change in place
# Only the first three positional arguments have the same names in all of them.
_NAMES = ("input", "weight", "bias", "3", "4", "5", "6", "7")


@torch.no_grad()
def observe(model: nn.Module, data: Sequence[Batch], seed: int) -> bool:
    """Find the layers that no class shows, on the first sample of one batch of each kind, and remember them.

    A kind of batches has the same names and shapes. Nothing is found if the model rejects a batch; the check of the
    batches reports it afterwards.

    Args:
        model: the model, while its weights are in memory.
        data: calibration data.
        seed: of random draws in the forward pass.

    Returns:
        True if layers were found, or reasons why there are none.

    Raises:
        CalibrationError: the model rejects a batch, and has no layer that its class shows.
    """
    found_by_use(model, ())
    finder = LayersByUse(model)
    changing: set[str] = set()  # modules whose product has another factor or input than their class says
    kinds = {batches.kind_of(batch): batch for batch in data}

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        if layer.path not in changing:
            finder.called.add(layer.key)

    with evaluating(model), seeded(model, seed), keeping_buffers(model):
        for batch in kinds.values():
            sample = batches.first_sample(batch)
            try:
                changing = changing_modules(model, finder.by_class, sample)
                with finder.watching(), captured_inputs(model, finder.by_class, note):
                    batches.forward(model, sample)
            except unless_out_of_memory(*batches.REFUSALS) as error:
                if not finder.by_class:
                    raise CalibrationError(
                        f"The model cannot take a calibration batch, {batches.shapes(sample)}: "
                        f"{type(error).__name__}: {error}"
                    ) from error
                return False
    layers = finder.layers()
    found_by_use(model, layers, finder.changed)
    return bool(layers or finder.changed)


@torch.no_grad()
def require_repeatable(model: nn.Module, batch: Batch) -> None:
    """Raise if a model gives two outputs for one sample, so that what the layers read depends on earlier calls.

    Args:
        model: in eval mode.
        batch: a batch that the model accepts; its first sample is used.

    Raises:
        ModelError: the outputs differ by more than rounding, although torch's generators have one seed.
    """
    sample = batches.first_sample(batch)
    results = []
    with keeping_attributes(model):
        for _ in range(2):
            with seeded(model, 0):
                # Copies: the model may give its own state out, and change it in the next call.
                results.append([tensor.clone() for tensor in outputs.tensors_of(batches.forward(model, sample))])
    if not all(map(_nearly_equal, *results)):
        raise ModelError(
            f"{type(model).__name__} gives two outputs for the same batch: it keeps state between calls, or draws "
            "numbers that torch.manual_seed does not control. Let its forward begin with the same state in every call, "
            "for example by a wrapper that resets it first."
        )


def _nearly_equal(first: Tensor, second: Tensor) -> bool:
    """Check that two outputs are equal up to the order of sums, as on a GPU; NaN is equal to NaN."""
    if first.shape != second.shape:
        return False
    equal = torch.equal(first, second)
    if equal or not first.is_floating_point():
        return equal
    tolerance = torch.finfo(first.dtype).eps ** 0.5
    first, second = first.double().nan_to_num(), second.double().nan_to_num()
    return bool((first - second).norm() <= tolerance * first.norm())


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
    parents: dict[str, type[nn.Module]] = {}
    for path in {layer.path for layer in layers if layer.is_called}:
        module = model.get_submodule(path)
        parent = next((kind for kind in linear_maps() if isinstance(module, kind)), None)
        if parent is not None and type(module).forward is not parent.forward:
            parents[path] = parent
    changing: set[str] = set()

    def compare(path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if _changes(module, parents[path], args, kwargs):
            changing.add(path)

    if parents:
        with before_calls(model, parents, compare):
            batches.forward(model, batches.first_sample(batch))
    return changing


def _changes(module: nn.Module, parent: type[nn.Module], args: Args, kwargs: Kwargs) -> bool:
    """True if the product of a module differs from that of its parent class."""
    try:
        first = (*args, *kwargs.values())[:1]  # the parent takes no further arguments
        with recorded_calls(_PRODUCTS) as plain_calls:
            expected = outputs.logits(parent.forward(module, *_copied(first))).float()
        with recorded_calls(_PRODUCTS) as calls:
            output = outputs.logits(type(module).forward(module, *_copied(args), **_copied(kwargs))).float()
    except unless_out_of_memory(*batches.REFUSALS):  # other arguments than the parent; true errors recur
        return True
    if any(_same_product(plain, call) for plain in plain_calls for call in calls):
        return False
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(module.get_parameter("weight").dtype).eps)
    return expected.shape != output.shape or not _near(output, expected, tolerance)


def _same_product(plain: Call, call: Call) -> bool:
    """True if two calls multiply the same input with the same weight, up to the bias."""
    if plain[0] is not call[0]:
        return False
    expected, arguments = (
        {name: value for name, value in {**dict(zip(_NAMES, args, strict=False)), **kwargs}.items() if name != "bias"}
        for _, args, kwargs in (plain, call)
    )
    if expected.keys() != arguments.keys():
        return False
    same_options = all(expected[name] == arguments[name] for name in expected.keys() - {"input", "weight"})
    weight, other = expected["weight"], arguments["weight"]
    same_weight = weight.data_ptr() == other.data_ptr() and weight.stride() == other.stride()
    same_input = same_options and same_weight
    return same_input and torch.equal(expected["input"].nan_to_num(), arguments["input"].nan_to_num())


def _near(values: Tensor, expected: Tensor, tolerance: float) -> bool:
    values, expected = values.nan_to_num(), expected.nan_to_num()  # padded positions may hold NaN in both
    return float((values - expected).norm()) <= tolerance * float(expected.norm())
