"""Tables in .npz files: a matrix X with arrays beside it, or one array for each column."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from iobs.data.encoding import Column
from iobs.errors import DataError, listed


def read_arrays(file: Path, target: str | None = None, named: Collection[str] = ()) -> dict[str, Column]:
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
            arrays = {name: one for name, one in arrays.items() if one.shape == X.shape[:1]}
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
    arrays = {name: one for name, one in arrays.items() if name == target or name != "y"}
    if unnamed := [name for name in arrays if name not in (target, *named)]:
        raise DataError(
            f"{file} holds X and y, and also {listed(unnamed)}, which would not be used: give it a use, as that of "
            f"sample weights, leave it out (--drop {unnamed[0]}), or save the file without it."
        )
    return arrays
