"""Pairs of texts with a number that says how alike they are, as tests of embedding models have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from iobs.data.tables import read_columns
from iobs.errors import DataError, listed

SUFFIXES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class PairSource:
    """Labelled pairs of texts.

    Attributes:
        name: of the source.
        pairs: two texts each.
        labels: one number for each pair; the order of these numbers is what counts.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    labels: tuple[float, ...]


def read_pairs(file: Path, name: str) -> PairSource:
    """Read a table with a header, two columns of text and one of numbers; rows with a missing entry are left out.

    Raises:
        DataError: the file cannot be read, has other columns, or fewer than three whole rows.
    """
    columns = read_columns(file)
    texts = [values for values in columns.values() if values.dtype.kind == "O"]
    numbers = [values for values in columns.values() if values.dtype.kind in "biuf"]
    if len(texts) != 2 or len(numbers) != 1:
        raise DataError(
            f"{file} has the columns {listed([*columns])}; pairs of texts are two columns of text and one of numbers, "
            "such as sentence1, sentence2 and score."
        )
    rows = [
        (str(first), str(second), float(label))
        for first, second, label in zip(*texts, *numbers, strict=True)
        if first is not None and second is not None and label == label
    ]
    if len(rows) < 3:
        raise DataError(f"{file} has {len(rows)} whole rows; a rank correlation needs three pairs at least.")
    return PairSource(name, tuple((first, second) for first, second, _ in rows), tuple(label for *_, label in rows))
