"""Inner products of layer inputs in float32 or wider; a GPU multiplies 16-bit inputs as they are."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_HALVES = torch.bfloat16, torch.float16
_PROBED = 16  # side of the product that shows whether a device has such products


def prepared(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Inputs in a dtype whose products are exact enough: unchanged where `inner` multiplies 16 bits, else wider.

    The product of two 16-bit numbers is exact in float32. So a GPU's tensor cores, which sum in float32, give what a
    product of float32 gives up to the rounding of its sums, many times as fast.

    Args:
        *inputs: two tensors of `inner`, or one for both.
    """
    dtypes = {one.dtype for one in inputs}
    exact = torch.float32
    for dtype in dtypes:
        exact = torch.promote_types(exact, dtype)
    short = len(dtypes) == 1 and sums_in_float32(inputs[0].device, inputs[0].dtype)
    return inputs if short else tuple(one.to(exact) for one in inputs)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float32 or float64, of `prepared` inputs (groups, count, columns)."""
    if left.dtype in _HALVES:
        return torch.bmm(left.transpose(1, 2), right, out_dtype=torch.float32)
    return left.transpose(1, 2) @ right


@cache
def sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Check that a device multiplies matrices of a 16-bit dtype with sums and results in float32."""
    if dtype not in _HALVES or device.type != "cuda":
        return False
    one = torch.ones(1, _PROBED, _PROBED, device=device, dtype=dtype)
    try:
        return bool((torch.bmm(one, one, out_dtype=torch.float32) == _PROBED).all())
    except Exception:  # an older torch, or a device without such products: each refuses in its own way
        return False
