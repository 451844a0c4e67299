"""Tables on disk as a design matrix with named columns and a target.

Files are CSV, read by pandas where it is installed and the file is not small, Parquet, or .npz.
"""

from __future__ import annotations

import csv
import difflib
import importlib.util
import itertools
import math
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iobs.core.memory import available
from iobs.core.specs import require_table
from iobs.data.encoding import (
    Column,
    ColumnCoding,
    Missing,
    Problems,
    as_text,
    coding_of,
    encoded,
    is_missing,
    numbers_of,
    target_of,
)
from iobs.errors import DataError, listed
from iobs.optimize.objectives.design import Array, Booleans

if TYPE_CHECKING:
    from pandas import DataFrame

Entry: TypeAlias = str | float | None

_CHUNK_ROWS = 50_000
_SAMPLE_ROWS = 1000  # rows read first to estimate how many numbers the file holds
_BYTES = 24  # memory per number while text is read: in pieces, joined, and in the design matrix
_BYTES_AS_TEXT = 120  # the same without pandas, where each number is a string first
# Entries that count as missing, and the values of booleans.
_MISSING = (
    "",
    "NA",
    "N/A",
    "n/a",
    "#N/A",
    "#NA",
    "<NA>",
    "NaN",
    "nan",
    "-nan",
    "NULL",
    "null",
    "None",
    "1.#QNAN",
    "-1.#IND",
)
_TRUTH = {"true": 1.0, "false": 0.0}
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_FIELDS = 1 << 22  # entries of a piece in a wide table: pandas holds the text of a whole piece
_FEWEST_ROWS = 1000  # of a piece: each piece has a cost per column
_SMALL = 2**19  # bytes of a file that is read before pandas would be loaded


@dataclass(frozen=True)
class Table:
    """A design matrix, a target and their names.

    Attributes:
        X: (n, d) float64.
        y: (n,) numbers; class numbers if the target held text.
        names: names of the columns of X.
        classes: the text of each class number; empty for a numeric target.
        codings: how each column of the file became columns of X.
        dropped: number of rows left out because of missing values.
        aside: columns of numbers (n,) that are not in X, such as sample weights, by name.
    """

    X: Array
    y: Array
    names: list[str]
    classes: list[str]
    codings: tuple[ColumnCoding, ...] = ()
    dropped: int = 0
    aside: dict[str, Array] = field(default_factory=dict)


