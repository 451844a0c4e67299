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

from iobs.pruning.calibration.gram import POSITIONS
from iobs.pruning.network.calls import Argument

Labels: TypeAlias = list[object]
Index: TypeAlias = tuple[int, ...]


def outside_vmap(value: Tensor) -> Tensor:
    """The tensor behind a value inside `torch.vmap`, with the mapped dimensions in front; other values unchanged."""
    while functorch.is_batchedtensor(value):
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


def _factors(left: Tensor, left_labels: Labels, right: Tensor, right_labels: Labels, kept: Labels) -> Iterator[Product]:
    """Both factors of a sum of products over the labels that are not kept."""
    for weight, own, value, others in (
        (right, right_labels, left, left_labels),
        (left, left_labels, right, right_labels),
    ):
        if (found := _arranged(weight, own, partial(_itself, value), others, kept)) is not None:
            yield found


def _itself(value: Tensor) -> Tensor:
    return value


def _arranged(weight: Tensor, own: Labels, value: Callable[[], Tensor], others: Labels, kept: Labels) -> Product | None:
    """One factor with its dimensions in order; None if it is not a stack of matrices, each with its own input."""
    if len(set(own)) < len(own) or len(set(others)) < len(others):
        return None
    for label in [one for one in own if one in others and one in kept]:
        place = own.index(label)
        if weight.stride(place) == 0 or weight.shape[place] == 1:  # one matrix for the whole batch
            weight, own = weight.select(place, 0), [one for one in own if one != label]
    batch = [one for one in own if one in others and one in kept]
    columns = [one for one in own if one in others and one not in kept]
    rows = [one for one in own if one not in others]
    rest = [one for one in others if one not in own]
    if not rows or not columns or any(one not in kept for one in (*rows, *rest)):
        return None
    factor = weight.permute([own.index(one) for one in (*batch, *rows, *columns)])

    def inputs(index: Index) -> Tensor:
        found = value()
        if [*batch, *rest, *columns] != others:
            found = found.permute([others.index(one) for one in (*batch, *rest, *columns)])
        found = found.flatten(-len(columns)) if len(columns) > 1 else found
        return found[index] if index else found

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
            input, left = input.select(left.index(place), 0), [one for one in left if one != place]
        elif sizes[1] == 1 and sizes[0] > 1:
            other, right = other.select(right.index(place), 0), [one for one in right if one != place]
    kept: Labels = [one for one in dict.fromkeys((*left, *right)) if one != "inner"]
    yield from _factors(input, left, other, right, kept)


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
    given = terms.split(",")
    labels = [_letters(term, operand.ndim) for term, operand in zip(given, operands, strict=True)]
    if "->" in equation:
        kept = [*result.replace("...", "")]
    else:
        letters = [one for term in labels for one in term if isinstance(one, str)]
        kept = [one for one in letters if letters.count(one) == 1]
    dots = [one for term in labels for one in term if isinstance(one, int)]
    if len(operands) == 2:
        yield from _factors(operands[0], labels[0], operands[1], labels[1], [*kept, *dots])
    elif not dots:
        yield from _one_of_several(given, operands, kept)


def _one_of_several(terms: list[str], operands: tuple[Tensor, ...], kept: Labels) -> Iterator[Product]:
    """Each operand of an einsum as the weight; its input is the product of the others."""
    for place, (weight, own) in enumerate(zip(operands, terms, strict=True)):
        others = [*operands[:place], *operands[place + 1 :]]
        their = [*terms[:place], *terms[place + 1 :]]
        left = [one for one in dict.fromkeys("".join(their)) if one in own or one in kept]
        value = partial(torch.einsum, f"{','.join(their)}->{''.join(left)}", others)
        if (found := _arranged(weight, [*own], value, [*left], kept)) is not None:
            yield found


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
    for one, other in zip(*dims, strict=True):
        right[other] = left[one]
    kept = [one for one in (*left, *right) if (one in left) != (one in right)]
    yield from _factors(a, left, b, right, kept)


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
        value = functional.pad(value, [one for pair in reversed(sides) for one in pair])
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
        sides = [(one - off, one - off + end) for one, off, end in zip(reach, cut, more, strict=True)]
        spread = functional.pad(spread, [one for pair in reversed(sides) for one in pair])
        chosen = spread[:, _group(spread.shape[1], groups, index[0])]
        return _windows(chosen, kernel, [1] * spatial, gaps, mirrored=True)

    order = [0, 2, 1, *range(3, spatial + 3)]
    yield Product(weight.view(groups, -1, *weight.shape[1:]).permute(order), 1, 1, inputs)


def _group(channels: int, groups: int, number: int) -> slice:
    """The channels of one group."""
    return slice(number * channels // groups, (number + 1) * channels // groups)


def _each(value: Argument, count: int) -> list[int]:
    """The setting of each spatial dimension."""
    values = [int(one) for one in value] if isinstance(value, (tuple, list)) else [int(value)]
    return values * count if len(values) == 1 else values


def _sides(padding: Argument, kernel: torch.Size, gaps: list[int]) -> list[tuple[int, int]]:
    """The padding before and after each spatial dimension."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(one, one) for one in _each(padding, len(kernel))]


def _windows(value: Tensor, kernel: torch.Size, steps: list[int], gaps: list[int], mirrored: bool = False) -> Tensor:
    """The windows of a padded input at up to `POSITIONS` drawn positions, (samples, positions, channels * kernel)."""
    spatial = len(kernel)
    for axis, (size, step, gap) in enumerate(zip(kernel, steps, gaps, strict=True)):
        value = value.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
    places = value.shape[2 : 2 + spatial]
    count = math.prod(places)
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(count))[:POSITIONS].sort().values
    index = torch.unravel_index(drawn.to(value.device), tuple(places))
    picked: Tensor = value[(slice(None), slice(None), *index)].movedim(2, 1)  # type: ignore[index]  # (samples, positions, channels, *kernel)
    return (picked.flip([*range(3, 3 + spatial)]) if mirrored else picked).flatten(2)


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
