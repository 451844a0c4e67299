"""Floating numbers without loss in fewer bits: their exponents by a Huffman code, signs and mantissas as they are.

Trained weights have few magnitudes: an exponent of 8 bits needs about 2.7, so bfloat16 takes 10.7 bits (Zhang et al.,
"70% Size, 100% Accuracy", arXiv 2504.11651).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iobs.core.slices import slices

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of a dtype, by its bytes
_LEVEL, _WINDOW, _MEMORY = 6, 15, 9  # zlib's
_PART = 2**16  # numbers that are turned at once: they stay in the cache


def words_of(tensor: Tensor) -> Tensor:
    """Flat integer view of the bits of a tensor. Only +0.0 maps to 0, so -0.0 and NaN count as values."""
    return tensor.contiguous().flatten().view(WORDS[tensor.element_size()])


def huffman(parts: Iterable[bytes | memoryview]) -> bytes:
    """Bytes, in parts that follow each other, by a Huffman code, which `zlib.decompress` reads."""
    code = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    return b"".join([*map(code.compress, parts), code.flush()])


def inflated(code: bytes | memoryview, most: int) -> bytes:
    """The bytes of which zlib made a code; no memory is taken for more of them than there may be.

    Args:
        code: the code, such as of `huffman`.
        most: bytes that it may have.

    Raises:
        ValueError: it has more, or the code is cut.
        zlib.error: the code is damaged.
    """
    reader = zlib.decompressobj()
    data = reader.decompress(code, most + 1)
    if len(data) > most or not reader.eof:
        raise ValueError("a code has more bytes than it may, or is cut")
    return data


def encode(words: Tensor, masked: bool = False) -> tuple[bytes, memoryview]:
    """The code of the exponents of some numbers, and all other bits.

    Args:
        words: (numbers,) of `words_of`, on the processor.
        masked: leave out the words that are 0.
    """
    size, numbers = words.element_size(), words.numpy().view(f"u{words.element_size()}")
    rest = np.empty((int(words.count_nonzero()) if masked else len(numbers), size - 1), np.uint8)

    def last_bytes() -> Iterator[bytes]:
        stop = 0
        for part in slices(numbers.shape, _PART):
            kept = numbers[part][numbers[part] != 0] if masked else numbers[part]
            rows = _turned(kept, 1).view(np.uint8).reshape(-1, size)
            start, stop = stop, stop + len(rows)
            rest[start:stop] = rows[:, :-1]
            yield rows[:, -1].tobytes()

    return huffman(last_bytes()), rest.reshape(-1).data


def decode(code: bytes | memoryview, rest: bytes | memoryview, count: int, dtype: torch.dtype) -> Tensor:
    """The numbers (count,) of a dtype, as `words_of` has them, of the result of `encode`.

    Raises:
        ValueError: the bytes have another count.
        zlib.error: the code is damaged.
    """
    size = dtype.itemsize
    last = np.frombuffer(inflated(code, count), np.uint8).reshape(count)
    others = np.frombuffer(rest, np.uint8).reshape(count, size - 1)
    words = np.empty(count, f"u{size}")
    for part in slices(last.shape, _PART):
        rows = np.empty((len(last[part]), size), np.uint8)
        rows[:, -1], rows[:, :-1] = last[part], others[part]
        words[part] = _turned(rows.reshape(-1).view(f"<u{size}"), 8 * size - 1)
    return torch.from_numpy(words.view(f"i{size}" if size > 1 else np.uint8))


def bits(tensor: Tensor) -> int:
    """Bits of a floating tensor in this form."""
    return 8 * sum(map(len, encode(words_of(tensor.detach().cpu()))))


def half_of(tensor: Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The dtype of 16 bits that a wider floating tensor is rounded to: `dtype`, and for vectors the nearer one.

    The weights of norms count at every position. In bfloat16, with its 8 bits, those of MiniLM cost as much as all of
    its matrices at 8 bits a weight, in float16 a seventh (LOG.md). Exponents of bfloat16 take fewer bits, so matrices
    stay in it.
    """
    if dtype != torch.bfloat16 or tensor.ndim > 1:
        return dtype
    tensor = tensor.detach()

    def error(half: torch.dtype) -> float:
        return float((tensor.to(half).double() - tensor.double()).square().sum())

    return torch.float16 if error(torch.float16) < error(dtype) else dtype  # infinite where float16 overflows


def _turned(words: NDArray[np.generic], places: int) -> NDArray[np.generic]:
    """Little-endian words whose bits are turned left: by one, the sign is the last bit and exponents the first byte."""
    size = words.dtype.itemsize
    unsigned = words.astype(f"<u{size}", copy=False)
    turned: NDArray[np.generic] = (unsigned << places) | (unsigned >> (8 * size - places))
    return turned
