"""A packed tensor: bytes that stand for a tensor without loss, in the shortest of its forms.

    head     mark (8 bytes); form, dtype and number of dimensions as uint8; the shape as uint32
    body     by form
    sum      CRC-32 of all before it

Bodies, all numbers little-endian:

    integers   the entropy codes of the matrices of a tensor (`entropy_code`), of weights that are integers times steps
    grid       layout, bits, dtypes of products and of scales, and the form of the mask, as uint8; group and bytes of
               scales as uint32; scales of 16 bits, compressed by zlib; the mask; the entropy code of their multiples
    values     the form of the mask, as uint8; bytes of the code of exponents, as uint64; the mask; the code of the
               exponents of the entries that have a bit, or of all without a mask; their other bits
    mask       of files of version 1: the mask as bits, and the entries that have a bit

A mask has a bit for each entry that is not +0.0. Forms: 0 none; 1 these bits; 2 their bytes by a Huffman code, behind
their number as uint64. So a mask of 2:4 takes .65 bits an entry, and one of 90 % zeros .47.
"""

from __future__ import annotations

import functools
import math
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from iobs.core import exponents
from iobs.core.exponents import words_of
from iobs.core.grids import codes_and_scales, over_columns
from iobs.core.integers import Integers, looks_coded, matrices_of
from iobs.core.patterns import Grid
from iobs.core.slices import slices
from iobs.errors import ModelError, PatternError
from iobs.models import entropy_code
from iobs.models.weights import DTYPES, Entry

_Body = Sequence[bytes | memoryview]  # parts that follow each other
MARK = b"\x8fiobs\r\n\x01"
MOST_HEAD = 64  # bytes that hold every head
_INTEGERS, _GRID, _MASK, _VALUES = range(4)
_NO_MASK, _BITS, _CODED = range(3)  # forms of masks
_MOST_IN_BYTE = 8  # bytes of which a byte of a Huffman code tells: a longer claim would only take memory
_HEAD, _SUM = struct.Struct("<8s3B"), struct.Struct("<I")
_GRID_HEAD, _VALUES_HEAD, _SIZE = struct.Struct("<5B2I"), struct.Struct("<BQ"), struct.Struct("<Q")
_MOST_DIMENSIONS = (MOST_HEAD - _HEAD.size) // 4
_DTYPES = [*DTYPES.values()]  # their places are the numbers in files: new ones go to the end
_GROUPS = (256, 128, 64, 32, 16)  # of columns with one scale that are looked for, beside whole rows
_TRIED_ROWS = 64  # of all, before the whole matrix
_FEW_ROWS = 4  # in which magnitudes are counted
_MANY, _ROW = 0.85, 256  # share of entries that are not zero, below which a mask is tried; width of its entries
_COARSE, _FINEST = 4, 8  # bits of grids: finer ones take long to try, and are not where integers were found
_MOST_DISTINCT = 0.88  # share of the magnitudes of a group that differ, above which it is on no grid


def pack_tensor(tensor: Tensor) -> bytes | None:
    """The bytes of a tensor; None if no form is shorter than the tensor."""
    return shortest(pack_code(tensor), tensor)


def pack_code(tensor: Tensor) -> bytes | None:
    """The bytes of a tensor of integers times steps, or on a grid; None for others."""
    if not _is_packable(tensor) or tensor.element_size() == 1:  # torch cannot say the signs of floats of 8 bits
        return None
    flat = tensor.flatten()
    parts = (flat[part] for part in slices(flat.shape))
    negative_zeros = any(bool((part == 0).logical_and(part.signbit()).any()) for part in parts)
    code = None if negative_zeros else _coded(tensor)
    return None if code is None else _whole(*code, tensor)


def shortest(code: bytes | None, tensor: Tensor, beside: int = 0) -> bytes | None:
    """The shorter of the code of a tensor, if it has one, and its values; None if the tensor itself is as short.

    Args:
        code: of the tensor.
        tensor: as it would be stored.
        beside: bytes that a packed tensor takes elsewhere.
    """
    forms = [] if code is None else [code]
    # Values take a byte and more, unless there are many zeros.
    if _is_packable(tensor) and (code is None or len(code) > tensor.numel()):
        forms.insert(0, _whole(_VALUES, _values_body(tensor), tensor))
    shorter = min(forms, key=len, default=None)
    return shorter if shorter is not None and len(shorter) + beside < tensor.nbytes else None


def _is_packable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and tensor.ndim <= _MOST_DIMENSIONS


