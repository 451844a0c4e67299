"""A packed tensor: bytes that stand for a tensor without loss, in the shortest of three forms.

    head     mark (8 bytes); form, dtype and number of dimensions as uint8; the shape as uint32
    body     by form
    sum      CRC-32 of all before it

Bodies, all numbers little-endian:

    integers   the entropy codes of the matrices of a tensor (`entropy_code`), of weights that are integers times steps
    grid       layout, bits, dtypes of products and of scales, and whether there is a mask, as uint8; group and bytes of
               scales as uint32; scales of 16 bits, compressed by zlib; the mask; the entropy code of their multiples
    mask       a bit for each entry that is not +0.0, and those entries
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from iobs.core.grids import codes_and_scales, over_columns
from iobs.core.integers import Integers, looks_coded, matrices_of
from iobs.core.patterns import Grid
from iobs.errors import ModelError, PatternError
from iobs.models import entropy_code
from iobs.models.weights import DTYPES, Entry

MARK = b"\x8fiobs\r\n\x01"
MOST_HEAD = 64  # bytes that hold every head
_INTEGERS, _GRID, _MASK = range(3)
_HEAD, _GRID_HEAD, _SUM = struct.Struct("<8s3B"), struct.Struct("<5B2I"), struct.Struct("<I")
_MOST_DIMENSIONS = (MOST_HEAD - _HEAD.size) // 4
_DTYPES = [*DTYPES.values()]  # their places are the numbers in files: new ones go to the end
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GROUPS = (256, 128, 64, 32, 16)  # of columns with one scale that are looked for, beside whole rows
_TRIED_ROWS = 64  # of all, before the whole matrix
_FEW_ROWS = 4  # in which magnitudes are counted
_MANY, _ROW = 0.85, 256  # share of entries that are not zero, below which a mask is tried; width of its entries
_COARSE, _FINEST = 4, 8  # bits of grids: finer ones take long to try, and are not where integers were found
_MOST_DISTINCT = 0.88  # share of the magnitudes of a group that differ, above which it is on no grid


def pack_tensor(tensor: Tensor) -> bytes | None:
    """The bytes of a tensor; None if no form is shorter than the tensor."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.ndim > _MOST_DIMENSIONS:
        return None
    mask = _words(tensor) != 0
    kept = int(mask.sum())
    most = min(tensor.nbytes, len(mask) // 8 + kept * tensor.element_size())
    wide = kept and tensor.element_size() > 1  # torch cannot say the signs of floats of 8 bits
    encoded = _coded(tensor) if wide and not bool((tensor == 0).logical_and(tensor.signbit()).any()) else None
    if encoded is None or len(encoded[1]) > most:
        values = _words(tensor)[mask].numpy().tobytes()
        encoded = _MASK, np.packbits(mask.numpy(), bitorder="little").tobytes() + values
    form, body = encoded
    head = _HEAD.pack(MARK, form, _DTYPES.index(tensor.dtype), tensor.ndim)
    whole = head + struct.pack(f"<{tensor.ndim}I", *tensor.shape) + body
    whole += _SUM.pack(zlib.crc32(whole))
    return whole if len(whole) < tensor.nbytes else None


def is_packed_tensor(tensor: Tensor) -> bool:
    """True if a tensor of a file holds the bytes of a packed one."""
    return tensor.dtype is torch.uint8 and tensor.ndim == 1 and bytes(tensor[: len(MARK)].tolist()) == MARK


def has_codes(data: bytes) -> bool:
    """True if the bytes of a tensor are integers or on a grid."""
    return data[len(MARK)] != _MASK


def unpack_tensor(data: bytes, name: str) -> Tensor:
    """The tensor of some bytes.

    Args:
        data: of `pack_tensor`.
        name: of the tensor, for errors.

    Raises:
        ModelError: they are truncated or changed.
    """
    entry, form, body = _opened(data, name)
    try:
        tensor = {_INTEGERS: _of_integers, _GRID: _of_grid, _MASK: _of_mask}[form](body, name, entry)
        return tensor.reshape(entry.shape)
    except (KeyError, ValueError, RuntimeError, struct.error, zlib.error, IndexError) as error:
        raise _damaged(name) from error


def entry_of(head: bytes, name: str) -> Entry:
    """The dtype and the shape of a packed tensor, from its first bytes.

    Raises:
        ModelError: it is no packed tensor.
    """
    try:
        mark, _, dtype, dimensions = _HEAD.unpack_from(head)
        shape = struct.unpack_from(f"<{dimensions}I", head, _HEAD.size)
        if mark != MARK:
            raise ValueError("another mark")
        return Entry(_DTYPES[dtype], shape)
    except (struct.error, IndexError, ValueError) as error:
        raise _damaged(name) from error


def parts_of(data: bytes, name: str) -> dict[str, int]:
    """Bytes of the parts of a packed tensor; their sum is that of all bytes.

    Raises:
        ModelError: it is truncated or changed.
    """
    entry, form, body = _opened(data, name)
    rest, mask = len(data) - len(body), (math.prod(entry.shape) + 7) // 8
    if form == _MASK:
        if len(body) < mask:
            raise _damaged(name)
        return {"masks": mask, "values": len(body) - mask, "heads and sums": rest}
    of_grid: dict[str, int] = {}
    if form == _GRID:
        *_, masked, _, scales = _GRID_HEAD.unpack_from(body)
        of_grid = {"scales of grids": scales, "masks": mask if masked else 0}
        rest += _GRID_HEAD.size
        body = body[_GRID_HEAD.size + sum(of_grid.values()) :]
    entries, parts = entropy_code.parts(body)
    if not of_grid and entries != math.prod(entry.shape):
        raise _damaged(name)
    parts["heads and sums"] += rest
    return parts | of_grid


def _opened(data: bytes, name: str) -> tuple[Entry, int, bytes]:
    """Entry, form and body of checked bytes."""
    entry, (sum_of,) = entry_of(data, name), _SUM.unpack(data[-_SUM.size :])
    if zlib.crc32(data[: -_SUM.size]) != sum_of:
        raise _damaged(name)
    return entry, data[len(MARK)], data[_HEAD.size + 4 * len(entry.shape) : -_SUM.size]


def _damaged(name: str) -> ModelError:
    return ModelError(f"The packed tensor {name!r} is truncated or damaged; copy or pack it again.")


def _words(tensor: Tensor) -> Tensor:
    """Flat integer view of the bits of a tensor. Only +0.0 maps to 0, so -0.0 and NaN count as values."""
    return tensor.contiguous().flatten().view(_WORDS[tensor.element_size()])


# ---- Forms


def _coded(tensor: Tensor) -> tuple[int, bytes] | None:
    """The form and the shorter body of a tensor of integers times steps, or on a grid; None for others."""
    ways = []
    if looks_coded(tensor):
        candidates = ([Integers.of(matrix) for matrix in matrices] for matrices in matrices_of(tensor))
        ways = [[matrix for matrix in way if matrix is not None] for way in candidates if all(way)]
    shortest = min(ways, key=lambda way: sum(matrix.bits() for matrix in way), default=None)
    bits = math.inf if shortest is None else sum(matrix.bits() for matrix in shortest)
    body = _grid_body(tensor, _FINEST if bits > _FINEST * int(tensor.count_nonzero()) else _COARSE)
    if shortest is not None and (body is None or bits < 8 * len(body)):
        return _INTEGERS, b"".join(map(entropy_code.encode, shortest))
    return None if body is None else (_GRID, body)


def _of_integers(body: bytes, name: str, entry: Entry) -> Tensor:
    matrices = [matrix.weight(entry.dtype).flatten() for matrix in entropy_code.decode(body, repr(name))]
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _of_mask(body: bytes, name: str, entry: Entry) -> Tensor:
    count = math.prod(entry.shape)
    size = (count + 7) // 8
    chosen = torch.from_numpy(np.unpackbits(np.frombuffer(body, np.uint8, size), count=count, bitorder="little"))
    words = torch.zeros(count, dtype=_WORDS[entry.dtype.itemsize])
    values = torch.frombuffer(bytearray(body[size:]), dtype=words.dtype) if len(body) > size else words[:0]
    if int(chosen.sum()) != len(values):
        raise _damaged(name)
    words[chosen.bool()] = values
    return words.view(entry.dtype)


def _layouts(tensor: Tensor) -> list[Tensor]:
    """Ways to read a tensor as a matrix whose rows are divided into groups: as it is; rows of experts; transposed."""
    stacked = tensor.ndim in (2, 3)
    turned = [tensor.flatten(0, -2), tensor.transpose(-1, -2).flatten(0, -2)] if stacked else []
    return [tensor.flatten(1), *turned]


def _grid_body(tensor: Tensor, most_bits: int) -> bytes | None:
    """The body of a tensor on a grid; None if it is on none of those that are looked for."""
    if tensor.ndim < 2 or tensor.dtype.itemsize < 2:
        return None
    for layout, matrix in enumerate(_layouts(tensor)):
        if layout == 1 and tensor.ndim == 2:  # the same as the first
            continue
        for grid in _grids(matrix, most_bits):
            try:
                # Columns of small integers times a step are on a grid, but not all columns.
                codes_and_scales(matrix[:: -(-len(matrix) // _TRIED_ROWS)], grid)
                codes, scales = codes_and_scales(matrix, grid)
            except PatternError:
                continue
            body = _written(tensor, layout, grid, codes, scales)
            if body is not None:
                return body
    return None


def _grids(matrix: Tensor, most_bits: int) -> Iterator[Grid]:
    """Grids that the first rows of a matrix may lie on, by the number of magnitudes in their groups; few bits first."""
    columns, few, magnitudes = matrix.shape[1], matrix[:_FEW_ROWS].abs(), {}
    for group in (columns, *(size for size in _GROUPS if size < columns)):
        tables = few[:, : columns // group * group].reshape(-1, group).sort(1).values
        changes = (tables[:, 1:] != tables[:, :-1]).sum(1) + (tables[:, 0] != 0)  # magnitudes that are not zero
        if float(changes.float().mean()) <= _MOST_DISTINCT * group:
            magnitudes[group] = int(changes.max())
    for bits in range(2, most_bits + 1):
        yield from (Grid(bits, group) for group, most in magnitudes.items() if most < 2 ** (bits - 1))


def _written(tensor: Tensor, layout: int, grid: Grid, codes: Tensor, scales: Tensor) -> bytes | None:
    """The body of a tensor on a grid, if its products in some dtype, and scales in 16 bits, are exact."""
    halves = (torch.bfloat16, torch.float16)
    half = next((dtype for dtype in halves if torch.equal(scales.to(dtype).float(), scales)), None)
    matrix = _layouts(tensor)[layout]
    if half is None:
        return None
    for products in (tensor.dtype, *halves):
        if torch.equal(_product(codes, scales, grid, products).to(tensor.dtype), matrix):
            planes = scales.to(half).view(torch.uint8).reshape(-1, 2).T.contiguous().numpy().tobytes()
            packed, mask = zlib.compress(planes, 9), codes.flatten() != 0
            body, masked = _multiples(codes), 0
            if int(mask.sum()) < _MANY * len(mask):
                bits = np.packbits(mask.numpy(), bitorder="little").tobytes()
                kept = bits + _multiples(_in_rows(codes.flatten()[mask]))
                body, masked = (kept, 1) if len(kept) < len(body) else (body, 0)
            numbers = layout, grid.bits, _DTYPES.index(products), _DTYPES.index(half), masked, grid.group, len(packed)
            return _GRID_HEAD.pack(*numbers) + packed + body
    return None


def _multiples(codes: Tensor) -> bytes:
    return entropy_code.encode(Integers(codes.to(torch.int32), torch.ones(codes.shape[1]), torch.ones(len(codes))))


def _in_rows(codes: Tensor) -> Tensor:
    """Numbers as a matrix, filled up by zeros: it has classes for rows and columns."""
    return torch.nn.functional.pad(codes, (0, -len(codes) % _ROW)).reshape(-1, _ROW)


def _of_grid(body: bytes, name: str, entry: Entry) -> Tensor:
    layout, bits, products, half, masked, group, size = _GRID_HEAD.unpack_from(body)
    scales, body = body[_GRID_HEAD.size : _GRID_HEAD.size + size], body[_GRID_HEAD.size + size :]
    matrix = _layouts(torch.empty(entry.shape, device="meta"))[layout]
    mask_bytes = (matrix.numel() + 7) // 8 if masked else 0
    (integers,) = entropy_code.decode(body[mask_bytes:], repr(name))
    codes = integers.codes
    if masked:
        codes = torch.zeros(matrix.shape, dtype=torch.int32)
        mask = np.unpackbits(np.frombuffer(body, np.uint8, mask_bytes), count=codes.numel(), bitorder="little")
        chosen = torch.from_numpy(mask).bool().reshape(codes.shape)
        codes[chosen] = integers.codes.flatten()[: int(chosen.sum())]
    planes = torch.frombuffer(bytearray(zlib.decompress(scales)), dtype=torch.uint8).reshape(2, -1).T.contiguous()
    steps = planes.view(_DTYPES[half]).float().reshape(len(codes), -1)
    dense = _product(codes, steps, Grid(bits, group), _DTYPES[products]).to(entry.dtype)
    return dense if layout < 2 else dense.reshape(*entry.shape[:-2], entry.shape[-1], -1).transpose(-1, -2)


def _product(codes: Tensor, scales: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Multiples of scales, rounded to a dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(wide) * over_columns(scales, grid, codes.shape[1]).to(wide)).to(dtype)
