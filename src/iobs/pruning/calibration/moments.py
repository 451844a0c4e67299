"""Means of the inputs beside a Gram matrix; inner products of inputs, and outputs of a layer.

Products are float32 or wider. A GPU multiplies 16-bit inputs as they are, and sums in float32.

An input whose variance is far below its squared mean would leave only rounding in float32 once the mean is subtracted
from its product. So such inputs are multiplied without an origin near their mean, which the float64 sums get back at
the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from iobs.pruning.runtime.ranks import Ranks

_FAR = 100.0  # squared mean over variance from which products are taken without an origin
_HALVES = torch.bfloat16, torch.float16
_PROBED = 16  # side of the product that shows whether a device sums in float32
_ROWS = 256  # first inputs that an origin is computed from


def prepared(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Inputs in a dtype whose products are exact enough: unchanged where `inner` multiplies 16 bits, else wider.

    The product of two 16-bit numbers is exact in float32. So a GPU's tensor cores, which sum in float32, give what a
    product of float32 gives up to the rounding of its sums, many times as fast.

    Args:
        *inputs: two tensors of `inner`, or one for both.
    """
    dtypes = {value.dtype for value in inputs}
    exact = torch.float32
    for dtype in dtypes:
        exact = torch.promote_types(exact, dtype)
    short = len(dtypes) == 1 and sums_in_float32(inputs[0].device, inputs[0].dtype)
    return inputs if short else tuple(value.to(exact) for value in inputs)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float32 or float64, of `prepared` inputs (groups, count, columns)."""
    if left.dtype in _HALVES:
        return torch.bmm(left.transpose(1, 2), right, out_dtype=torch.float32)
    return left.transpose(1, 2) @ right


def layer_outputs(weight: Tensor, inputs: Tensor) -> Tensor:
    """The outputs of a layer without its bias, (groups, count, rows of a group), in float32 or wider.

    Args:
        weight: (rows, columns).
        inputs: (groups, count, columns).
    """
    inputs, matrices = prepared(inputs, weight.reshape(len(inputs), -1, weight.shape[1]))
    return inner(inputs.transpose(1, 2), matrices.transpose(1, 2))


def terms(value: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Terms of a tensor for products with another: two of 16 bits where `inner` multiplies these, else the tensor."""
    if not sums_in_float32(other.device, other.dtype):
        return (value,)
    first = value.to(other.dtype)
    return first, (value - first).to(other.dtype)


@cache
def sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a device multiplies matrices of a 16-bit dtype with sums and results in float32."""
    if dtype not in _HALVES or device.type != "cuda":
        return False
    ones = torch.ones(1, _PROBED, _PROBED, device=device, dtype=dtype)
    try:
        return bool((torch.bmm(ones, ones, out_dtype=torch.float32) == _PROBED).all())
    except Exception:  # an older torch, or a device without such products: each refuses in its own way
        return False


@dataclass(frozen=True)
class Origin:
    """Values that are subtracted from inputs before their products, (groups, columns) float32, zero in most columns.

    Args:
        own: of the layer's inputs.
        dense: of its dense inputs, or None.
        moves: True if `own`, and if `dense`, is not zero; kept, since reading a tensor waits for the device.
    """

    own: Tensor
    dense: Tensor | None
    moves: tuple[bool, bool]

    @classmethod
    def of(cls, rows: Tensor, dense: Tensor | None) -> Origin:
        """The origin of inputs that begin with these, (groups, count, columns)."""
        means, dense_means = _far_means(rows), None if dense is None else _far_means(dense)
        return cls(means, dense_means, (bool(means.any()), dense_means is not None and bool(dense_means.any())))


@dataclass
class Means:
    """Mean inputs, (groups, columns), float64 sums until `divide`; needed to refit a bias.

    Args:
        own: of the layer's inputs X.
        dense: of its dense inputs D, or of its target outputs, (groups, rows of a group); None without either.
        origin: of the sums so far; None before the first inputs and after `restore`.
    """

    own: Tensor
    dense: Tensor | None = None
    origin: Origin | None = None

    @classmethod
    def empty(cls, gram: Tensor, cross: Tensor | None) -> Means:
        """Means of no samples, for a Gram (groups, columns, columns) and products with dense inputs or outputs."""
        return cls(torch.zeros_like(gram[..., 0]), None if cross is None else torch.zeros_like(cross[..., 0]))

    def add(self, rows: Tensor, dense: Tensor | None) -> None:
        """Add samples, (groups, count, columns)."""
        self.own += rows.sum(1, dtype=torch.float64)
        if self.dense is not None and dense is not None:
            self.dense += dense.sum(1, dtype=torch.float64)

    def shifted(self, rows: Tensor, dense: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Inputs without the origin, which the first of them determine; unchanged where it is zero."""
        if self.origin is None:
            self.origin = Origin.of(rows, dense)
        moves, dense_moves = self.origin.moves
        rows = _without(rows, self.origin.own) if moves else rows
        return rows, _without(dense, self.origin.dense) if dense_moves and dense is not None else dense

    def restore(self, own: Tensor, cross: Tensor | None, dense: Tensor | None, count: int) -> None:
        """Add the origin to float64 sums of products over `count` inputs, in place; names as in `Gram`."""
        origin, self.origin = self.origin, None
        if origin is None:
            return
        x = origin.own.double()
        _complete(own, x, x, self.own, self.own, count)
        if origin.dense is None or self.dense is None or cross is None:
            return
        d = origin.dense.double()
        _complete(cross, d, x, self.dense, self.own, count)
        if dense is not None:
            _complete(dense, d, d, self.dense, self.dense, count)

    def sum_over(self, ranks: Ranks) -> None:
        """Add up the samples of all ranks, in place."""
        for total in (self.own, self.dense):
            if total is not None:
                ranks.sum(total)

    def divide(self, count: int) -> None:
        """Turn sums over `count` samples into means."""
        self.own = self.own / count
        self.dense = None if self.dense is None else self.dense / count

    @property
    def target(self) -> Tensor:
        """Mean input of the target: D with dense inputs, otherwise X; or the mean target output."""
        return self.own if self.dense is None else self.dense


def _far_means(rows: Tensor) -> Tensor:
    """Means of the first inputs (groups, count, columns) in columns of far smaller variance, zero elsewhere."""
    variance, mean = torch.var_mean(rows[:, :_ROWS].float(), 1, correction=0)
    return mean.masked_fill(mean.square() <= _FAR * variance, 0.0)


def _without(rows: Tensor, origin: Tensor | None) -> Tensor:
    """Inputs (groups, count, columns) minus an origin, at least float32."""
    assert origin is not None
    return rows.to(torch.promote_types(rows.dtype, torch.float32)) - origin[:, None]


def _complete(total: Tensor, left: Tensor, right: Tensor, left_sum: Tensor, right_sum: Tensor, count: int) -> None:
    """Turn the sum of (a - left)(b - right)^T over `count` vectors into that of a b^T, in place, from their sums."""
    if bool(left.any()) or bool(right.any()):
        for group, matrix in enumerate(total):  # without a second matrix of this size
            matrix.addr_(left[group], right_sum[group] - count * right[group]).addr_(left_sum[group], right[group])
