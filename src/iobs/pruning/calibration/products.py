"""Products: calls of torch functions that multiply two tensors, in one form.

A product has a factor that may be a weight, with its dimensions in the order (batch, rows, columns). It also has the
inputs that each matrix of the factor multiplies, (..., columns). Both factors of a matrix product may be the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn import functional

from iobs.pruning.calibration.gram import POSITIONS, sliding_windows, windows_at
from iobs.pruning.network.calls import Argument

Labels: TypeAlias = list[object]
Index: TypeAlias = tuple[int, ...]


def is_mapped(value: Tensor) -> bool:
    """True if a value is inside `torch.vmap`."""
    return bool(functorch.is_batchedtensor(value))


def outside_vmap(value: Tensor) -> Tensor:
    """The tensor behind a value inside `torch.vmap`, with the mapped dimensions in front; other values unchanged."""
    while is_mapped(value):
        dimension = functorch.maybe_get_bdim(value)
        value = functorch.get_unwrapped(value).movedim(dimension, 0)
    return value


@dataclass(frozen=True)
class Product:
    """One factor of a product as a stack of matrices, and their inputs.

    Args:
        factor: (*batch, *rows, *columns), a view of the argument of the call.
        batch: number of batch dimensions.
        rows: number of dimensions that are flattened into rows.
        inputs: the input of the matrix at a position of the batch dimensions, (..., columns).
    """

    factor: Tensor
    batch: int
    rows: int
    inputs: Callable[[Index], Tensor]


def products(name: str, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> list[Product]:
    """The products in a call of a torch function; none for other functions and for arguments of other kinds.

    Args:
        name: of the function, such as "matmul".
        args: positional arguments.
        kwargs: keyword arguments.
    """
    reader = _READERS.get(name)
    if reader is None:
        return []
    try:
        return [*reader(*args, **kwargs)]
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        return []  # a form of the call that torch may accept, but that is no product of two plain tensors


def _both_factors(
    left: Tensor, left_labels: Labels, right: Tensor, right_labels: Labels, kept: Labels
) -> Iterator[Product]:
    """The products of a sum over the labels that are not kept: each factor may be the weight."""
    for weight, labels, value, value_labels in (
        (right, right_labels, left, left_labels),
        (left, left_labels, right, right_labels),
    ):
        if (product := _product(weight, labels, partial(_itself, value), value_labels, kept)) is not None:
            yield product


def _itself(value: Tensor) -> Tensor:
    return value


def _product(
    weight: Tensor, labels: Labels, value: Callable[[], Tensor], value_labels: Labels, kept: Labels
) -> Product | None:
    """A factor with its dimensions in order; None if it is not a stack of matrices, each with its own input.

    Args:
        weight: the factor.
        labels: of its dimensions.
        value: returns the other factor.
        value_labels: of the dimensions of the other factor.
        kept: labels that are not summed over.
    """
    if len(set(labels)) < len(labels) or len(set(value_labels)) < len(value_labels):
        return None
    for label in [label for label in labels if label in value_labels and label in kept]:
        place = labels.index(label)
        if weight.stride(place) == 0 or weight.shape[place] == 1:  # one matrix for the whole batch
            weight, labels = weight.select(place, 0), [other for other in labels if other != label]
    batch = [label for label in labels if label in value_labels and label in kept]
    columns = [label for label in labels if label in value_labels and label not in kept]
    rows = [label for label in labels if label not in value_labels]
    rest = [label for label in value_labels if label not in labels]
    if not rows or not columns or any(label not in kept for label in (*rows, *rest)):
        return None
    factor = weight.permute([labels.index(label) for label in (*batch, *rows, *columns)])

    def inputs(index: Index) -> Tensor:
        arranged, order = value(), [*batch, *rest, *columns]
        if order != value_labels:
            arranged = arranged.permute([value_labels.index(label) for label in order])
        arranged = arranged.flatten(-len(columns)) if len(columns) > 1 else arranged
        return arranged[index] if index else arranged

    return Product(factor, len(batch), len(rows), inputs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Product]:
    if weight.ndim == 2:
        yield Product(weight, 0, 1, lambda index: input)


def _matmul(input: Tensor, other: Tensor, **_: object) -> Iterator[Product]:
    if input.ndim == 1 or other.ndim == 1:
        input, other = (input[None] if input.ndim == 1 else input), (other[:, None] if other.ndim == 1 else other)
    left: Labels = [*range(input.ndim - 2 - 1, -1, -1), "rows", "inner"]
    right: Labels = [*range(other.ndim - 2 - 1, -1, -1), "inner", "columns"]
    for place in range(min(input.ndim, other.ndim) - 2):  # a dimension of size 1 is broadcast
        sizes = input.shape[left.index(place)], other.shape[right.index(place)]
        if sizes[0] == 1 and sizes[1] > 1:
            input, left = input.select(left.index(place), 0), [label for label in left if label != place]
        elif sizes[1] == 1 and sizes[0] > 1:
            other, right = other.select(right.index(place), 0), [label for label in right if label != place]
    kept: Labels = [label for label in dict.fromkeys((*left, *right)) if label != "inner"]
    yield from _both_factors(input, left, other, right, kept)


def _reversed_matmul(input: Tensor, other: Tensor) -> Iterator[Product]:
    yield from _matmul(other, input)


def _inner(input: Tensor, other: Tensor) -> Iterator[Product]:
    if other.ndim <= 2:
        yield from _matmul(input, other.mT if other.ndim == 2 else other)


def _added_matmul(
    input: Tensor, *factors: Tensor, beta: object = 1, alpha: object = 1, **named: Tensor
) -> Iterator[Product]:
    left, right = (*factors, *named.values())
    yield from _matmul(left, right)


def _einsum(equation: str, *operands: Argument) -> Iterator[Product]:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if len(operands) < 2:
        return
    terms, _, result = equation.replace(" ", "").partition("->")
    names = terms.split(",")
    labels = [_letters(term, operand.ndim) for term, operand in zip(names, operands, strict=True)]
    if "->" in equation:
        kept = [*result.replace("...", "")]
    else:
        letters = [label for term in labels for label in term if isinstance(label, str)]
        kept = [letter for letter in letters if letters.count(letter) == 1]
    dots = [label for term in labels for label in term if isinstance(label, int)]
    if len(operands) == 2:
        yield from _both_factors(operands[0], labels[0], operands[1], labels[1], [*kept, *dots])
    elif not dots:
        yield from _one_of_several(names, operands, kept)


def _one_of_several(terms: list[str], operands: tuple[Tensor, ...], kept: Labels) -> Iterator[Product]:
    """Each operand of an einsum as the weight; its input is the product of the others."""
    for place, (weight, term) in enumerate(zip(operands, terms, strict=True)):
        others = [*operands[:place], *operands[place + 1 :]]
        other_terms = [*terms[:place], *terms[place + 1 :]]
        result = [label for label in dict.fromkeys("".join(other_terms)) if label in term or label in kept]
        value = partial(torch.einsum, f"{','.join(other_terms)}->{''.join(result)}", others)
        if (product := _product(weight, [*term], value, [*result], kept)) is not None:
            yield product


def _letters(term: str, dimensions: int) -> Labels:
    """The labels of an operand of einsum; the dimensions of "..." are numbered from the right."""
    before, dots, after = term.partition("...")
    free = dimensions - len(before) - len(after) if dots else 0
    return [*before, *range(free - 1, -1, -1), *after]


def _tensordot(a: Tensor, b: Tensor, dims: Argument = 2, out: None = None) -> Iterator[Product]:
    if isinstance(dims, int):
        dims = [*range(-dims, 0)], [*range(dims)]
    left: Labels = [f"a{place}" for place in range(a.ndim)]
    right: Labels = [f"b{place}" for place in range(b.ndim)]
    for left_place, right_place in zip(*dims, strict=True):
        right[right_place] = left[left_place]
    kept = [label for label in (*left, *right) if (label in left) != (label in right)]
    yield from _both_factors(a, left, b, right, kept)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Product]:
    yield Product(weight, 0, 1, lambda index: (input1[..., :, None] * input2[..., None, :]).flatten(-2))


def _grouped(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **_: object) -> Iterator[Product]:
    if mat_b.ndim == 3 and mat_a.ndim == 2 and offs is not None:
        ends = [0, *offs.tolist()]
        yield Product(mat_b.mT, 1, 1, lambda index: mat_a[ends[index[0]] : ends[index[0] + 1]])
    elif mat_b.ndim == 3 and mat_a.ndim == 3:
        yield from _matmul(mat_a, mat_b)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Argument = 1,
    padding: Argument = 0,
    dilation: Argument = 1,
    groups: int = 1,
) -> Iterator[Product]:
    spatial = weight.ndim - 2
    if groups > 1 and weight.shape[1] == 1:
        return  # a depthwise convolution, which stays dense
    steps, gaps = _each(stride, spatial), _each(dilation, spatial)
    sides = _sides(padding, weight.shape[2:], gaps)

    def inputs(index: Index) -> Tensor:
        value = input if input.ndim == spatial + 2 else input[None]
        value = functional.pad(value, [side for pair in reversed(sides) for side in pair])
        return _windows(value[:, _group(value.shape[1], groups, index[0])], weight.shape[2:], steps, gaps)

    yield Product(weight.view(groups, -1, *weight.shape[1:]), 1, 1, inputs)


def _transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Argument = 1,
    padding: Argument = 0,
    output_padding: Argument = 0,
    groups: int = 1,
    dilation: Argument = 1,
) -> Iterator[Product]:
    """The output is a plain convolution of the input with zeros between its entries, with the kernel mirrored."""
    spatial, kernel = weight.ndim - 2, weight.shape[2:]
    if groups > 1 and weight.shape[0] == groups:
        return
    steps, gaps = _each(stride, spatial), _each(dilation, spatial)
    cut, more = _each(padding, spatial), _each(output_padding, spatial)

    def inputs(index: Index) -> Tensor:
        value = input if input.ndim == spatial + 2 else input[None]
        sizes = [(size - 1) * step + 1 for size, step in zip(value.shape[2:], steps, strict=True)]
        spread = value.new_zeros(*value.shape[:2], *sizes)
        spread[(slice(None), slice(None), *(slice(None, None, step) for step in steps))] = value
        reach = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
        sides = [(size - off, size - off + end) for size, off, end in zip(reach, cut, more, strict=True)]
        spread = functional.pad(spread, [side for pair in reversed(sides) for side in pair])
        chosen = spread[:, _group(spread.shape[1], groups, index[0])]
        return _windows(chosen, kernel, [1] * spatial, gaps, mirrored=True)

    order = [0, 2, 1, *range(3, spatial + 3)]
    yield Product(weight.view(groups, -1, *weight.shape[1:]).permute(order), 1, 1, inputs)


def _group(channels: int, groups: int, number: int) -> slice:
    """The channels of one group."""
    return slice(number * channels // groups, (number + 1) * channels // groups)


def _each(value: Argument, count: int) -> list[int]:
    """The setting of each spatial dimension."""
    values = [int(size) for size in value] if isinstance(value, (tuple, list)) else [int(value)]
    return values * count if len(values) == 1 else values


def _sides(padding: Argument, kernel: torch.Size, gaps: list[int]) -> list[tuple[int, int]]:
    """The padding before and after each spatial dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(size, size) for size in _each(padding, len(kernel))]


def _windows(value: Tensor, kernel: torch.Size, steps: list[int], gaps: list[int], mirrored: bool = False) -> Tensor:
    """The windows of a padded input at up to `POSITIONS` drawn positions, (samples, positions, channels * kernel)."""
    windows = sliding_windows(value, kernel, steps, gaps)
    count = math.prod(windows.shape[2 : 2 + len(kernel)])
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(count))[:POSITIONS].sort().values
    picked = windows_at(windows, drawn.to(value.device))
    return (picked.flip([*range(3, 3 + len(kernel))]) if mirrored else picked).flatten(2)


_READERS: dict[str, Callable[..., Iterator[Product]]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "__matmul__"), _matmul),
    "__rmatmul__": _reversed_matmul,
    "inner": _inner,
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addmm_", "baddbmm_", "addmv_"), _added_matmul),
    "einsum": _einsum,
    "tensordot": _tensordot,
    "bilinear": _bilinear,
    **dict.fromkeys(("grouped_mm", "_grouped_mm"), _grouped),
    **{f"conv{size}d": _convolution for size in (1, 2, 3)},
    **{f"conv_transpose{size}d": _transposed_convolution for size in (1, 2, 3)},
}
