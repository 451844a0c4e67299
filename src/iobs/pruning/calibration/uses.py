"""Layers found by use: matrices that a forward pass multiplies with, whatever class their module has.

One observed forward pass shows which parameters, or which parts of them, are factors of products. `observe` makes
layers of them, and `captured_products` captures their inputs in later passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from iobs.pruning.calibration.products import Index, Product, outside_vmap, products
from iobs.pruning.calibration.tracking import Tracker
from iobs.pruning.network.calls import Args, Function, Kwargs, Observer
from iobs.pruning.network.folding import unfolded
from iobs.pruning.network.layers import Layer, View, holds_weights, layers_by_class

# Called with a layer, the module that holds it, and an input.
Note: TypeAlias = Callable[[Layer, nn.Module, Tensor], None]
# Called with the name of a parameter, the view of it that is a factor, a function that returns the input, and whether
# the call multiplies several matrices.
NoteProduct: TypeAlias = Callable[[str, View, Callable[[], Tensor], bool], None]

_PRODUCT = nn.Identity()  # the module of inputs that are rows of a product already, such as windows of a convolution
_LEAST = 2  # columns of a matrix; a product with fewer is a scaling


class _ParameterProducts:
    """A subscriber that notes the products with tracked parameters, before they are computed.

    Args:
        parameters: by full name.
        note: called for each matrix of a parameter that is a factor.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], note: NoteProduct) -> None:
        self.note, self.tracker = note, Tracker(parameters)

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> Callable[[object], None]:
        """Note the product that a call computes, if it is one, and follow copies of parameters."""
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunction():
            for product in products(name, args, kwargs):
                if self.tracker.holds(product.factor):
                    self._note(product)

        def follow(result: object) -> None:
            with torch._C.DisableTorchFunction():
                self.tracker.follow(name, func, args, kwargs, result)

        return follow

    def _note(self, product: Product) -> None:
        """Note the matrices of a product; matrices with the same input get the same tensor."""
        inputs: dict[tuple[Index, tuple[int, int]], Tensor] = {}
        scale = self.tracker.scale(product.factor)  # (scale W) x = W (scale x)

        def input_of(index: Index, columns: tuple[int, int]) -> Tensor:
            if (index, columns) not in inputs:
                value = product.inputs(index) if scale == 1 else product.inputs(index) * scale
                inputs[index, columns] = value if columns == (0, value.shape[-1]) else value[..., slice(*columns)]
            return inputs[index, columns]

        for index, name, view, columns in self.tracker.matrices(product.factor, product.batch, product.rows):
            self.note(name, view, partial(input_of, index, columns), product.batch > 0)


class _ParameterChanges:
    """A subscriber that notes the functions that change parameters, and take no other inputs than constants.

    A function of an input of the model changes that input: a table of positions is added to it.

    Args:
        model: its parameters and buffers are constants, and so is what is computed from constants.
        parameters: by full name.
        tracker: what it holds has the entries of parameters, unchanged.
        changed: the functions are added, by name of the parameter.
    """

    def __init__(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], tracker: Tracker, changed: dict[str, str]
    ) -> None:
        self.tracker, self.changed = tracker, changed
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.constants = WeakTensorKeyDictionary(dict.fromkeys([*model.parameters(), *model.buffers()]))

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> Callable[[object], None] | None:
        """Note the function, if it changes a parameter."""
        with torch._C.DisableTorchFunction():
            values = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            if not all(value in self.constants for value in values):
                return None

        def note(result: object) -> None:
            if not isinstance(result, Tensor):
                return
            with torch._C.DisableTorchFunction():
                self.constants[result] = None
                if not self.tracker.holds(result):
                    for value in values:
                        if id(value) in self.names and result.shape == value.shape:
                            self.changed.setdefault(self.names[id(value)], getattr(func, "__name__", ""))

        return note


@contextmanager
def captured_products(model: nn.Module, layers: Sequence[Layer], note: Note) -> Iterator[None]:
    """Call `note(layer, module, input)` for every input of layers that were found by use."""
    if not layers:
        yield
        return
    by_view = {(layer.key, replace(layer.view, name="")): layer for layer in layers if layer.view is not None}
    parameters = {layer.key: layer.stored(model) for layer in layers}

    def note_product(name: str, view: View, input_of: Callable[[], Tensor], stacked: bool) -> None:
        if (layer := by_view.get((name, view))) is not None:
            value = outside_vmap(input_of())
            note(layer, _PRODUCT, value.detach() if value.requires_grad else value)

    with Observer(_ParameterProducts(parameters, note_product)):
        yield