def _whole(form: int, body: _Body, tensor: Tensor) -> bytes:
    """A body with its head and sum."""
    head = _HEAD.pack(MARK, form, _DTYPES.index(tensor.dtype), tensor.ndim)
    parts = [head, struct.pack(f"<{tensor.ndim}I", *tensor.shape), *body]
    return b"".join([*parts, _SUM.pack(functools.reduce(lambda before, part: zlib.crc32(part, before), parts, 0))])


def is_packed_tensor(tensor: Tensor) -> bool:
    """True if a tensor of a file holds the bytes of a packed one."""
    return tensor.dtype is torch.uint8 and tensor.ndim == 1 and bytes(tensor[: len(MARK)].tolist()) == MARK


def unpack_tensor(data: bytes | memoryview, name: str) -> Tensor:
    """The tensor of some bytes.

    Args:
        data: of `pack_tensor`.
        name: of the tensor, for errors.

    Raises:
        ModelError: they are truncated or changed.
    """
    entry, form, body = _opened(data, name)
    try:
        _parts(form, body, entry)  # no memory is taken for a shape that is not true
        read = {_INTEGERS: _of_integers, _GRID: _of_grid, _MASK: _of_mask, _VALUES: _of_values}[form]
        tensor = read(body, name, entry)
        return tensor.reshape(entry.shape)
    except (KeyError, ValueError, RuntimeError, struct.error, zlib.error, IndexError) as error:
        raise _damaged(name) from error


def entry_of(head: bytes | memoryview, name: str) -> Entry:
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


def parts_of(data: bytes | memoryview, name: str) -> dict[str, int]:
    """Bytes of the parts of a packed tensor; their sum is that of all bytes.

    Raises:
        ModelError: it is truncated or changed.
    """
    entry, form, body = _opened(data, name)
    try:
        parts = _parts(form, body, entry)
    except (KeyError, ValueError, struct.error) as error:
        raise _damaged(name) from error
    parts["heads and sums"] += len(data) - len(body)
    return parts


def _parts(form: int, body: memoryview, entry: Entry) -> dict[str, int]:
    """Bytes of the parts of a body, whose sum is its length; raises ValueError if they contradict each other."""
    count, length = math.prod(entry.shape), len(body)
    if form in (_MASK, _VALUES):
        mask_form, code, head = (_BITS, 0, 0) if form == _MASK else (*_VALUES_HEAD.unpack_from(body), _VALUES_HEAD.size)
        mask = _mask_bytes(body[head:], mask_form, count)
        values = len(body) - head - mask
        if mask_form == _NO_MASK and values != code + count * (entry.dtype.itemsize - 1):
            raise ValueError("the values are not as many as the entries")
        if mask_form == _NO_MASK and count > _MOST_IN_BYTE * code:
            raise ValueError("the exponents are not as many as the entries")
        return {"masks": mask, "values": values, "heads and sums": head}
    if form == _GRID:
        *_, mask_form, _, scales = _GRID_HEAD.unpack_from(body)
        body = body[_GRID_HEAD.size + scales :]
        mask = _mask_bytes(body, mask_form, count)
        entries, parts = entropy_code.parts(body[mask:])
        parts["heads and sums"] += _GRID_HEAD.size
        parts |= {"scales of grids": scales, "masks": mask}
        fits = entries == count if mask_form == _NO_MASK else entries < count + _ROW
    else:
        entries, parts = entropy_code.parts(body)
        fits = entries == count
    if not fits or sum(parts.values()) != length:
        raise ValueError("the matrices have other entries than the tensor")
    return parts


def _opened(data: bytes | memoryview, name: str) -> tuple[Entry, int, memoryview]:
    """Entry, form and body of checked bytes."""
    entry, (sum_of,) = entry_of(data, name), _SUM.unpack(data[-_SUM.size :])
    if zlib.crc32(memoryview(data)[: -_SUM.size]) != sum_of:
        raise _damaged(name)
    return entry, data[len(MARK)], memoryview(data)[_HEAD.size + 4 * len(entry.shape) : -_SUM.size]


def _damaged(name: str) -> ModelError:
    return ModelError(f"The packed tensor {name!r} is truncated or damaged; copy or pack it again.")


# ---- Forms


def _coded(tensor: Tensor) -> tuple[int, _Body] | None:
    """The form and the shorter body of a tensor of integers times steps, or on a grid; None for others."""
    ways = map(_integers_body, matrices_of(tensor)) if looks_coded(tensor) else ()
    bits, integers = min(ways, key=lambda way: way[0], default=(math.inf, []))
    grid = _grid_body(tensor, _FINEST if bits > _FINEST * int(tensor.count_nonzero()) else _COARSE)
    if bits < (math.inf if grid is None else 8 * sum(map(len, grid))):
        return _INTEGERS, integers
    return None if grid is None else (_GRID, grid)


