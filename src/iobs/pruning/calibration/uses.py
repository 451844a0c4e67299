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
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from iobs.pruning.calibration.products import Index, Product, outside_vmap, products
from iobs.pruning.calibration.tracking import Tracker
from iobs.pruning.network.folding import unfolded
from iobs.pruning.network.layers import Layer, View, holds_weights, layers_by_class

Note = Callable[[Layer, nn.Module, Tensor], None]
Heard = Callable[[str, View, Callable[[], Tensor], bool], None]

_PRODUCT = nn.Identity()  # the module of inputs that are rows of a product already, such as windows of a convolution
_LEAST = 2  # columns of a matrix; a product with fewer is a scaling


class Products(TorchFunctionMode):
    """Watch the products with tracked parameters in a forward pass.

    Args:
        parameters: by full name.
        heard: called before each product with a parameter. Its arguments are the name of the parameter, the view that
            is the matrix, a function that returns the input, and a flag. The flag is True for one of several matrices
            in one call.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], heard: Heard) -> None:
        super().__init__()
        self.heard, self.tracker = heard, Tracker(parameters)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Tell of the product that a call computes, if it is one, and follow copies of parameters."""
        given, name = kwargs or {}, getattr(func, "__name__", "")
        with torch._C.DisableTorchFunction():
            for product in products(name, args, given):
                if self.tracker.holds(product.factor):
                    self._tell(product)
        result = func(*args, **given)
        with torch._C.DisableTorchFunction():
            self.tracker.follow(name, func, args, given, result)
        return result

    def _tell(self, product: Product) -> None:
        """Tell of the matrices of a product; matrices with the same input get the same tensor."""
        values: dict[tuple[Index, tuple[int, int]], Tensor] = {}
        scale = self.tracker.scale(product.factor)  # (scale W) x = W (scale x)

        def value(index: Index, columns: tuple[int, int]) -> Tensor:
            if (index, columns) not in values:
                found = product.inputs(index) if scale == 1 else product.inputs(index) * scale
                whole = columns == (0, found.shape[-1])
                values[index, columns] = found if whole else found[..., slice(*columns)]
            return values[index, columns]

        for index, owner, view, columns in self.tracker.matrices(product.factor, product.batch, product.rows):
            self.heard(owner, view, partial(value, index, columns), product.batch > 0)


@contextmanager
def captured_products(model: nn.Module, layers: Sequence[Layer], note: Note) -> Iterator[None]:
    """Call `note(layer, module, input)` for every input of layers that were found by use."""
    if not layers:
        yield
        return
    known = {(layer.key, replace(layer.view, name="")): layer for layer in layers if layer.view is not None}
    parameters = {layer.key: layer.stored(model) for layer in layers}

    def heard(name: str, view: View, value: Callable[[], Tensor], stacked: bool) -> None:
        if (layer := known.get((name, view))) is not None:
            found = outside_vmap(value())
            note(layer, _PRODUCT, found.detach() if found.requires_grad else found)

    with Products(parameters, heard):
        yield


@dataclass
class _Seen:
    """The products of one parameter in observed passes.

    Args:
        views: of the parameter, with the number of input rows of each.
        stacked: a call multiplied several of them at once.
    """

    views: Counter[View] = field(default_factory=Counter)
    stacked: bool = False


class Observer:
    """Observe forward passes of a model and find the layers that no class shows.

    Parameters of layers whose module is called, of embeddings, and of parametrisations such as the spectral norm are
    left out.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen: dict[str, _Seen] = {}
        left = unfolded(model) | {
            id(one)
            for module in model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            for one in module.parameters(recurse=False)
        }
        self._parameters = {
            name: one
            for name, one in model.named_parameters()
            if holds_weights(one) and one.numel() >= _LEAST and id(one) not in left
        }
        self._classes = [layer for layer in layers_by_class(model) if layer.key in self._parameters]

    def watch(self, called: set[str]) -> Products:
        """The mode that watches a forward pass; layers of parameters in `called` are left to their classes."""

        def heard(name: str, view: View, value: Callable[[], Tensor], stacked: bool) -> None:
            if name not in called:
                seen = self._seen.setdefault(name, _Seen())
                seen.views[view] += max(1, outside_vmap(value()).numel() // max(1, view.shape[1]))
                seen.stacked |= stacked

        return Products(self._parameters, heard)

    def layers(self, called: set[str]) -> list[Layer]:
        """The layers that were found: disjoint matrices that together make up their parameter."""
        found = []
        for name, parameter in self._parameters.items():
            seen = self._seen.get(name)
            if seen is not None and name not in called:
                found += _layers_of(name, parameter, seen)
        return found

    @property
    def classes(self) -> list[Layer]:
        """The layers that classes show."""
        return self._classes


def _layers_of(name: str, parameter: nn.Parameter, seen: _Seen) -> list[Layer]:
    """The layers in one parameter; none if its matrices overlap, leave entries out, or are vectors."""
    views = sorted(seen.views, key=lambda view: (view.offset, view.rows, view.columns))
    routed = seen.stacked or len(set(seen.views.values())) > 1
    if (complete := _completed(views, parameter.numel())) is not None:
        routed |= len(complete) > len(views)
        views = complete
    vectors = len(views) > 1 or parameter.ndim == 1
    if any(view.shape[1] < _LEAST for view in views) or (vectors and all(view.shape[0] == 1 for view in views)):
        return []
    if not _tiled(views, parameter):
        return []
    path, _, own = name.rpartition(".")
    if len(views) == 1:
        return [Layer(path, views[0].shape, own, view=views[0])]
    if routed and len({view.shape for view in views}) == 1:
        return [Layer(path, view.shape, own, expert=number, view=view) for number, view in enumerate(views)]
    named = [replace(view, name=str(number)) for number, view in enumerate(views)]
    return [Layer(path, view.shape, own, view=view) for view in named]


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
    """Check that the matrices hold every entry of the parameter once."""
    if sum(view.shape[0] * view.shape[1] for view in views) != parameter.numel():
        return False
    counts = torch.zeros(parameter.numel(), dtype=torch.int8)
    for view in views:
        view.of(counts).add_(1)
    return bool((counts == 1).all())
