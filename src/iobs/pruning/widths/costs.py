"""Cost of a network as a function of its widths: multiplications by weights, or entries of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.network.calls import Args, Function, Kwargs, Observer, after_calls, factors
from iobs.pruning.network.layers import CONVOLUTIONS, TRANSPOSED, Layer, find_layers, joined, linear_maps
from iobs.pruning.network.modes import keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.structure.units import Site

WidthBySite = Mapping[str, int]  # number of kept units by name of the site


class CostModel(Protocol):
    """Cost of a network in some unit, by its widths."""

    def of(self, widths: WidthBySite) -> float:
        """Cost at some widths; a site without a width keeps all its units."""
        ...


@dataclass(frozen=True)
class Share:
    """Rows or columns of a weight matrix that belong to the units of one site.

    Attributes:
        site: name of the site.
        each: rows or columns of one unit.
        count: number of units.
    """

    site: str
    each: int
    count: int

    def gone(self, widths: WidthBySite) -> int:
        """Number of rows or columns that are removed."""
        return self.each * (self.count - widths.get(self.site, self.count))


@dataclass(frozen=True)
class Side:
    """Rows or columns of a weight matrix.

    Attributes:
        size: number of rows or columns of the dense network.
        shares: those that belong to units.
    """

    size: int
    shares: tuple[Share, ...] = ()

    def at(self, widths: WidthBySite) -> int:
        """Number of rows or columns that are left."""
        return self.size - sum(share.gone(widths) for share in self.shares)


@dataclass(frozen=True)
class LayerProduct:
    """One weight matrix and the number of inputs that it multiplies for one sample.

    Attributes:
        path: of its module.
        positions: number of vectors that it multiplies, per sample.
        rows: outputs.
        columns: inputs of one group of a convolution times the size of its kernel.
    """

    path: str
    positions: float
    rows: Side
    columns: Side

    @property
    def held(self) -> bool:
        """True if rows or columns belong to units."""
        return bool(self.rows.shares or self.columns.shares)

    def entries(self, widths: WidthBySite) -> int:
        """Number of entries that are left."""
        return self.rows.at(widths) * self.columns.at(widths)


@dataclass(frozen=True)
class Products:
    """Multiplications by weights, or entries of weights, in the layers of a network.

    Attributes:
        products: the weight matrices.
        by_position: True: multiplications for one sample; False: entries.
    """

    products: tuple[LayerProduct, ...]
    by_position: bool = True

    @property
    def entries(self) -> Products:
        """The same matrices, counted in entries."""
        return replace(self, by_position=False)

    @property
    def held(self) -> Products:
        """The matrices whose rows or columns belong to units."""
        return replace(self, products=tuple(product for product in self.products if product.held))

    def of(self, widths: WidthBySite) -> float:
        """Multiplications or entries that are left."""
        return sum(
            (product.positions if self.by_position else 1) * product.entries(widths) for product in self.products
        )

    @classmethod
    def count(cls, model: nn.Module, batch: Batch, sites: Sequence[Site]) -> Products:
        """Count the matrices of all layers, and of transposed convolutions, on one batch.

        Layers are those of `find_layers`. The class of a module need not tell them: an observed pass may have.
        """
        shares = _shares(sites)
        positions = positions_of(model, batch)
        samples = max(1, batches.size(batch))
        products = []
        for path, used in positions.items():
            module = model.get_submodule(path)
            weight = module.weight
            assert isinstance(weight, Tensor)
            axis = 0 if isinstance(module, (nn.Linear, *CONVOLUTIONS)) else 1  # of the rows; Conv1D of GPT-2 has 1
            within = getattr(module, "groups", 1) > 1 and not isinstance(module, TRANSPOSED)  # has inputs of its own
            products.append(_product(path, joined(path, "weight"), weight, axis, used / samples, shares, within))
        for layer, used in _uncalled(model, batch, positions).items():
            weight, axis = layer.stored(model), _row_axis(layer)
            whole = weight.numel() == layer.weights and weight.ndim > 1 and weight.shape[axis] == layer.shape[0]
            if whole:
                key = joined(layer.path, layer.parameter)
                products.append(_product(layer.name, key, weight, axis, used / samples, shares, False))
            else:
                products.append(LayerProduct(layer.name, used / samples, *map(Side, layer.shape)))
        return cls(tuple(products))


def note_differing_shapes(data: Sequence[Batch], note: Callable[[str], None]) -> None:
    """Note that costs are those of samples of the first batch, if other batches have samples of other shapes."""

    def shapes(batch: Batch) -> tuple[object, ...]:
        inputs = batches.inputs(batch)
        return (
            tuple(tensor.shape for tensor in batches.tensors(inputs))
            if batches.is_whole(batch)
            else batches.layout(inputs)
        )

    if any(shapes(batch) != shapes(data[0]) for batch in data):
        note(
            "Multiplications and times are those of samples of the first calibration batch; other batches have samples "
            "of other shapes, whose shares may differ."
        )


def _product(
    path: str,
    key: str,
    weight: Tensor,
    axis: int,
    positions: float,
    shares: Mapping[tuple[str, int], Sequence[Share]],
    within: bool,
) -> LayerProduct:
    """The product with a whole weight, whose rows lie along `axis`; `within` if its columns belong to no unit."""
    kernel = weight[0, 0].numel()
    row = Side(weight.shape[axis], tuple(shares.get((key, axis), ())))
    of_columns = () if within else shares.get((key, 1 - axis), ())
    columns = tuple(replace(share, each=share.each * kernel) for share in of_columns)
    return LayerProduct(path, positions, row, Side(weight.shape[1 - axis] * kernel, columns))


def _row_axis(layer: Layer) -> int:
    """The axis of a stored weight along which a layer's rows lie."""
    if layer.view is None:
        return int(layer.transposed)
    return int(layer.view.rows[0][1] < layer.view.columns[0][1])