def read_table(
    file: Path,
    target: str,
    drop: Sequence[str] = (),
    *,
    missing: Missing = "error",
    categories: Sequence[str] = (),
    aside: Sequence[str] = (),
    target_classes: bool = False,
) -> Table:
    """Read a table with a header.

    Args:
        file: .csv (also .tsv), .parquet, or .npz with arrays X and y, or with one array per column. Beside X and y
            lie only columns (n,) that an argument names, such as sample weights.
        target: name of the column to be explained; it may hold text.
        drop: names of columns to leave out.
        missing: "error" refuses missing values. "drop" leaves out their rows. "mean" puts the mean of the column, and a
            column of 0 and 1 marks them; in categories they are a level of their own. Both leave out rows without a
            target.
        categories: names of columns of numbers that are categories.
        aside: names of columns of numbers that are not in X but in `Table.aside`; rows that lack one are left out.
        target_classes: whether the target holds classes. False: dates, and text among mostly numbers, are refused.

    Raises:
        DataError: no such file, column or format; two columns of one name; a row longer than the header; columns that
            hold neither numbers nor categories; a file too large for this machine's memory. One error has all problems.
        NonFiniteError: all problems are missing or infinite values.
    """
    text = (*([target] if target else []), *categories)
    columns = read_columns(file, text, (*text, *drop, *aside))
    absent = [name for name in dict.fromkeys((target, *drop, *categories, *aside)) if name not in columns]
    if absent:
        raise DataError(_without(file, absent, list(columns)))
    doubled = [name for name in (target, *categories, *aside) if name in drop]
    doubled += [name for name in aside if name in (target, *categories) or aside.count(name) > 1]
    doubled += [name for name in categories if name == target]
    if doubled:
        raise DataError(f"The column {doubled[0]!r} has two roles; name it in one option, and do not drop it.")
    if len(columns[target]) == 0:
        raise DataError(f"{file} has no rows.")
    columns = {name: values for name, values in columns.items() if name == target or name not in drop}
    if len(columns) == 1:
        raise DataError(f"{file} has no column besides the target {target!r}.")
    columns = {
        name: as_text(values) if name in categories and values.dtype.kind in "fiub" else values
        for name, values in columns.items()
    }
    answers = columns.pop(target)
    if answers.dtype.kind == "O":
        answers = parse_entries(answers.tolist(), False, separator_of(file))
    sides = {name: numbers_of(file, name, columns.pop(name)) for name in aside}
    kept = _complete({**columns, **sides}, answers, missing)
    for values in sides.values():
        kept &= ~is_missing(values)
    columns, answers = {name: values[kept] for name, values in columns.items()}, answers[kept]
    sides = {name: values[kept] for name, values in sides.items()}
    problems = Problems(str(file))
    if not kept.any():
        problems.add("every row has missing values; nothing is left to fit.", gap=True)
        problems.raise_if_any()
    y, classes = target_of(answers, target, problems, target_classes)
    possible = [coding_of(name, values, missing, problems, name in categories) for name, values in columns.items()]
    problems.raise_if_any()
    codings = tuple(coding for coding in possible if coding is not None)
    X, names = encoded(codings, columns, problems)
    problems.raise_if_any()
    if not names:  # all columns are aside, or categories of one level
        raise DataError(f"{file} has no column that could explain {target!r}; add one of more than one value.")
    return Table(X, y, names, classes, codings, int(np.count_nonzero(~kept)), sides)


def _complete(columns: dict[str, Column], answers: Column, missing: Missing) -> Booleans:
    """True for the rows that are used (n,); an empty column is a problem of its own and drops no row."""
    kept = np.ones(len(answers), dtype=np.bool_)
    if missing == "error":
        return kept
    kept &= ~is_missing(answers)
    if missing == "drop":
        for values in columns.values():
            gone = is_missing(values)
            if not gone.all():
                kept &= ~gone
    return kept


def _without(file: Path, absent: list[str], names: list[str]) -> str:
    """The message that columns are not in a file, with the names that are most alike."""
    what = ", ".join(repr(name) for name in absent)
    close = [near for name in absent for near in difflib.get_close_matches(name, names, 1)]
    hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
    return f"{file} has no column {what}; it has: {listed(names, 12)}.{hint}"


# ---- the columns of a file
def read_columns(file: Path, text: Sequence[str] = (), named: Sequence[str] | None = None) -> dict[str, Column]:
    """The columns of a table: float64 (missing: NaN), bool, or text (missing: None).

    Args:
        file: as `read_table`.
        text: names of columns whose entries are kept as written, except for decimal commas.
        named: names of the only arrays that an .npz may have beside X and y; None: columns of any name.

    Raises:
        DataError: as `read_table`.
    """
    require_table(file)
    readers: dict[str, Callable[[Path, Sequence[str]], dict[str, Column]]]
    readers = {".csv": _read_text, ".tsv": _read_text, ".parquet": _read_parquet}
    readers[".npz"] = partial(_read_npz, named=named)
    suffix = file.suffix.lower()
    if suffix not in readers:
        raise DataError(f"Cannot read {file.suffix or 'a file without suffix'}; give a .csv, .parquet or .npz file.")
    columns = readers[suffix](file, text)
    if not columns:
        raise DataError(f"{file} has no columns.")
    return columns


def _refuse_doubles(file: Path, names: Sequence[str]) -> None:
    doubles = [name for name, count in Counter(names).items() if count > 1]
    if doubles:
        raise DataError(f"{file} has several columns of one name: {listed(doubles, 12)}; give each its own.")