def _integers_body(matrices: list[Tensor]) -> tuple[float, _Body]:
    """Counted bits, and the body, of matrices of integers times steps; infinite if one of them is none."""
    bits, body = 0.0, []
    for matrix in matrices:
        integers = Integers.of(matrix)
        if integers is None:
            return math.inf, []
        bits += integers.bits()
        body.append(entropy_code.encode(integers))
    return bits, body


def _of_integers(body: memoryview, name: str, entry: Entry) -> Tensor:
    dense, place = torch.empty(math.prod(entry.shape), dtype=entry.dtype), 0
    for matrix in entropy_code.decode(body, repr(name)):
        part = dense[place : place + matrix.codes.numel()].view(matrix.codes.shape)
        matrix.write(part)
        place += part.numel()
    return dense


def _values_body(tensor: Tensor) -> _Body:
    """The body of a tensor of any values; with a mask if that is shorter."""
    words = words_of(tensor)
    zeros = len(words) - int(words.count_nonzero())
    masked = zeros * max(1, 8 * (words.element_size() - 1)) > len(words)  # bits of zeros that a mask saves
    mask_form, written = _written_mask(words) if masked else (_NO_MASK, b"")
    code, rest = exponents.encode(words, masked)
    return [_VALUES_HEAD.pack(mask_form, len(code)), written, code, rest]


def _of_values(body: memoryview, name: str, entry: Entry) -> Tensor:
    count = math.prod(entry.shape)
    mask_form, size = _VALUES_HEAD.unpack_from(body)
    chosen, body = _mask_of(body[_VALUES_HEAD.size :], mask_form, count)
    kept = count if chosen is None else int(chosen.count_nonzero())
    values = exponents.decode(body[:size], body[size:], kept, entry.dtype)
    return (values if chosen is None else _scattered(values, chosen)).view(entry.dtype)


def _of_mask(body: memoryview, name: str, entry: Entry) -> Tensor:
    chosen, body = _mask_of(body, _BITS, math.prod(entry.shape))
    words = exponents.WORDS[entry.dtype.itemsize]
    values = torch.frombuffer(bytearray(body), dtype=words) if body else torch.empty(0, dtype=words)
    return _scattered(values, chosen).view(entry.dtype)


def _written_mask(words: Tensor) -> tuple[int, bytes]:
    """The shorter form of the mask of words (entries,), and its bytes."""
    parts = ((words[part] != 0).numpy() for part in slices(words.shape))
    bits = b"".join(np.packbits(part, bitorder="little").tobytes() for part in parts)
    code = exponents.huffman([bits])
    return (_CODED, _SIZE.pack(len(code)) + code) if _SIZE.size + len(code) < len(bits) else (_BITS, bits)