def _shares(sites: Sequence[Site]) -> dict[tuple[str, int], list[Share]]:
    """The shares of sites in parameters, by full name and axis."""
    shares: dict[tuple[str, int], list[Share]] = {}
    for site in sites:
        for part in site.slices:
            shares.setdefault((part.key, part.axis), []).append(Share(site.name, len(part.index[0]), site.count))
    return shares


@torch.no_grad()
def positions_of(model: nn.Module, batch: Batch) -> dict[str, int]:
    """Number of vectors that the weight of every linear map or convolution multiplies on a batch, by path.

    The model runs without gradients and on parts of the batch: large models have no memory for all logits of a batch.
    """
    counts: dict[str, int] = {}

    def count(
        path: str, module: nn.Module, arguments: tuple[object, ...], named: dict[str, object], output: object
    ) -> None:
        # The kernel of a transposed convolution meets every input once.
        value = (*arguments, *named.values())[0] if isinstance(module, TRANSPOSED) else output
        if isinstance(value, Tensor) and value.numel():
            width = value.shape[-1]
            if isinstance(module, CONVOLUTIONS):
                width = module.out_channels
            elif isinstance(module, TRANSPOSED):
                width = module.in_channels
            counts[path] = counts.get(path, 0) + math.prod(value.shape) // width

    kinds: tuple[type[nn.Module], ...] = (*linear_maps(), *TRANSPOSED)
    paths = [path for path, module in model.named_modules() if isinstance(module, kinds)]
    with keeping_buffers(model), after_calls(model, paths, count):
        for part in batches.pieces(batch):
            batches.forward(model, part)
    return counts


def _uncalled(model: nn.Module, batch: Batch, called: Collection[str]) -> dict[Layer, int]:
    """Number of vectors that layers multiply which no module of `positions_of` computes, such as those of attention."""
    layers = [layer for layer in find_layers(model) if layer.parameter != "weight" or layer.path not in called]
    counts = dict.fromkeys(layers, 0)
    of_kernels: dict[Layer, int] = {}
    kernels = counting_kernels(
        {id(layer.stored(model)): layer for layer in layers if layer.view is not None}, of_kernels
    )

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        counts[layer] += value.numel() // max(1, value.shape[-1])

    if layers:
        with torch.no_grad(), keeping_buffers(model), kernels, captured_inputs(model, layers, note):
            for part in batches.pieces(batch):
                batches.forward(model, part)
    counts |= of_kernels  # `note` is given some windows of their inputs only
    return {layer: count for layer, count in counts.items() if count}


def counting_kernels(layers: Mapping[int, Layer], counts: dict[Layer, int]) -> Observer:
    """A context that counts the positions of convolutions that a model computes without a module of torch.

    Args:
        layers: by identity of their parameter.
        counts: positions by layer, which are added to.
    """

    def listen(func: Function, args: Args, kwargs: Kwargs) -> Callable[[Any], None] | None:
        name = getattr(func, "__name__", "")
        if not name.startswith("conv"):
            return None
        source, weight = factors(args, kwargs)
        layer = layers.get(id(weight))

        def count(result: Any) -> None:
            value = source if "transpose" in name else result
            if layer is not None and isinstance(value, Tensor):
                counts[layer] = counts.get(layer, 0) + value.numel() // weight.shape[0]

        return count

    return Observer(listen)