def _read_text(file: Path, text: Sequence[str]) -> dict[str, Column]:
    separator = separator_of(file)
    rows = _rows(file, separator)
    header = [name or f"Unnamed: {j}" for j, name in enumerate(next(rows))]
    _refuse_doubles(file, header)
    if file.stat().st_size > _SMALL and importlib.util.find_spec("pandas") is not None:
        _check_memory(file, separator, _BYTES)
        places = {j for j, name in enumerate(header) if name in text}
        arrays = _read_frames(file, separator, len(header), places, _MISSING, _CHUNK_ROWS)
        if arrays is not None:
            return {
                name: parse_entries(values.tolist(), name in text, separator) if values.dtype.kind in "OUS" else values
                for name, values in zip(header, arrays, strict=True)
            }
    _check_memory(file, separator, _BYTES_AS_TEXT)
    table = list(rows)
    entries: dict[str, list[Entry]] = {name: [row[j] for row in table] for j, name in enumerate(header)}
    return {name: parse_entries(values, name in text, separator) for name, values in entries.items()}


def separator_of(file: Path) -> str:
    """Tab for .tsv; else the comma, unless the first line of a .csv has none outside quotes but semicolons or tabs."""
    if file.suffix.lower() != ".csv":
        return "\t" if file.suffix.lower() == ".tsv" else ","
    with file.open("rb") as handle:
        first = next((line for line in handle if line.strip()), b"")
    plain = re.sub(rb'"[^"]*"', b"", first)
    counts = {separator: plain.count(separator.encode()) for separator in (",", ";", "\t")}
    return "," if counts[","] else max(counts, key=lambda separator: counts[separator])


def parse_entries(values: list[Entry], text: bool, separator: str) -> Column:
    """Entries of a text file; between semicolons, "1,5" is a number, and the category "1.5"."""
    if separator == ";":
        values = [
            value.replace(",", ".") if isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip()) else value
            for value in values
        ]
    if text:
        return np.array([None if _is_missing(value) else str(value) for value in values], dtype=object)
    return _parsed(values)


def _rows(file: Path, separator: str) -> Iterator[list[str]]:
    """Yield the header and the rows, short rows padded with empty entries; blank lines are skipped.

    Raises:
        DataError: a row has more entries than the header; the file is empty or not text.
    """
    width = 0
    try:
        with file.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.reader(handle, delimiter=separator)
            for row in reader:
                if len(row) < 2 and not "".join(row).strip():
                    continue
                width = width or len(row)
                # A separator at the end of a line is ignored.
                if any(not _is_missing(entry) for entry in row[width:]):
                    raise DataError(
                        f"Line {reader.line_num} of {file} has {len(row)} entries under a header of {width} names; "
                        "name every column, and put text that holds the separator in quotes."
                    )
                yield row if len(row) == width else [*row, *[""] * width][:width]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Cannot read {file}: {error}; save it as text in UTF-8.") from error
    if not width:
        raise DataError(f"Cannot read {file}: it is empty.")


def _read_parquet(file: Path, text: Sequence[str]) -> dict[str, Column]:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError("Reading Parquet needs pyarrow: pip install pyarrow, or save the table as .csv or .npz.")
    from pyarrow import parquet, types

    try:
        table = parquet.read_table(file)
    except (ValueError, OSError) as error:
        raise DataError(f"Cannot read {file}: {error}.") from error
    _refuse_doubles(file, table.column_names)
    columns = zip(table.column_names, table.columns, strict=True)
    # pyarrow gives a missing entry of an encoded column the last value of its dictionary.
    plain = {
        name: data.cast(data.type.value_type) if types.is_dictionary(data.type) else data for name, data in columns
    }
    return {name: _plain(data.to_numpy(), name in text) for name, data in plain.items()}


def _read_npz(file: Path, text: Sequence[str], named: Sequence[str] | None) -> dict[str, Column]:
    arrays = _read_arrays(file) if named is None else _read_arrays(file, text[0], named)
    return {name: _plain(values, name in text) for name, values in arrays.items()}


