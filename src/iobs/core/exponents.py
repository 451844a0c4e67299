"""Floating numbers without loss in fewer bits: their exponents by a Huffman code, signs and mantissas as they are.

Trained weights have few magnitudes: an exponent of 8 bits needs about 2.7, so bfloat16 takes 10.7 bits (Zhang et al.,
"70% Size, 100% Accuracy", arXiv 2504.11651).
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of a dtype, by its bytes
_LEVEL, _WINDOW, _MEMORY = 6, 15, 9  # zlib's


def words_of(tensor: Tensor) -> Tensor:
    """Flat integer view of the bits of a tensor. Only +0.0 maps to 0, so -0.0 and NaN count as values."""
    return tensor.contiguous().flatten().view(WORDS[tensor.element_size()])


def huffman(data: bytes) -> bytes:
    """Bytes by a Huffman code, which `zlib.decompress` reads."""
    code = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    return code.compress(data) + code.flush()


def inflated(code: bytes, most: int) -> bytes:
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


def encode(words: Tensor) -> tuple[bytes, bytes]:
    """The code of the exponents of some numbers, and all other bits.

    Args:
        words: (numbers,) of `words_of`, on the processor.
    """
    size = words.element_size()
    turned = _turned(words.numpy(), 1)
    rows = turned.view(np.uint8).reshape(-1, size)
    return huffman(rows[:, -1].tobytes()), rows[:, :-1].tobytes()


def decode(code: bytes, rest: bytes, count: int, dtype: torch.dtype) -> Tensor:
    """The numbers (count,) of a dtype, as `words_of` has them, of the result of `encode`.

    Raises:
        ValueError: the bytes have another count.
        zlib.error: the code is damaged.
    """
    size = dtype.itemsize
    last = np.frombuffer(inflated(code, count), np.uint8).reshape(count, 1)
    rows = np.concatenate([np.frombuffer(rest, np.uint8).reshape(count, size - 1), last], 1)
    words = _turned(rows.reshape(-1).view(f"<u{size}"), 8 * size - 1)
    return torch.from_numpy(words.view(f"i{size}" if size > 1 else np.uint8))


def bits(tensor: Tensor) -> int:
    """Bits of a floating tensor in this form."""
    return 8 * sum(map(len, encode(words_of(tensor.detach().cpu()))))


def _turned(words: NDArray[np.generic], places: int) -> NDArray[np.generic]:
    """Little-endian words whose bits are turned left: by one, the sign is the last bit and exponents the first byte."""
    size = words.dtype.itemsize
    unsigned = words.view(f"u{size}").astype(f"<u{size}", copy=False)
    turned: NDArray[np.generic] = unsigned << places
    turned |= unsigned >> (8 * size - places)  # type: ignore[misc]  # in place: matrices are large
    return turned
