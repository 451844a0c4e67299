"""Text tables by pandas: read in pieces of rows, and with one type for each column of the file."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from iobs.data.encoding import Column
from iobs.errors import DataError

if TYPE_CHECKING:
    from pandas import DataFrame

_FIELDS = 1 << 22  # entries of a piece in a wide table: pandas holds the text of a whole piece
_FEWEST_ROWS = 1000  # of a piece: each piece has a cost per column


def read_frames(
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
    frame = _joined(pieces)
    written = _joined(again) if uneven else frame
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


def _joined(pieces: list[DataFrame]) -> DataFrame:
    import pandas

    return pandas.concat(pieces, ignore_index=True) if len(pieces) > 1 else pieces[0]