def _check_memory(file: Path, separator: str, size: int) -> None:
    """Refuse a file whose numbers would not fit in memory, estimated from its first rows before the rest is read.

    Raises:
        DataError: the file needs more memory than is free.
    """
    with file.open("rb") as handle:
        sample = list(itertools.islice(handle, _SAMPLE_ROWS + 1))[1:]
    read = sum(map(len, sample))
    if not read:
        return
    numbers = sum(line.count(separator.encode()) + 1 for line in sample) * file.stat().st_size // read
    needed, free = size * numbers, _free_memory()
    if needed > free:
        raise DataError(
            f"{file} would need about {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free; "
            "save it as .npz with float32 arrays or as Parquet, or leave rows or columns out of the file."
        )


def _free_memory() -> int:
    """Bytes available without swapping; where the system does not say, all of its memory, on Windows no limit."""
    if free := available():
        return free
    return sys.maxsize if sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _plain(values: Column, text: bool) -> Column:
    """Text as numbers where possible unless `text` keeps it as written; any other array unchanged."""
    if values.dtype.kind not in "OUS":
        return values
    entries = [value.decode(errors="replace") if isinstance(value, bytes) else value for value in values.tolist()]
    return parse_entries(entries, text, ",")


def _number(value: str | float) -> float:
    if isinstance(value, str) and "_" in value:  # Python reads 2020_1 as 20201
        raise ValueError(value)
    return float(value)


def _parsed(values: list[Entry]) -> Column:
    """Entries as float64 (missing: NaN), as bool, or as text (missing: None)."""
    try:
        return np.array([np.nan if value is None or _is_missing(value) else _number(value) for value in values])
    except (TypeError, ValueError):
        texts = [None if _is_missing(value) else str(value) for value in values]
    words = [None if text is None else text.lower() for text in texts]
    if {*words} <= {None, *_TRUTH}:
        truth = np.array([np.nan if word is None else _TRUTH[word] for word in words])
        return truth if None in words else truth.astype(bool)
    return np.array(texts, dtype=object)


def _is_missing(value: Entry) -> bool:
    if isinstance(value, str):
        return value.strip() in _MISSING
    return value is None or (isinstance(value, float) and math.isnan(value))


# ---- text tables by pandas: read in pieces of rows, and with one type for each column of the file


