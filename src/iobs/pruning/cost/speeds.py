"""Measured speeds of this machine: products, entrywise work and copies to the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from iobs.core.modes import full_precision
from iobs.pruning.calibration.moments import sums_in_float32
from iobs.pruning.cost.loads import Rates

_SIDE = 1024  # of a product whose speed is measured
_WIDER = 2  # times as wide on a GPU, which mostly waits during shorter products
_ENTRIES = 2**22  # of an entrywise sum whose speed is measured
_COPIED = 2**26  # bytes of a copy whose speed is measured
_CALLS = 3  # of which the fastest is the measured one: other programs make single calls look longer


@full_precision()
def measured_rates(device: torch.device, dtype: torch.dtype, locked: bool = True) -> Rates:
    """Speeds of products, of entrywise work and of copies to the device, measured in about a second.

    Args:
        device: of the computations.
        dtype: of the blocks in memory.
        locked: copies come from page-locked memory, if the device is a GPU.
    """
    single = speed(device)
    total, part = (torch.zeros(_ENTRIES, device=device, dtype=one) for one in (torch.float64, torch.float32))
    memory = 20 * _ENTRIES / least_seconds(lambda: total.add_(part)[0])  # float32 read, float64 read and written
    product = single if dtype is torch.float32 else speed(device, dtype)
    inner = product if sums_in_float32(device, dtype) else None
    return Rates(product, single, copy_speed(device, locked), speed(device, torch.float64), memory, inner)


def speed(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Measured floating-point operations per second of a product: multiplications and additions."""
    side = _SIDE if device.type == "cpu" or dtype is torch.float64 else _WIDER * _SIDE  # few are fast in float64
    left, right = (torch.ones(rows * side, 2 * side, device=device, dtype=dtype) for rows in (1, 2))
    return 8 * float(side) ** 3 / least_seconds(lambda: (left @ right)[0, 0])


def copy_speed(device: torch.device, locked: bool = True) -> float:
    """Measured bytes per second of a copy from main memory, page-locked for a GPU or not, to the device."""
    locked = locked and device.type == "cuda" and torch.cuda.is_available()
    moved = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=locked).zero_()
    return _COPIED / least_seconds(lambda: moved.to(device, copy=True)[0])


def least_seconds(call: Callable[[], torch.Tensor]) -> float:
    """Seconds of the fastest of some calls, after one that initialises libraries and memory.

    Args:
        call: returns one number, whose value is read to wait for the device.
    """
    float(call())
    seconds = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        float(call())
        seconds.append(time.perf_counter() - began)
    return min(seconds)
