"""Formats that store a sparse matrix for products with few vectors, and their plain form in torch.

| format       | stores                                                                        |
|--------------|-------------------------------------------------------------------------------|
| bf16         | every entry in bfloat16                                                       |
| int8         | every entry in int8, a scale for every 128 columns of a row                   |
| bitmask-bf16 | a bit for every entry, the non-zero entries in bfloat16                       |
| bitmask-int8 | a bit for every entry, the non-zero entries in int8, scales as above          |
| bitmask-int4 | a bit for every entry, 4-bit codes of a table of 16 levels, scales as above   |
| index-bf16   | a 16-bit column and a bfloat16 value for every non-zero entry                 |

Columns are filled up to a multiple of 64 with zeros. A bit of the mask belongs to column 64 * block + bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from iobs.core.grids import codes_and_scales
from iobs.core.patterns import Grid
from iobs.errors import ModelError, PatternError, ProblemError

FormatName = Literal["bf16", "int8", "bitmask-bf16", "bitmask-int8", "bitmask-int4", "index-bf16"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
GROUP = 128  # columns that share a scale
BLOCK = 64  # columns of a word of the mask
PADDING = 64  # bytes behind the values: kernels read whole registers
MOST_COLUMNS = 1 << 16  # of a 16-bit index
_INDEX_STEP = 16  # entries of a row are a multiple of this
_ENTRIES = {"bf16": torch.bfloat16, "int8": torch.int8}  # dtypes of the formats that store every entry
_BITS = {"bf16": 16, "int8": 8, "int4": 4}  # of a stored value
_ONES = np.array([number.bit_count() for number in range(256)], np.uint8)  # set bits of a byte
_STEP = 18  # level of one step of a grid: 7 steps are 126
_EVEN = (torch.arange(-7, 9).clamp(max=7) * _STEP).to(torch.int8)  # levels of a grid
_LEVELS, _FITTED, _ROUNDS = 16, 200_000, 30  # levels of a 4-bit code, weights that the levels are fitted to, rounds


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in one of the formats.

    Args:
        format: name of the format.
        rows: number of rows.
        columns: number of columns.
        tensors: the contents, on the CPU. "mask": int64 (rows, blocks). "values": uint8, one dimension. "starts": int64
            (rows + 1), the first byte of each row in "values". "scales": bfloat16 (rows, groups). "corrections":
            float32 (rows), 128 times the sum of the row. "levels": int8 (16). "indices": int16, bits of uint16.
    """

    format: FormatName
    rows: int
    columns: int
    tensors: dict[str, Tensor]

    @property
    def blocks(self) -> int:
        """Words of the mask in a row."""
        return blocks_of(self.columns)

    @property
    def bytes(self) -> int:
        """Bytes of all contents."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def quantised(self) -> bool:
        """True if activations are rounded to 8 bits in a product."""
        return self.format in ("int8", "bitmask-int8", "bitmask-int4")

    def to_dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows `first` to `last` as a float32 matrix, (last - first, columns): the plain form of every kernel."""
        last = self.rows if last is None else last
        count, wide = last - first, self.blocks * BLOCK
        tensors = self.tensors
        if self.format == "index-bf16":
            return self._from_indices(first, last)
        if self.format in _ENTRIES:
            return self._entries(slice(first, last))
        mask = self._mask(first, last)
        begin, end = int(tensors["starts"][first]), int(tensors["starts"][last])
        stored = tensors["values"][begin:end]
        dense = torch.zeros(count, wide)
        if self.format == "bitmask-bf16":
            dense[mask] = stored.view(torch.bfloat16).float()
            return dense[:, : self.columns].contiguous()
        if self.format == "bitmask-int8":
            dense[mask] = stored.view(torch.int8).float()
        else:
            dense[mask] = tensors["levels"].float()[self._codes(mask, stored)]
        return self._scaled(dense, first, last)

    def rows_of(self, numbers: Tensor) -> Tensor:
        """Some rows as float32, (count, columns).

        Args:
            numbers: int64 (count), numbers of rows.

        Raises:
            IndexError: a number is negative or too large, as in `nn.Embedding`.
        """
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.rows:
            raise IndexError(f"A row number lies outside of 0 to {self.rows - 1}.")
        if self.format in _ENTRIES:
            return self._entries(numbers)
        different, places = torch.unique(numbers, return_inverse=True)
        if not len(different):
            return torch.zeros(0, self.columns)
        return torch.cat([self.to_dense(row, row + 1) for row in different.tolist()])[places]

    def _entries(self, rows: slice | Tensor) -> Tensor:
        """Some rows of a format that stores every entry, as float32."""
        whole = self.tensors["values"][:-PADDING].view(_ENTRIES[self.format]).view(self.rows, -1)
        entries = whole[rows].float()
        entries = _scaled(entries, self.tensors["scales"][rows]) if self.quantised else entries
        return entries[:, : self.columns]

    def _mask(self, first: int, last: int) -> Tensor:
        """The mask of some rows, (last - first, filled columns)."""
        words = self.tensors["mask"][first:last].contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(words, axis=1, bitorder="little")
        return torch.from_numpy(bits).bool()

    def _scaled(self, codes: Tensor, first: int, last: int) -> Tensor:
        return _scaled(codes, self.tensors["scales"][first:last])[:, : self.columns]

    def _codes(self, mask: Tensor, stored: Tensor) -> Tensor:
        """The 4-bit codes of the set bits, in order."""
        place, _ = _half_bytes(mask)
        both = stored[place // 2]
        return torch.where(place % 2 == 0, both & 15, both >> 4).long()

    def _from_indices(self, first: int, last: int) -> Tensor:
        starts = self.tensors["starts"][first : last + 1] // 2
        begin, end = int(starts[0]), int(starts[-1])
        values = self.tensors["values"][2 * begin : 2 * end].view(torch.bfloat16).float()
        columns = self.tensors["indices"][begin:end].long() & 0xFFFF
        row = torch.repeat_interleave(torch.arange(last - first), starts.diff())
        dense = torch.zeros(last - first, self.columns)
        return dense.index_put_((row, columns), values, accumulate=True)  # fillers add zero


def _scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes (rows, filled columns) times the scales (rows, groups) of their groups; the last group may be half."""
    return codes * scales.float().repeat_interleave(GROUP, 1)[:, : codes.shape[1]]


def blocks_of(columns: int) -> int:
    """Words of the mask for a row with this number of columns."""
    return -(-columns // BLOCK)


def groups_of(blocks: int) -> int:
    """Scales of a row with this number of words; the last group may have one word only."""
    return -(-blocks * BLOCK // GROUP)


def bytes_of(name: FormatName, rows: int, columns: int, nonzeros: int) -> int:
    """Bytes of a matrix in a format, without storing it; the fillers of rows and blocks are left out.

    Args:
        name: the format.
        rows: number of rows.
        columns: number of columns.
        nonzeros: number of entries that are not zero.
    """
    filled = rows * blocks_of(columns) * BLOCK
    if name == "index-bf16":
        return 4 * nonzeros + 8 * rows
    bits = _BITS[name.removeprefix("bitmask-")]
    values = filled // 8 + nonzeros * bits // 8 + 8 * rows if name.startswith("bitmask") else filled * bits // 8
    scales = 0 if bits == _BITS["bf16"] else (2 * groups_of(blocks_of(columns)) + 4) * rows
    return values + scales


def store(weight: Tensor, name: FormatName) -> StoredMatrix:
    """Convert a matrix to a format. Entries that round to zero become zero.

    Args:
        weight: (rows, columns), any floating dtype.
        name: the format.

    Raises:
        ProblemError: the weight is no finite matrix, or has too many columns for the format.
    """
    if weight.ndim != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise ProblemError(f"a stored matrix needs a floating matrix with rows and columns, got {tuple(weight.shape)}.")
    if name not in FORMATS:
        raise ProblemError(f"There is no format {name!r}; give one of {', '.join(FORMATS)}.")
    dense = weight.detach().cpu().float().contiguous()
    if not torch.isfinite(dense).all():
        raise ProblemError("The weight holds NaN or infinite entries; a stored matrix needs finite ones.")
    if name == "index-bf16":
        return _indexed(dense)
    wide = torch.zeros(len(dense), blocks_of(dense.shape[1]) * BLOCK)
    wide[:, : dense.shape[1]] = dense
    tensors = _bfloats(wide, name) if name.endswith("bf16") else _integers(wide, name)
    return StoredMatrix(name, weight.shape[0], weight.shape[1], tensors)


def _bytes(values: Tensor) -> Tensor:
    """The bytes of a tensor, with padding behind."""
    flat = values.contiguous().flatten().view(torch.uint8)
    return torch.cat([flat, flat.new_zeros(PADDING)])


def _words(mask: Tensor) -> Tensor:
    """A boolean matrix as words of 64 bits, (rows, blocks)."""
    return torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little").view(np.int64))


def _starts(counts: Tensor) -> Tensor:
    """The first byte of each row, and the end of the last."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).long()


def _bfloats(wide: Tensor, name: FormatName) -> dict[str, Tensor]:
    values = wide.to(torch.bfloat16)
    if name == "bf16":
        return {"values": _bytes(values)}
    mask = values != 0
    return {"mask": _words(mask), "values": _bytes(values[mask]), "starts": _starts(2 * mask.sum(1))}


def _integers(wide: Tensor, name: FormatName) -> dict[str, Tensor]:
    grouped = _grouped(wide)
    largest = grouped.abs().amax(2)
    # Scales are rounded up to bfloat16, so that no code exceeds 127.
    scales = (largest / 127 * 1.004).to(torch.bfloat16)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    steps = steps_of_grid(wide) if name == "bitmask-int4" else None
    if steps is not None:
        scales = (steps / _STEP).to(torch.bfloat16)
    ratio = (grouped / scales.float()[..., None]).view(len(wide), -1)[:, : wide.shape[1]]
    if name == "bitmask-int4":
        return _four_bits(wide, ratio, scales, _EVEN if steps is not None else fitted_levels(ratio[wide != 0]))
    codes = ratio.round().clamp(-127, 127)
    tensors = {"scales": scales, "corrections": _corrections(codes, scales)}
    if name == "int8":
        return {**tensors, "values": _bytes(codes.to(torch.int8))}
    mask = codes != 0
    return {
        **tensors,
        "mask": _words(mask),
        "values": _bytes(codes[mask].to(torch.int8)),
        "starts": _starts(mask.sum(1)),
    }


def _grouped(wide: Tensor) -> Tensor:
    """Filled rows in groups, (rows, groups, 128), the last one filled up with zeros."""
    return torch.nn.functional.pad(wide, (0, -wide.shape[1] % GROUP)).view(len(wide), -1, GROUP)


def _corrections(codes: Tensor, scales: Tensor) -> Tensor:
    """128 times the sum of each row: kernels add 128 to activations, which makes them unsigned."""
    return (128 * (_grouped(codes).double().sum(2) * scales.double()).sum(1)).float()


def steps_of_grid(wide: Tensor) -> Tensor | None:
    """Steps of a matrix whose values lie on a grid of four bits, (rows, groups); None for other matrices."""
    grid = Grid(4, GROUP)
    try:
        return codes_and_scales(wide, grid)[1]
    except PatternError:
        return None


def _four_bits(wide: Tensor, ratio: Tensor, scales: Tensor, levels: Tensor) -> dict[str, Tensor]:
    mask = wide != 0
    middles = (levels[1:].float() + levels[:-1].float()) / 2
    codes = torch.bucketize(ratio.contiguous(), middles).to(torch.uint8)
    place, sizes = _half_bytes(mask)
    halves = torch.zeros(2 * int(sizes.sum()), dtype=torch.uint8)
    halves[place] = codes[mask]
    rounded = torch.where(mask, levels.float()[codes.long()], torch.zeros(()))
    return {
        "mask": _words(mask),
        "values": _bytes(halves[::2] | (halves[1::2] << 4)),
        "starts": _starts(sizes.view(len(wide), -1).sum(1)),
        "scales": scales,
        "corrections": _corrections(rounded, scales),
        "levels": levels,
    }


def _half_bytes(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the codes of set bits, in half bytes, and the bytes of each block: it begins with a new byte."""
    blocks = mask.view(-1, BLOCK)
    sizes = (blocks.sum(1) + 1) // 2
    return (2 * (sizes.cumsum(0) - sizes)[:, None] + blocks.cumsum(1) - 1)[blocks], sizes


def fitted_levels(values: Tensor) -> Tensor:
    """16 ascending int8 levels with a low mean squared distance to the values (Lloyd's algorithm).

    Args:
        values: float32, one dimension, in units of the scales; at most 200,000 of them are used.
    """
    if not len(values):
        return torch.arange(-_LEVELS // 2, _LEVELS // 2, dtype=torch.int8)
    values = values[:: max(1, len(values) // _FITTED)].sort().values
    shares = (torch.arange(_LEVELS) + 0.5) / _LEVELS
    levels = values[(shares * len(values)).long()]
    sums = torch.cat([values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)])
    for _ in range(_ROUNDS):
        ends = torch.searchsorted(values, (levels[1:] + levels[:-1]) / 2)
        bounds = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), len(values))])
        counts = bounds.diff()
        means = (sums[bounds[1:]] - sums[bounds[:-1]]) / counts.clamp(min=1)
        levels = torch.where(counts > 0, means.float(), levels).sort().values
    return levels.round().clamp(-127, 127).to(torch.int8)


def _indexed(dense: Tensor) -> StoredMatrix:
    if dense.shape[1] > MOST_COLUMNS:
        raise ProblemError(f"index-bf16 holds at most {MOST_COLUMNS} columns, got {dense.shape[1]}.")
    values = dense.to(torch.bfloat16)
    mask = values != 0
    counts = mask.sum(1)
    padded = -(-counts // _INDEX_STEP) * _INDEX_STEP
    starts = _starts(padded)
    row, column = mask.nonzero(as_tuple=True)
    place = starts[row] + torch.arange(len(row)) - _starts(counts)[row]
    stored = torch.zeros(int(starts[-1]), dtype=torch.bfloat16)
    columns = torch.zeros(int(starts[-1]), dtype=torch.int32)
    stored[place], columns[place] = values[mask], column.int()
    indices = torch.cat([columns.to(torch.int16), torch.zeros(PADDING // 2, dtype=torch.int16)])
    tensors = {"values": _bytes(stored), "starts": 2 * starts, "indices": indices}
    return StoredMatrix("index-bf16", dense.shape[0], dense.shape[1], tensors)


def require_valid(matrix: StoredMatrix) -> None:
    """Raise unless a matrix of unknown origin is sound, so that no kernel reads outside its tensors.

    Raises:
        ModelError: a tensor is missing, has another shape or dtype, or the parts do not agree.
    """

    def require(holds: object, what: str) -> None:
        if not holds:
            raise ModelError(f"The stored matrix is damaged ({what}); store it again.")

    rows, blocks, tensors = matrix.rows, matrix.blocks, matrix.tensors
    indexed = matrix.format == "index-bf16" and matrix.columns > MOST_COLUMNS
    require(matrix.format in FORMATS and rows > 0 and matrix.columns > 0 and not indexed, "its format or shape")
    masked = matrix.format.startswith("bitmask")
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...] | None]] = {"values": (torch.uint8, None)}
    shapes |= {"starts": (torch.int64, (rows + 1,))} if masked or matrix.format == "index-bf16" else {}
    if masked:
        shapes["mask"] = (torch.int64, (rows, blocks))
    if matrix.quantised:
        shapes["scales"] = (torch.bfloat16, (rows, groups_of(blocks)))
        shapes["corrections"] = (torch.float32, (rows,))
    if matrix.format == "bitmask-int4":
        shapes["levels"] = (torch.int8, (_LEVELS,))
    if matrix.format == "index-bf16":
        shapes["indices"] = (torch.int16, None)
    require(set(tensors) == set(shapes), "its parts")
    for name, (dtype, shape) in shapes.items():
        tensor = tensors[name]
        fits = tensor.ndim == 1 if shape is None else tuple(tensor.shape) == shape
        require(tensor.dtype == dtype and fits and tensor.is_contiguous() and tensor.device.type == "cpu", name)
    length = len(tensors["values"]) - PADDING
    if "starts" not in shapes:
        require(length == rows * blocks * BLOCK * _ENTRIES[matrix.format].itemsize, "values")
        return
    starts = tensors["starts"]
    inside = bool(((starts >= 0) & (starts <= length)).all())  # else differences could overflow
    require(inside and starts[0] == 0 and starts[-1] == length and bool((starts.diff() >= 0).all()), "starts")
    if masked:
        words = tensors["mask"].numpy().view(np.uint8).reshape(rows, blocks, 8)
        counts = torch.from_numpy(_ONES[words].sum(2, dtype=np.int64))
        sizes = (counts + 1) // 2 if matrix.format == "bitmask-int4" else counts
        sizes = 2 * sizes if matrix.format == "bitmask-bf16" else sizes
        require(torch.equal(sizes.sum(1), starts.diff()), "the mask and the starts")
        return
    require(bool((starts % (2 * _INDEX_STEP) == 0).all()), "starts")
    require(2 * (len(tensors["indices"]) - PADDING // 2) == length, "indices")
    columns = tensors["indices"].long() & 0xFFFF
    require(int(columns.max()) < matrix.columns, "indices")
    entries = tensors["values"][:length].view(torch.int16) != 0  # of the bits, as in kernels: -0.0 is no filler
    row = torch.repeat_interleave(torch.arange(rows), starts.diff() // 2)
    places = (row * MOST_COLUMNS + columns[: length // 2])[entries]
    require(bool((places.diff() > 0).all()), "indices")  # the columns of a row ascend