@dataclass
class _Uses:
    """The products of one parameter in observed passes.

    Args:
        views: of the parameter, with the number of input rows of each.
        stacked: a call multiplied several of them at once.
    """

    views: Counter[View] = field(default_factory=Counter)
    stacked: bool = False


class LayersByUse:
    """Observe forward passes of a model and find the layers that no class shows.

    Parameters of layers whose module is called, of embeddings, and of parametrisations such as the spectral norm are
    left out.

    Args:
        model: the model.

    Attributes:
        by_class: the layers that classes show.
        called: names of parameters whose layers are left to their classes; the caller adds to it.
        changed: functions that change parameters before they multiply, by name of the parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        excluded = unfolded(model) | {
            id(parameter)
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            for parameter in module.parameters(recurse=False)
        }
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if holds_weights(parameter) and parameter.numel() >= _LEAST and id(parameter) not in excluded
        }
        self._model = model
        self._uses: dict[str, _Uses] = {}
        self.by_class = [layer for layer in layers_by_class(model) if layer.key in self._parameters]
        self.called: set[str] = set()
        self.changed: dict[str, str] = {}

    def watching(self) -> Observer:
        """Context in which products with parameters outside `called` are noted."""
        products = _ParameterProducts(self._parameters, self._note)
        return Observer(products, _ParameterChanges(self._model, self._parameters, products.tracker, self.changed))

    def _note(self, name: str, view: View, input_of: Callable[[], Tensor], stacked: bool) -> None:
        if name not in self.called:
            uses = self._uses.setdefault(name, _Uses())
            uses.views[view] += max(1, outside_vmap(input_of()).numel() // max(1, view.shape[1]))
            uses.stacked |= stacked

    def layers(self) -> list[Layer]:
        """The layers found: disjoint matrices that together make up their parameter."""
        return [
            layer
            for name, parameter in self._parameters.items()
            if name in self._uses and name not in self.called
            for layer in _layers_of(name, parameter, self._uses[name])
        ]


def _layers_of(name: str, parameter: nn.Parameter, uses: _Uses) -> list[Layer]:
    """The layers in one parameter; none if its matrices overlap, leave entries out, or are vectors."""
    views = sorted(uses.views, key=lambda view: (view.offset, view.rows, view.columns))
    routed = uses.stacked or len(set(uses.views.values())) > 1
    if (complete := _completed(views, parameter.numel())) is not None:
        routed |= len(complete) > len(views)
        views = complete
    vectors = len(views) > 1 or parameter.ndim == 1
    if any(view.shape[1] < _LEAST for view in views) or (vectors and all(view.shape[0] == 1 for view in views)):
        return []
    if not _tiled(views, parameter):
        return []
    path, _, attribute = name.rpartition(".")
    if len(views) == 1:
        return [Layer(path, views[0].shape, attribute, view=views[0])]
    if routed and len({view.shape for view in views}) == 1:
        return [Layer(path, view.shape, attribute, expert=number, view=view) for number, view in enumerate(views)]
    named = [replace(view, name=str(number)) for number, view in enumerate(views)]
    return [Layer(path, view.shape, attribute, view=view) for view in named]


def _completed(views: Sequence[View], entries: int) -> list[View] | None:
    """All blocks of a stack of equal consecutive matrices, such as experts of which some received no sample."""
    first = views[0]
    size = first.shape[0] * first.shape[1]
    span = 1 + sum((count - 1) * stride for count, stride in (*first.rows, *first.columns))
    alike = all((view.rows, view.columns) == (first.rows, first.columns) for view in views)
    if not alike or span != size or entries % size or any(view.offset % size for view in views):
        return None
    return [replace(first, offset=offset) for offset in range(0, entries, size)]


def _tiled(views: Sequence[View], parameter: nn.Parameter) -> bool:
    """True if the matrices hold every entry of the parameter once."""
    if sum(view.shape[0] * view.shape[1] for view in views) != parameter.numel():
        return False
    counts = torch.zeros(parameter.numel(), dtype=torch.int8)
    for view in views:
        view.of(counts).add_(1)
    return bool((counts == 1).all())
