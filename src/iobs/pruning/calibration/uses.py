"""Layers found by use: matrices that a forward pass multiplies with, whatever class their module has.

One observed forward pass shows which parameters, or which parts of them, are factors of products. `observe` makes
layers of them, and `captured_products` captures their inputs in later passes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from iobs.errors import unless_out_of_memory
from iobs.pruning.calibration.products import Index, Product, outside_vmap, products
from iobs.pruning.network.calls import Args, Function, Kwargs, Observer
from iobs.pruning.network.folding import unfolded
from iobs.pruning.network.layers import Axes, Layer, View, holds_weights, layers_by_class

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


# ---- tracking of parameters through a forward pass: the entries of a parameter that a tensor consists of
# Views of a parameter share its storage, so that the offset and the strides tell the entries. Copies do not, such as
# the result of `cat`, `contiguous` or a change of dtype. For a copy the same function is applied to an int64 tensor
# with the numbers of the parameters' entries. A copy may be a multiple of the parameter by one number, or by one for
# every row of the matrix that multiplies: rows divided by their norms have the zeros, and up to a number each the
# problem, of the parameter.
_TIMES = frozenset({"mul", "multiply", "__mul__", "__rmul__", "div", "divide", "__truediv__"})
_BY_ROWS = frozenset({"normalize"})
_FOREIGN = -1  # number of an entry that comes from no parameter
_MATRICES = 4096  # most matrices in a stack that are looked at
_SAME = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach"})
_MOVED = frozenset(
    {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "reshape", "flatten", "__getitem__"}
    | {"index_select", "repeat_interleave", "repeat", "tile", "roll", "flip", "gather", "tensor_split", "reshape_as"}
)


class Tracker:
    """The parameters of a model by their place in memory, and the copies of their entries in one forward pass.

    Args:
        parameters: by full name; only contiguous ones are tracked.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._homes: dict[int, list[tuple[int, int, str, int]]] = {}  # by storage: begin, end, name, first number
        self._numbers: list[tuple[int, str, int]] = []  # first number, name, entries
        self._parameters = parameters
        # By storage: the copy, the numbers in its storage, and the number by which it is multiplied; None for several.
        self._copies: dict[int, tuple[Tensor, Tensor, float | None]] = {}
        total = 0
        for name, parameter in parameters.items():
            if parameter.is_contiguous() and parameter.numel() and (place := _storage(parameter)):
                begin = int(parameter.storage_offset())
                self._homes.setdefault(place, []).append((begin, begin + parameter.numel(), name, total))
                self._numbers.append((total, name, parameter.numel()))
                total += parameter.numel()

    def holds(self, value: object) -> bool:
        """True if a tensor shares the memory of a tracked parameter or of a copy of its entries."""
        if not isinstance(value, Tensor) or not self._homes:
            return False
        place = _storage(value)
        return place in self._homes or place in self._copies

    def follow(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: object) -> None:
        """Number the entries of the result of a function that copies entries of parameters."""
        if not isinstance(result, Tensor) or name not in _SAME | _MOVED | _TIMES | _BY_ROWS or self.holds(result):
            return
        scales = {self._scale(value) for value in tree_leaves((args, kwargs)) if self.holds(value)}
        if len(scales) != 1:
            return
        scale = scales.pop()
        try:
            if name in _TIMES:
                in_order = "div" in name or self.holds(args[0])
                weight, factor = _scaled(name, *(args if in_order else reversed(args)), **kwargs)
                numbers, scale = self._numbered(weight), None if scale is None or factor is None else scale * factor
            elif name in _BY_ROWS:
                numbers, scale = self._numbered(args[0] if args else kwargs["input"]), None
            elif name in _SAME:
                numbers = self._numbered(args[0])
            else:
                copied_args, copied_kwargs = tree_map_only(Tensor, self._numbered, (args, kwargs))
                numbers = func(*copied_args, **copied_kwargs)
        except unless_out_of_memory(RuntimeError, TypeError, IndexError, ValueError, OverflowError, ZeroDivisionError):
            return
        if (place := _storage(result)) and numbers.shape == result.shape:
            size = result.untyped_storage().nbytes() // result.element_size()
            whole = torch.full((size,), _FOREIGN, dtype=torch.int64, device=result.device)
            whole.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(numbers)
            self._copies[place] = result, whole, scale

    def scale(self, value: Tensor) -> float:
        """The number by which the entries of parameters in a tensor are multiplied; 1 if every row has its own."""
        scale = self._scale(value)
        return 1.0 if scale is None else scale

    def _scale(self, value: Tensor) -> float | None:
        copy = self._copies.get(_storage(value) or 0)
        return 1.0 if copy is None else copy[2]

    def _multiplied_by_rows(self, matrix: Tensor, numbers: Tensor) -> bool:
        """Check that every row of a matrix (rows, columns) is a multiple of the entries with these numbers."""
        unscaled = torch.zeros_like(matrix)
        for first, name, entries in self._numbers:
            inside = (numbers >= first) & (numbers < first + entries)
            unscaled[inside] = self._parameters[name].detach().flatten()[numbers[inside] - first].to(unscaled)
        ratio = torch.where(unscaled != 0, matrix / unscaled, torch.nan).double()
        most, least = ratio.nan_to_num(-torch.inf).amax(1), ratio.nan_to_num(torch.inf).amin(1)
        tolerance = max(1e-3, 8 * torch.finfo(matrix.dtype).eps)
        return bool(((most - least <= tolerance * most.abs()) | (most == -torch.inf)).all())

    def _numbered(self, value: Tensor) -> Tensor:
        """The numbers of a tensor's entries; tensors of integers, such as indices, are returned themselves."""
        if not value.is_floating_point():
            return value
        place = _storage(value)
        if place in self._copies:
            return self._copies[place][1].as_strided(value.shape, value.stride(), value.storage_offset())
        numbers = torch.full(value.shape, _FOREIGN, dtype=torch.int64, device=value.device)
        for begin, end, _, first in self._homes.get(place or 0, ()):
            if begin <= value.storage_offset() < end:
                numbers = torch.full_like(numbers, int(value.storage_offset()) - begin + first)
                for axis, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
                    steps = torch.arange(size, device=value.device) * stride
                    numbers += steps.view(-1, *[1] * (value.ndim - axis - 1))
        return numbers

    def matrices(
        self, factor: Tensor, batch: int, rows: int
    ) -> Iterator[tuple[tuple[int, ...], str, View, tuple[int, int]]]:
        """The matrices of parameters that a factor (*batch, *rows, *columns) of a product consists of.

        Yields:
            The position in the batch dimensions, the name of the parameter, the view of it, and the range of the
            factor's columns that it multiplies.
        """
        place, sizes = _storage(factor), factor.shape[:batch]
        if sizes.numel() > _MATRICES:
            return
        for index in itertools.product(*map(range, sizes)):
            matrix = factor[index] if index else factor
            if place in self._copies:
                numbers = self._numbered(matrix).flatten(rows).flatten(0, rows - 1).contiguous()
                by_rows = self._scale(factor) is None
                if by_rows and not self._multiplied_by_rows(matrix.flatten(rows).flatten(0, rows - 1), numbers):
                    continue
                yield from ((index, *block) for block in self._blocks(numbers))
                continue
            for begin, end, name, _ in self._homes[place or 0]:
                axes = [*zip(matrix.shape, matrix.stride(), strict=True)]
                offset = int(matrix.storage_offset()) - begin
                last = offset + sum((size - 1) * stride for size, stride in axes)
                if offset >= 0 and last < end - begin and all(stride for size, stride in axes if size > 1):
                    view = View(offset, _joined(axes[:rows]), _joined(axes[rows:]))
                    yield index, name, view, (0, view.shape[1])

    def _blocks(self, numbers: Tensor) -> Iterator[tuple[str, View, tuple[int, int]]]:
        """The blocks of a matrix of numbers (rows, columns) that are views of one parameter each."""
        starts = torch.tensor([first for first, _, _ in self._numbers], device=numbers.device)
        owners = torch.where(numbers < 0, _FOREIGN, torch.searchsorted(starts, numbers, right=True) - 1)
        for top, bottom in _runs(owners[:, 0]):
            for start, stop in _runs(owners[top]):
                owner = int(owners[top, start])
                block = numbers[top:bottom, start:stop]
                if owner == _FOREIGN or not bool((owners[top:bottom, start:stop] == owner).all()):
                    continue
                first, name, _ = self._numbers[owner]
                down, across = _axes(block[:, 0] - block[0, 0]), _axes(block[0] - block[0, 0])
                if down is None or across is None:
                    continue
                step = (block[:, :1] - block[0, 0]) + (block[:1] - block[0, 0]) + block[0, 0]
                if bool((step == block).all()):
                    yield name, View(int(block[0, 0]) - first, down, across), (start, stop)


