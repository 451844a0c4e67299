"""Tables on disk as a design matrix with named columns and a target."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from iobs.data.encoding import (
    Coding,
    Column,
    Missing,
    Problems,
    as_text,
    coding_of,
    encoded,
    is_missing,
    numbers_of,
    target_of,
)
from iobs.data.table_files import parse_entries, read_columns, separator_of
from iobs.errors import DataError, listed
from iobs.optimize.objectives.design import Array, Booleans


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
    codings: tuple[Coding, ...] = ()
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