def _read_frames(
    file: Path, separator: str, width: int, text: Collection[int], missing: Sequence[str], rows: int
) -> list[Column] | None:
    """The columns in order, or None if pandas finds rows whose length differs from that of the header.

    pandas infers the types of each piece by itself. A column of numbers in one piece and text in another would be "7"
    in the first and "007" in the second, so such a column is read once more as text.

    Args:
        file: text with a header.
        separator: between entries.
        width: number of columns.
        text: numbers of the columns whose entries are kept as written.
        missing: entries that count as missing.
        rows: most rows of a piece.

    Raises:
        DataError: the file is not text in UTF-8.
    """
    import pandas

    rows = min(rows, max(_FEWEST_ROWS, _FIELDS // width))
    try:
        with warnings.catch_warnings():
            # Where all rows are longer than the header, pandas only warns that it cuts them.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            pieces = _pieces(file, separator, width, range(width), text, missing, rows)
            uneven = [j for j in range(width) if _kinds(pieces, j) > 1]
            if uneven:
                pieces = [piece.drop(columns=uneven) for piece in pieces]
                again = _pieces(file, separator, width, uneven, uneven, missing, rows)
    except (pandas.errors.ParserError, pandas.errors.ParserWarning):
        return None
    except UnicodeDecodeError as error:
        raise DataError(f"Cannot read {file}: {error}; save it as text in UTF-8.") from error
    frame = _concatenate(pieces)
    written = _concatenate(again) if uneven else frame
    return [(written if j in uneven else frame)[j].to_numpy() for j in range(width)]


def _pieces(
    file: Path,
    separator: str,
    width: int,
    columns: Sequence[int],
    text: Collection[int],
    missing: Sequence[str],
    rows: int,
) -> list[DataFrame]:
    import pandas

    return list(
        pandas.read_csv(
            file,
            sep=separator,
            header=0,
            names=range(width),
            usecols=None if len(columns) == width else columns,  # given, longer rows would be cut without a word
            index_col=False,  # otherwise the first entries of longer rows become row names
            dtype=dict.fromkeys(text, str),
            keep_default_na=False,
            na_values=missing,
            chunksize=rows,
            low_memory=False,  # otherwise the types are inferred for parts of a piece
            encoding="utf-8-sig",
        )
    )


def _kinds(pieces: list[DataFrame], column: int) -> int:
    """The number of kinds of a column in its pieces: numbers, booleans, anything else; empty pieces do not count."""
    kinds = set()
    for piece in pieces:
        kind = piece[column].dtype.kind
        if kind != "f" or piece[column].notna().any():
            kinds.add("number" if kind in "iuf" else "boolean" if kind == "b" else "other")
    return len(kinds)


def _concatenate(pieces: list[DataFrame]) -> DataFrame:
    import pandas

    return pandas.concat(pieces, ignore_index=True) if len(pieces) > 1 else pieces[0]


# ---- .npz files: a matrix X with arrays beside it, or one array for each column


def _read_arrays(file: Path, target: str | None = None, named: Collection[str] = ()) -> dict[str, Column]:
    """The columns of an .npz file, as they are stored; those of a matrix X are x0, x1, ...

    Args:
        file: with arrays X (n, d) and y (n,), or with one array (n,) for each column.
        target: name of the column to be explained. None: the columns are for predictions, so that y may be absent, and
            arrays beside X that are no column are ignored.
        named: names of the only arrays that may be beside X.

    Raises:
        DataError: the file is damaged; the arrays differ in length; an array beside X has no use or the name of a
            column of X; the target is none of the arrays.
    """
    try:
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except MemoryError:
        raise
    except Exception as error:  # zipfile, zlib and numpy's parser raise a dozen exception types for a damaged file
        raise DataError(f"Cannot read {file}: {error}; save it again with numpy.savez.") from error
    if "X" in arrays and arrays["X"].ndim == 2 and ("y" in arrays or target is None):
        X = arrays.pop("X")
        columns = {f"x{j}": X[:, j] for j in range(X.shape[1])}
        if target is None:
            arrays = {name: array for name, array in arrays.items() if array.shape == X.shape[:1]}
        else:
            arrays = _beside_matrix(file, target, columns, arrays, named)
        if doubles := columns.keys() & arrays.keys():
            raise DataError(
                f"{file} holds an array {min(doubles)!r} beside X; rename it, since a column of X has that name."
            )
        arrays = {**columns, **arrays}
    if len({array.shape for array in arrays.values()}) != 1 or next(iter(arrays.values())).ndim != 1:
        raise DataError(f"{file} must hold X (n, d) and y (n,), or one array of equal length a column.")
    return arrays


def _beside_matrix(
    file: Path, target: str, columns: Collection[str], arrays: dict[str, Column], named: Collection[str]
) -> dict[str, Column]:
    """The arrays beside X of a fit: the target, and those with a use; y is left out if another is the target."""
    if target not in arrays:
        what = "names a column of X" if target in columns else "is no array of it"
        raise DataError(f"{file} holds X and y, and {target!r} {what}: leave --target out, and y is explained.")
    arrays = {name: array for name, array in arrays.items() if name == target or name != "y"}
    if unnamed := [name for name in arrays if name not in (target, *named)]:
        raise DataError(
            f"{file} holds X and y, and also {listed(unnamed)}, which would not be used: give it a use, as that of "
            f"sample weights, leave it out (--drop {unnamed[0]}), or save the file without it."
        )
    return arrays