def _scaled(name: str, weight: Tensor, factor: float | Tensor) -> tuple[Tensor, float | None]:
    """A weight and the number that a function multiplies it by, None for several; ValueError if it is no number."""
    if isinstance(factor, Tensor) and factor.numel() > 1:
        return weight, None
    number = float(factor) ** (-1 if "div" in name else 1)
    if not number or not math.isfinite(number):
        raise ValueError("no scale")
    return weight, number


def _storage(value: Tensor) -> int | None:
    """The address of a tensor's memory; None if it has none of its own."""
    try:
        return value.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a tensor inside vmap
        return None


def _joined(axes: list[tuple[int, int]]) -> Axes:
    """Dimensions with those joined that can be flattened without a copy, and without dimensions of size 1."""
    joined: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = joined[-1][0] * size, stride
        else:
            joined.append((size, stride))
    return tuple(joined) or ((1, 1),)


def _runs(values: Tensor) -> Iterator[tuple[int, int]]:
    """The ranges of equal consecutive values."""
    ends = [*(torch.nonzero(values[1:] != values[:-1]).flatten() + 1).tolist(), len(values)]
    yield from zip([0, *ends[:-1]], ends, strict=True)


def _axes(steps: Tensor) -> Axes | None:
    """The dimensions whose flattened positions are these numbers, which begin with 0; None if there are none."""
    axes: list[tuple[int, int]] = []
    slower = steps
    while len(slower) > 1:
        stride = int(slower[1])
        even = slower == torch.arange(len(slower), device=slower.device) * stride
        size = len(slower) if bool(even.all()) else int(torch.nonzero(~even)[0])
        if stride <= 0 or len(slower) % size:
            return None
        axes.append((size, stride))
        slower = slower[::size]
    axes.reverse()
    built = torch.zeros(1, dtype=torch.int64, device=steps.device)
    for size, stride in axes:
        built = (built[:, None] + torch.arange(size, device=steps.device) * stride).flatten()
    return _joined(axes) if bool((built == steps).all()) else None
