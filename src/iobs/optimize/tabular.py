"""Tables on disk as a design matrix with named columns: CSV, Parquet and .npz."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from iobs.errors import DataError, NonFiniteError
from iobs.optimize.designs import Array

_CHUNK_ROWS = 50_000
_SAMPLE_ROWS = 1000  # read first, to tell from them how many numbers the file holds
_BYTES = 24  # a number while text is read: in pieces, joined, and in the design matrix
_BYTES_AS_TEXT = 120  # and without pandas, where each is a string first


@dataclass(frozen=True)
class Table:
    """A design matrix, a target and their names.

    Attributes:
        X: (n, d) float64.
        y: (n,), numbers, or class numbers where the target held text.
        names: of the columns of X.
        classes: what class numbers stand for; empty for a numeric target.
    """

    X: Array
    y: Array
    names: list[str]
    classes: list[str]


def read_table(file: Path, target: str, drop: Sequence[str] = ()) -> Table:
    """Read a table with a header.

    Args:
        file: .csv (also .tsv), .parquet, or .npz with arrays X and y, or with one array a column.
        target: name of the column to be explained; it may hold text.
        drop: names of columns to leave out.

    Raises:
        DataError: no such file, column or format; a column of text; a file too large for this machine's memory.
        NonFiniteError: missing or infinite values.
    """
    if not file.is_file():
        raise DataError(f"There is no file {file}; give a .csv, .parquet or .npz file.")
    readers = {".csv": _read_text, ".tsv": _read_text, ".parquet": _read_parquet, ".npz": _read_npz}
    if file.suffix not in readers:
        raise DataError(f"Cannot read {file.suffix or 'a file without suffix'}; give a .csv, .parquet or .npz file.")
    columns = readers[file.suffix](file, target)
    missing = [name for name in (target, *drop) if name not in columns]
    if missing:
        raise DataError(f"{file} has no column {missing[0]!r}; it has: {_some(list(columns))}.")
    answer, classes = _target(columns.pop(target), target)
    for name in drop:
        if name != target:
            del columns[name]
    if not columns:
        raise DataError(f"{file} has no column besides the target {target!r}.")
    return Table(_matrix(columns), answer, list(columns), classes)


def _matrix(columns: dict[str, Any]) -> Array:
    for name, values in columns.items():
        if values.dtype.kind in "OUS":
            text = next((value for value in values.tolist() if not _is_number(value)), "")
            raise DataError(
                f"Column {name!r} holds text such as {str(text)!r}; leave it out with --drop {name}, "
                "or turn it into numbers (one column of 0 and 1 a value)."
            )
    matrix = np.empty((len(next(iter(columns.values()))), len(columns)))
    for j, (name, values) in enumerate(columns.items()):
        matrix[:, j] = values
        if not np.isfinite(matrix[:, j]).all():
            row = int(np.flatnonzero(~np.isfinite(matrix[:, j]))[0])
            raise NonFiniteError(
                f"Column {name!r} is missing or infinite in row {row + 1}; fill it in, "
                f"or leave it out with --drop {name}."
            )
    return matrix


def _target(values: Any, name: str) -> tuple[Array, list[str]]:
    if values.dtype.kind in "OUSb":
        classes, numbers = np.unique(values.astype(str), return_inverse=True)
        if classes.size < 2:
            raise DataError(f"The target {name!r} is {classes[0]!r} everywhere; there is nothing to tell apart.")
        return numbers.astype(np.float64), [str(value) for value in classes]
    answer = np.asarray(values, dtype=np.float64)
    if not np.isfinite(answer).all():
        raise NonFiniteError(f"The target {name!r} is missing or infinite in some rows; remove those rows first.")
    return answer, []


def _read_text(file: Path, target: str) -> dict[str, Any]:
    separator = "\t" if file.suffix == ".tsv" else ","
    pandas = importlib.util.find_spec("pandas") is not None
    _check_memory(file, separator, _BYTES if pandas else _BYTES_AS_TEXT)
    if pandas:
        return _read_with_pandas(file, separator)
    with file.open(newline="", encoding="utf-8-sig") as handle:
        rows = csv.reader(handle, delimiter=separator)
        header = next(rows, None)
        if header is None:
            raise DataError(f"{file} is empty.")
        table = list(rows)
    if any(len(row) != len(header) for row in table) or not table:
        raise DataError(f"{file} has no rows, or rows of different lengths, under a header of {len(header)} names.")
    return {name: _numbers_if_possible([row[j] for row in table]) for j, name in enumerate(header)}


def _read_with_pandas(file: Path, separator: str) -> dict[str, Any]:
    import pandas

    try:
        frames = list(pandas.read_csv(file, sep=separator, chunksize=_CHUNK_ROWS, encoding="utf-8-sig"))
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {file}: {error}.") from error
    frame = pandas.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
    if len(frame) == 0:
        raise DataError(f"{file} has a header but no rows.")
    return {str(name): _plain(frame[name].to_numpy()) for name in frame.columns}


def _read_parquet(file: Path, target: str) -> dict[str, Any]:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError("Reading Parquet needs pyarrow: pip install pyarrow, or save the table as .csv or .npz.")
    from pyarrow import parquet

    table = parquet.read_table(file)
    return {name: _plain(table.column(name).to_numpy()) for name in table.column_names}


def _read_npz(file: Path, target: str) -> dict[str, Any]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError) as error:
        raise DataError(f"Cannot read {file}: {error}.") from error
    if "X" in arrays and "y" in arrays and arrays["X"].ndim == 2:
        columns = {f"x{j}": arrays["X"][:, j] for j in range(arrays["X"].shape[1])}
        columns[target] = arrays["y"]
        arrays = columns
    if len({array.shape for array in arrays.values()}) != 1 or next(iter(arrays.values())).ndim != 1:
        raise DataError(f"{file} must hold X (n, d) and y (n,), or one array of equal length a column.")
    return arrays


def _check_memory(file: Path, separator: str, size: int) -> None:
    """Refuse a file whose numbers would not fit, judged by its first rows, before any more of it is read."""
    with file.open("rb") as handle:
        sample = list(itertools.islice(handle, _SAMPLE_ROWS + 1))[1:]
    read = sum(map(len, sample))
    if not read:
        return
    numbers = sum(line.count(separator.encode()) + 1 for line in sample) * file.stat().st_size // read
    needed, available = size * numbers, _available_memory()
    if needed > available:
        raise DataError(
            f"{file} would need about {needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are free; "
            "save it as .npz with float32 arrays or as Parquet, or leave rows or columns out of the file."
        )


def _available_memory() -> int:
    """Bytes that can be had without swapping: with the file cache, which gives way."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _plain(values: Any) -> Any:
    return values.astype(bool) if values.dtype.kind == "b" else _numbers_if_possible(values.tolist(), values)


def _numbers_if_possible(values: list[Any], array: Any = None) -> Any:
    if array is not None and array.dtype.kind in "fiu":
        return array
    try:
        return np.array([np.nan if value in ("", None) else float(value) for value in values])
    except (TypeError, ValueError):
        return np.array([str(value) for value in values])


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
