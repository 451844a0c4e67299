"""The product of a stored matrix with activations, by the fastest form that this CPU has."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iobs.inference import cpu
from iobs.inference.formats import BLOCK, StoredMatrix, blocks_of

_MOST_TOKENS: dict[cpu.Level, int] = {"avx512": 16, "avx2": 8, "none": 0}  # more are multiplied by torch
# Tokens of one call of a kernel: sums of integers take registers beside the sums of their scaled values.
_LARGEST_TILE: dict[cpu.Level, dict[bool, int]] = {"avx512": {True: 8, False: 16}, "avx2": {True: 4, False: 8}}
# Formats whose kernels read the even activations of each 32 before the odd ones.
_INTERLEAVED: dict[cpu.Level, tuple[str, ...]] = {"avx512": ("bf16", "bitmask-bf16"), "avx2": ("bf16",)}
_TILE_ROWS = 512  # rows that are unpacked at a time


class StoredProduct:
    """Multiplies activations by one stored matrix.

    Args:
        matrix: the stored matrix; one of unknown origin must pass `formats.require_valid` first.
        level: instruction set; "none" uses torch alone.
        threads: number of threads that share the rows.
        most_tokens: more tokens are multiplied by torch, with rows that are unpacked for the moment. None: 16 with
            AVX-512, 8 with AVX2.
    """

    def __init__(
        self,
        matrix: StoredMatrix,
        level: cpu.Level | None = None,
        threads: int = 1,
        most_tokens: int | None = None,
    ) -> None:
        self.matrix, self.threads = matrix, threads
        self.level = cpu.level() if level is None else level
        self.most_tokens = _MOST_TOKENS[self.level] if most_tokens is None else most_tokens
        name = matrix.format.replace("-", "_")
        self._kernel, self._unpack = _kernel(self.level, name), _kernel(self.level, f"unpack_{name}")
        if self._kernel is not None or self._unpack is not None:
            self._addresses, self._kept = addresses_of(matrix, self.level)

    def __call__(self, inputs: Tensor) -> Tensor:
        """The product (tokens, rows), in the dtype of the activations.

        Args:
            inputs: activations (tokens, columns), of any floating dtype, on the CPU.
        """
        count = inputs.shape[0]
        if self._kernel is None or not 0 < count <= self.most_tokens:
            return self._by_torch(inputs)
        outputs = np.empty((count, self.matrix.rows), np.float32)
        values = inputs.detach().float().contiguous().numpy()
        step = _LARGEST_TILE[self.level][self.matrix.quantised]
        for start in range(0, count, step):
            self._by_kernel(values[start : start + step], outputs[start : start + step])
        return torch.from_numpy(outputs).to(inputs.dtype)

    def _by_torch(self, inputs: Tensor) -> Tensor:
        """Multiply by unpacked rows, some at a time, in the dtype of the activations."""
        outputs = inputs.new_empty(len(inputs), self.matrix.rows)
        for first in range(0, self.matrix.rows, _TILE_ROWS):
            last = min(first + _TILE_ROWS, self.matrix.rows)
            outputs[:, first:last] = inputs @ self.dense(first, last).to(inputs.dtype).t()
        return outputs

    def dense(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` as float32, (last - first, columns)."""
        if self._unpack is None:
            return self.matrix.to_dense(first, last)
        rows = torch.empty(last - first, self.matrix.blocks * BLOCK)
        self._unpack(self._addresses, rows.data_ptr(), first, last)
        return rows[:, : self.matrix.columns]

    def _by_kernel(self, values: NDArray[np.float32], outputs: NDArray[np.float32]) -> None:
        """Write the products of some tokens, at most as many as one call of a kernel takes.

        Args:
            values: activations (tokens, columns).
            outputs: the result (tokens, rows).
        """
        from iobs.inference import activations

        count = len(values)
        size, sums = _tile(count), outputs
        wide, signed = self.matrix.blocks * BLOCK, self.level == "avx2"
        if self.matrix.quantised:
            codes, scales = np.empty((size, wide), np.uint8), np.empty(count, np.float32)
            activations.rounded(values, codes, scales, 0 if signed else 128)
            layout: NDArray[np.uint8] | NDArray[np.float32] = codes
        else:
            layout = reals = np.empty((size, wide), np.float32)
            interleaved = self.matrix.format in _INTERLEAVED[self.level]
            (activations.even_then_odd if interleaved else activations.filled)(values, reals)
        if size > count:  # a kernel exists for 1, 2, 4, 8 and 16 tokens: the others are zero
            layout[count:] = 0
            sums = np.empty((size, self.matrix.rows), np.float32)
        place, stride = layout.ctypes.data, layout.strides[0]
        self._shared(tuple(range(place, place + size * stride, stride)), sums)
        if size > count:
            outputs[:] = sums[:count]
        if self.matrix.quantised:
            activations.scaled(outputs, scales, self.matrix.tensors["corrections"].numpy(), signed)

    def _shared(self, tokens: tuple[int, ...], sums: NDArray[np.float32]) -> None:
        """Compute the rows of some tokens by the kernel, in equal parts for the threads."""
        assert self._kernel is not None
        kernel, place, stride = self._kernel, sums.ctypes.data, sums.strides[0]
        rows = self.matrix.rows
        if self.threads == 1:
            kernel(self._addresses, tokens, place, stride, 0, rows)
            return
        bounds = [rows * part // self.threads for part in range(self.threads + 1)]
        arguments = self._addresses, tokens, place, stride
        others = [_pool(self.threads - 1).submit(kernel, *arguments, *part) for part in pairwise(bounds[1:])]
        kernel(*arguments, 0, bounds[1])
        for other in others:
            other.result()


def _tile(count: int) -> int:
    """The number of tokens of the smallest kernel that takes `count` tokens."""
    return 1 << (count - 1).bit_length()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that sleep between products. The pools of numba and torch spin, and would take each other's time."""
    return ThreadPoolExecutor(threads, thread_name_prefix="iobs-product")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads


def _kernel(level: cpu.Level, name: str) -> Callable[..., None] | None:
    """The kernel of a name, such as `bitmask_int8` or `unpack_int8`; None if the instruction set has none."""
    return None if level == "none" else getattr(importlib.import_module(f"iobs.inference.kernels_{level}"), name, None)


class Addresses(NamedTuple):
    """Addresses of the tensors of a stored matrix (0 where the format has none), and its number of blocks."""

    mask: int
    values: int
    starts: int
    scales: int
    corrections: int
    levels: int
    indices: int
    blocks: int


def addresses_of(matrix: StoredMatrix, level: cpu.Level) -> tuple[Addresses, list[Tensor | NDArray[np.uint8]]]:
    """The addresses of the tensors of a matrix, and the tensors and tables that must live as long."""
    tensors = matrix.tensors
    kept: list[Tensor | NDArray[np.uint8]] = [*tensors.values()]
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    levels = 0
    if level == "avx2" and matrix.format.startswith("bitmask"):
        table = _table(matrix.quantised)
        if "levels" in tensors:  # behind the table
            table = aligned(np.concatenate([table, tensors["levels"].numpy().view(np.uint8)]))
        kept.append(table)
        levels = table.ctypes.data
    elif "levels" in tensors:
        four = tensors["levels"].repeat(4)
        kept.append(four)
        levels = four.data_ptr()
    at = {name: places.get(name, 0) for name in ("mask", "values", "starts", "scales", "corrections", "indices")}
    return Addresses(levels=levels, blocks=blocks_of(matrix.columns), **at), kept


@cache
def _table(of_bytes: bool) -> NDArray[np.uint8]:
    """The table of AVX2 kernels, at an address that is a multiple of 64."""
    from iobs.inference import kernels_avx2

    table = kernels_avx2.table_of_bytes() if of_bytes else kernels_avx2.table_of_bfloats()
    return aligned(table.reshape(-1))


def aligned(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy of bytes at an address that is a multiple of 64."""
    room = np.zeros(values.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + values.size]
    copy[:] = values
    return copy