def _mask_bytes(body: memoryview, form: int, count: int) -> int:
    """Bytes of a mask of `count` entries, at the beginning of some bytes; raises ValueError if they are too few."""
    if form == _NO_MASK:
        return 0
    size = bits = (count + 7) // 8
    if form == _CODED:
        (code,) = _SIZE.unpack_from(body)
        size, bits = _SIZE.size + int(code), -(-bits // _MOST_IN_BYTE)
    elif form != _BITS:
        raise ValueError("no form of a mask")
    if not bits <= size <= len(body):
        raise ValueError("a mask is cut, or shorter than its entries need")
    return size


def _mask_of(body: memoryview, form: int, count: int) -> tuple[Tensor | None, memoryview]:
    """The mask (count,) at the beginning of some bytes, None if there is none, and the bytes behind it."""
    if form == _NO_MASK:
        return None, body
    size = _mask_bytes(body, form, count)
    written = exponents.inflated(body[_SIZE.size : size], (count + 7) // 8) if form == _CODED else body[:size]
    bits = np.unpackbits(np.frombuffer(written, np.uint8, (count + 7) // 8), count=count, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool), body[size:]


def _scattered(values: Tensor, chosen: Tensor | None) -> Tensor:
    """Values at the places of a mask, and zeros; raises ValueError if they are not as many."""
    if chosen is None or int(chosen.count_nonzero()) != len(values):
        raise ValueError("the values of a mask are not as many as its bits")
    return torch.zeros(len(chosen), dtype=values.dtype).masked_scatter_(chosen, values)


def _laid_out(tensor: Tensor, layout: int) -> Tensor:
    """A tensor as a matrix whose rows are divided into groups: 0 as it is; 1 rows of experts; 2 transposed."""
    return tensor.flatten(1) if layout == 0 else (tensor if layout == 1 else tensor.mT).flatten(0, -2)


def _grid_body(tensor: Tensor, most_bits: int) -> _Body | None:
    """The body of a tensor on a grid; None if it is on none of those that are looked for."""
    if tensor.ndim < 2 or tensor.dtype.itemsize < 2 or not bool(tensor.any()):  # zeros are integers
        return None
    for layout in {2: (0, 2), 3: (0, 1, 2)}.get(tensor.ndim, (0,)):
        matrix = _laid_out(tensor, layout)
        for grid in _grids(matrix, most_bits):
            try:
                # Columns of small integers times a step are on a grid, but not all columns.
                codes_and_scales(matrix[:: -(-len(matrix) // _TRIED_ROWS)], grid)
                codes, scales = codes_and_scales(matrix, grid)
            except PatternError:
                continue
            body = _written(matrix, layout, grid, codes, scales)
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


def _written(matrix: Tensor, layout: int, grid: Grid, codes: Tensor, scales: Tensor) -> _Body | None:
    """The body of a matrix on a grid, if its products in some dtype, and scales in 16 bits, are exact."""
    halves = (torch.bfloat16, torch.float16)
    half = next((dtype for dtype in halves if torch.equal(scales.to(dtype).float(), scales)), None)
    if half is None:
        return None

    def is_product(part: slice, dtype: torch.dtype) -> bool:
        return torch.equal(_product(codes[part], scales[part], grid, dtype).to(matrix.dtype), matrix[part])

    for products in (matrix.dtype, *halves):
        if all(is_product(part, products) for part in slices(matrix.shape)):
            planes = scales.to(half).view(torch.uint8).reshape(-1, 2).T.contiguous().numpy().tobytes()
            packed, flat = zlib.compress(planes, 9), codes.flatten()
            mask_form, mask, multiples = _NO_MASK, b"", _multiples(codes)
            if int(flat.count_nonzero()) < _MANY * len(flat):
                form, bits = _written_mask(flat)
                kept = _multiples(_in_rows(torch.cat([flat[part][flat[part] != 0] for part in slices(flat.shape)])))
                if len(bits) + len(kept) < len(multiples):
                    mask_form, mask, multiples = form, bits, kept
            dtypes = _DTYPES.index(products), _DTYPES.index(half)
            numbers = layout, grid.bits, *dtypes, mask_form, grid.group, len(packed)
            return [_GRID_HEAD.pack(*numbers), packed, mask, multiples]
    return None


def _multiples(codes: Tensor) -> bytes:
    return entropy_code.encode(Integers(codes, torch.ones(codes.shape[1]), torch.ones(len(codes))))


def _in_rows(codes: Tensor) -> Tensor:
    """Numbers as a matrix, filled up by zeros: it has classes for rows and columns."""
    return torch.nn.functional.pad(codes, (0, -len(codes) % _ROW)).reshape(-1, _ROW)


def _of_grid(body: memoryview, name: str, entry: Entry) -> Tensor:
    layout, bits, products, half, mask_form, group, size = _GRID_HEAD.unpack_from(body)
    scales, body = body[_GRID_HEAD.size : _GRID_HEAD.size + size], body[_GRID_HEAD.size + size :]
    matrix = _laid_out(torch.empty(entry.shape, device="meta"), layout)
    chosen, body = _mask_of(body, mask_form, matrix.numel())
    (integers,) = entropy_code.decode(body, repr(name))
    codes = integers.codes
    if chosen is not None:
        codes = _scattered(codes.flatten()[: int(chosen.count_nonzero())], chosen).reshape(matrix.shape)
    planes = torch.frombuffer(bytearray(exponents.inflated(scales, 2 * codes.numel())), dtype=torch.uint8)
    steps = planes.reshape(2, -1).T.contiguous().view(_DTYPES[half]).float().reshape(len(codes), -1)
    dense = torch.empty(matrix.shape, dtype=entry.dtype)
    for part in slices(dense.shape):
        dense[part] = _product(codes[part], steps[part], Grid(bits, group), _DTYPES[products])
    return dense if layout < 2 else dense.reshape(*entry.shape[:-2], entry.shape[-1], -1).transpose(-1, -2)


def _product(codes: Tensor, scales: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Multiples of scales, rounded to a dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(wide) * over_columns(scales, grid, codes.shape[1]).to(wide)).to(dtype)
