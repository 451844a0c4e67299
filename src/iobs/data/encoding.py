"""Columns of a file as columns of a design matrix: numbers, dummy columns of categories, missing values.

All problems of a file are collected and raised together. A category becomes one column of 0 and 1 for each level but
the first in sorted order, the reference level, as by scikit-learn's `OneHotEncoder(drop="first")`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from iobs.core.formats import plural
from iobs.errors import DataError, NonFiniteError
from iobs.optimize.objectives.design import Array, Booleans

Column: TypeAlias = npt.NDArray[Any]  # (n,) float64 (missing: NaN), bool, text (missing: None), or an unfit kind
Missing = Literal["error", "drop", "mean"]

MISSING_LEVEL = "(missing)"
_MOST_LEVELS = 50  # more different texts than this are names or a mistake, not categories
_LARGEST = 1e150  # numbers beyond this cannot be squared
_SHOWN = 5  # rows or texts that a problem names
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}")
# Array kinds that are neither numbers nor text, and what to do about them.
_UNFIT = {
    "M": "dates; give numbers instead, such as days since a date",
    "m": "durations; give numbers instead, such as seconds",
    "c": "complex numbers; give the real and the imaginary part as two columns",
    "V": "records; give each of their fields as a column",
}


@dataclass
class Problems:
    """The problems of a file, raised together."""

    file: str
    texts: list[str] = field(default_factory=list)
    only_gaps: bool = True  # all problems so far are missing or infinite values
    new: bool = False  # the file has new rows for a fitted model, for which there are no options

    def add(self, text: str, *, gap: bool = False) -> None:
        """Add a problem; `gap` says that it is a missing or infinite value."""
        self.texts.append(text)
        self.only_gaps = self.only_gaps and gap

    def raise_if_any(self) -> None:
        """Raise one error with all problems.

        Raises:
            NonFiniteError: all problems are missing or infinite values.
            DataError: there are others.
        """
        if not self.texts:
            return
        kind = NonFiniteError if self.only_gaps else DataError
        if len(self.texts) == 1:
            raise kind(f"{self.file}: {self.texts[0]}")
        lines = "".join(f"\n  {number}. {text}" for number, text in enumerate(self.texts, 1))
        raise kind(f"{self.file} has {len(self.texts)} problems:{lines}")


@dataclass(frozen=True)
class ColumnCoding:
    """Translation of one column of a file into columns of the design.

    Attributes:
        name: of the column.
        levels: of a category, the reference level first; empty for numbers.
        fill: the number that replaces a missing one, which adds a column that marks it; None if none may be missing.
    """

    name: str
    levels: tuple[str, ...] = ()
    fill: float | None = None

    @property
    def names(self) -> list[str]:
        """Names of the columns of the design."""
        if self.levels:
            return [f"{self.name}={level}" for level in self.levels[1:]]
        return [self.name] if self.fill is None else [self.name, f"{self.name} is missing"]

    @property
    def takes_gaps(self) -> bool:
        """True if missing values were part of the training data, and have columns or numbers of their own."""
        return self.fill is not None or MISSING_LEVEL in self.levels

    def apply(self, values: Column, problems: Problems) -> Array:
        """The columns of the design (n, m) for new values; problems are added, and their entries are 0."""
        rows = len(values)
        if values.dtype.kind in _UNFIT:
            problems.add(f"column {self.name!r} holds {_UNFIT[values.dtype.kind]}.")
            return np.zeros((rows, len(self.names)))
        if self.levels:
            return self._dummies(values, problems)
        if values.dtype.kind == "O":
            words = (str(value) for value in values if value is not None and not _is_number(str(value)))
            problems.add(f"column {self.name!r} holds text such as {next(words, '')!r}, and the model needs numbers.")
            return np.zeros((rows, len(self.names)))
        numbers = np.asarray(values, dtype=np.float64)
        gone = np.isnan(numbers)
        if self.fill is None:
            _check_gaps(self.name, values, problems)
            _check_sizes(self.name, numbers, problems)
            return np.nan_to_num(numbers)[:, None]
        _check_sizes(self.name, numbers, problems)
        return np.column_stack([np.where(gone, self.fill, np.nan_to_num(numbers)), gone])

    def _dummies(self, values: Column, problems: Problems) -> Array:
        if values.dtype.kind != "O":
            values = as_text(values)
        gone = is_missing(values)
        if self.takes_gaps:
            values = np.where(gone, MISSING_LEVEL, values)
        else:
            _check_gaps(self.name, values, problems)
        unknown = sorted({str(value) for value in values if value is not None and value not in self.levels})
        if unknown:
            problems.add(
                f"column {self.name!r} has {plural(len(unknown), 'level')} that the model does not know: "
                f"{_some(unknown)}; it knows {_some(list(self.levels))}."
            )
        # A category of a single level has no column.
        return np.asarray(values[:, None] == np.array(self.levels[1:], dtype=object), dtype=np.float64)


def coding_of(
    name: str, values: Column, missing: Missing, problems: Problems, category: bool = False
) -> ColumnCoding | None:
    """The coding of a column of the training data; None if it cannot be used, which adds a problem.

    Args:
        name: of the column.
        values: its entries.
        missing: as `read_table`.
        problems: to add to.
        category: whether the user said that the column holds categories.
    """
    leave = f"leave it out with --drop {shlex.quote(name)}"
    if values.dtype.kind in _UNFIT:
        problems.add(f"column {name!r} holds {_UNFIT[values.dtype.kind]}, or {leave}.")
        return None
    gone = is_missing(values)
    if gone.all():
        problems.add(f"column {name!r} is empty; {leave}.", gap=True)
        return None
    if values.dtype.kind == "O":
        return _category(name, values, missing, problems, category)
    numbers = np.asarray(values, dtype=np.float64)
    if missing == "error":
        _check_gaps(name, values, problems)
    _check_sizes(name, numbers, problems)
    if not gone.any() or missing != "mean":
        return ColumnCoding(name)
    with np.errstate(invalid="ignore", over="ignore"):
        return ColumnCoding(name, (), float(numbers[~gone].mean()))


def _category(name: str, values: Column, missing: Missing, problems: Problems, sure: bool) -> ColumnCoding | None:
    leave = f"leave it out with --drop {shlex.quote(name)}"
    gone = is_missing(values)
    texts = [str(value) for value in values[~gone]]
    levels = sorted(set(texts))
    if not sure and 2 * _dates(texts) > len(texts):
        problems.add(f"column {name!r} holds dates such as {texts[0]!r}; give days since a date, or {leave}.")
    elif not sure and (odd := _among_numbers(values)):
        problems.add(
            f"column {name!r} holds {odd}; correct these entries, give --category {shlex.quote(name)}, or {leave}."
        )
    elif len(levels) > _MOST_LEVELS or (not sure and len(levels) == len(texts) > 2):
        problems.add(
            f"column {name!r} holds text such as {texts[0]!r}, {len(levels):,} different ones in {len(values):,} rows, "
            f"which is no category; {leave}, or turn it into numbers."
        )
    elif missing == "error" and gone.any():
        _check_gaps(name, values, problems)
    else:
        return ColumnCoding(name, (*levels, *([MISSING_LEVEL] if gone.any() and missing == "mean" else [])))
    return None


def _dates(texts: Sequence[str]) -> int:
    """The number of texts that are dates."""
    return sum(_DATE.match(text) is not None for text in texts)


def _among_numbers(values: Column) -> str:
    """The first text of a column whose entries are mostly numbers, and the rows of such texts; "" for other columns."""
    present = np.flatnonzero(~is_missing(values)).tolist()
    odd = [row for row in present if not _is_number(str(values[row]))]
    if not odd or 2 * len(odd) > len(present):
        return ""
    return f"text such as {str(values[odd[0]])!r} among numbers, in {_rows(np.array(odd))}"


def encoded(
    codings: Sequence[ColumnCoding], columns: Mapping[str, Column], problems: Problems
) -> tuple[Array, list[str]]:
    """The design matrix (n, d) float64 and the names of its columns."""
    rows = len(next(iter(columns.values()))) if columns else 0
    parts = [coding.apply(columns[coding.name], problems) for coding in codings]
    matrix = np.column_stack(parts) if parts else np.zeros((rows, 0))
    return matrix, [name for coding in codings for name in coding.names]


def target_of(values: Column, name: str, problems: Problems, sure: bool = False) -> tuple[Array, list[str]]:
    """The target as numbers (n,), and its classes if it holds text; problems are added.

    Args:
        values: its entries.
        name: of the column.
        problems: to add to.
        sure: whether the user said that the target holds classes.
    """
    what = f"target {name!r}"
    if values.dtype.kind in _UNFIT:
        problems.add(f"the {what} holds {_UNFIT[values.dtype.kind]}.")
        return np.zeros(len(values)), []
    if is_missing(values).any():
        _check_gaps(name, values, problems, what)
        return np.zeros(len(values)), []
    if values.dtype.kind not in "Ob":
        _check_sizes(name, np.asarray(values, dtype=np.float64), problems, what)
        return np.asarray(values, dtype=np.float64), []
    texts = values.astype(str)
    classes, numbers = np.unique(texts, return_inverse=True)
    advice = "or give --loss logistic if these are classes"
    if not sure and 2 * _dates(texts.tolist()) > len(texts):
        problems.add(f"the {what} holds dates such as {str(texts[0])!r}; give days since a date, {advice}.")
    elif not sure and values.dtype.kind == "O" and (odd := _among_numbers(values)):
        problems.add(f"the {what} holds {odd}; correct these entries, {advice}.")
    elif classes.size < 2:
        problems.add(f"the {what} is {str(classes[0])!r} everywhere; there is nothing to tell apart.")
    elif classes.size > _MOST_LEVELS:
        problems.add(f"the {what} holds {classes.size:,} different texts such as {str(classes[0])!r}; give numbers.")
    return numbers.astype(np.float64), [str(value) for value in classes]


def is_missing(values: Column) -> Booleans:
    """True where an entry is missing (n,)."""
    if values.dtype.kind == "O":
        return np.array([value is None for value in values], dtype=np.bool_)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=np.bool_)


def as_text(values: Column) -> Column:
    """Entries as text, missing ones as None; whole numbers without a decimal point."""
    gone = is_missing(values)
    texts = [
        None if lost else str(int(value)) if values.dtype.kind == "f" and float(value).is_integer() else str(value)
        for value, lost in zip(values, gone, strict=True)
    ]
    return np.array(texts, dtype=object)


def _check_gaps(name: str, values: Column, problems: Problems, what: str = "") -> None:
    gone = is_missing(values)
    if gone.any():
        place = f"the {what}" if what else f"column {name!r}"
        cure = f"give --missing drop{'' if what else ' or --missing mean'}"
        if problems.new:
            cure = "give --missing drop or --missing mean"
        rows = _rows(np.flatnonzero(gone), gone.size)
        problems.add(f"{place} is missing in {rows}; fill it in, or {cure}.", gap=True)


def _check_sizes(name: str, numbers: Array, problems: Problems, what: str = "") -> None:
    with np.errstate(invalid="ignore"):
        large = np.flatnonzero(np.abs(numbers) > _LARGEST)
    if large.size:
        place = f"the {what}" if what else f"column {name!r}"
        rows = _rows(large, numbers.size)
        problems.add(f"{place} is infinite or too large to square in {rows}; correct it, or drop it.", gap=True)


def _rows(rows: npt.NDArray[np.int64], total: int = 0) -> str:
    """Rows in words: their number (of a total) and the first ones, counted from 1."""
    shown = ", ".join(f"{row + 1:,}" for row in rows[:_SHOWN].tolist()) + (", ..." if rows.size > _SHOWN else "")
    places = f"row{'s' if rows.size > 1 else ''} {shown}"
    return f"{rows.size:,} of {total:,} rows ({places})" if total else places


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _some(texts: list[str]) -> str:
    return ", ".join(repr(text) for text in texts[:_SHOWN]) + (", ..." if len(texts) > _SHOWN else "")


def numbers_of(file: object, name: str, values: Column) -> Array:
    """A column of numbers, missing values NaN.

    Raises:
        DataError: the column holds text.
    """
    if values.dtype.kind not in "fiub":
        raise DataError(f"The column {name!r} of {file} must hold numbers, it holds text.")
    return values.astype(np.float64)
