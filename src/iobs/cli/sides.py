"""Columns of a table beside the explanations: sample weights, offsets, and the categories that enter whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from iobs.errors import DataError

if TYPE_CHECKING:
    from iobs.cli.solve import Columns
    from iobs.data.tables import Table
    from iobs.optimize.objectives.design import Array


@dataclass(frozen=True)
class Sides:
    """Columns of the table that are not explanations.

    Attributes:
        weights: sample weights (n,), ones if there are none.
        offset: known part of the linear predictor (n,), or None.
        name: the column of the offset or of the exposure; "" without one.
        exposure: whether the offset is the logarithm of that column.
        labels: for each column of the design the number of its column of the file, if categories enter whole.
    """

    weights: Array
    offset: Array | None
    name: str
    exposure: bool
    labels: list[int] | None


def sides_of(table: Table, columns: Columns, loss: str) -> Sides:
    """The sample weights and the offset.

    Raises:
        DataError: an offset twice, or for more than two classes; an exposure that is not positive, or without a
            log link.
    """
    weights = np.ones(len(table.y)) if columns.weight is None else table.aside[columns.weight]
    offset = None if columns.offset is None else table.aside[columns.offset]
    if columns.exposure is not None:
        exposure = table.aside[columns.exposure]
        if loss in ("squared", "logistic") or offset is not None:
            raise DataError("--exposure needs a loss of counts or amounts, such as poisson, and no --offset.")
        if not (exposure > 0).all():
            raise DataError(f"The exposure {columns.exposure!r} must be positive, got {exposure.min():g}.")
        offset = np.log(exposure)
    if offset is not None and len(table.classes) > 2:
        raise DataError("An offset needs at most two classes.")
    return Sides(
        weights, offset, columns.exposure or columns.offset or "", columns.exposure is not None, _labels(table, columns)
    )


def _labels(table: Table, columns: Columns) -> list[int] | None:
    """The column of the file that each column of the design belongs to, for --whole-categories."""
    if not columns.whole_categories:
        return None
    return [number for number, coding in enumerate(table.codings) for _ in coding.names]
