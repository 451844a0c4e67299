"""Weights, offsets, events, whole categories and bounds: all that a regression needs besides its explanations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from iobs.errors import DataError

if TYPE_CHECKING:
    from iobs.cli.columns import Columns
    from iobs.cli.limits import Limits
    from iobs.data.tables import Table
    from iobs.optimize.objectives.design import Array
    from iobs.optimize.refit.within import Bounds
    from iobs.optimize.search.hierarchy import Kind


@dataclass(frozen=True)
class Sides:
    """Inputs of a regression besides its explanations.

    Attributes:
        weights: sample weights (n,) as counts of rows, ones if there are none.
        offset: known part of the linear predictor (n,), or None.
        name: the column of the offset or of the exposure; "" without one.
        exposure: whether the offset is the logarithm of that column.
        labels: for each column of the design the number of its column of the file, if categories enter whole.
        events: 1 where the event happened, 0 where it was censored (n,); None unless the loss is "cox".
        bounds: of the coefficients; None without any.
        interactions: "strong" or "weak" hierarchy of the products of two columns; None without products.
    """

    weights: Array
    offset: Array | None
    name: str
    exposure: bool
    labels: list[int] | None
    events: Array | None = None
    bounds: Bounds | None = None
    interactions: Kind | None = None


def sides_of(table: Table, columns: Columns, loss: str, limits: Limits) -> Sides:
    """The sample weights, the offset, the events and the bounds.

    Raises:
        ProblemError: weights that are negative, not finite or all zero.
        DataError: an offset twice, or for more than two classes; an exposure
            that is not positive, or without a log link; interactions with options that do not go with them; a status
            that is not 0 and 1; bounds with more than two classes.
    """
    from iobs.optimize.estimators.base import counts_of
    from iobs.optimize.objectives.arguments import weights_of

    weights = np.ones(len(table.y))
    if columns.weight is not None:
        weights = counts_of(weights_of(table.aside[columns.weight], len(weights), f"weights {columns.weight!r}"))
    offset = None if columns.offset is None else table.aside[columns.offset]
    if columns.exposure is not None:
        exposure = table.aside[columns.exposure]
        if loss in ("squared", "logistic", "cox") or offset is not None:
            raise DataError("--exposure needs a loss of counts or amounts, such as poisson, and no --offset.")
        wrong = exposure[~((exposure > 0) & np.isfinite(exposure))]
        if wrong.size:
            raise DataError(f"The exposure {columns.exposure!r} must be positive and finite, got {wrong[0]:g}.")
        offset = np.log(exposure)
    if offset is not None and len(table.classes) > 2:
        raise DataError("An offset needs at most two classes.")
    events = None if columns.status is None else table.aside[columns.status]
    if events is not None and not (np.isin(events, (0, 1)).all() and events.any()):
        raise DataError(f"The status {columns.status!r} must be 0 or 1, with 1 at least once: the event happened.")
    bounds = limits.bounds(table)
    if bounds is not None and len(table.classes) > 2:
        raise DataError(
            "Bounds on coefficients need at most two classes: a number added to those of all classes changes nothing."
        )
    kind = _hierarchy(table, columns, limits)
    name, labels = columns.exposure or columns.offset or "", _labels(table, columns)
    return Sides(weights, offset, name, columns.exposure is not None, labels, events, bounds, kind)


def columns_of_file(table: Table) -> int:
    """The number of columns of the design that are no products of two others."""
    return sum(len(coding.names) for coding in table.codings)


def with_interactions(table: Table) -> Table:
    """The table with the product of every two columns of its design, named "a:b"."""
    from iobs.optimize.estimators.interactions import with_products
    from iobs.optimize.search.hierarchy import pairs_of

    names = table.names
    products = [f"{names[left]}:{names[right]}" for left, right in pairs_of(len(names)).tolist()]
    return replace(table, X=with_products(table.X), names=[*names, *products])


def _hierarchy(table: Table, columns: Columns, limits: Limits) -> Kind | None:
    if columns.interactions is None:
        return None
    if columns.whole_categories or limits.given or len(table.classes) > 2:
        raise DataError("--interactions needs at most two classes, no bounds and no --whole-categories.")
    if columns.interactions == "strong":
        return "strong"
    if columns.interactions == "weak":
        return "weak"
    raise DataError(f"--interactions must be strong or weak, got {columns.interactions!r}.")


def _labels(table: Table, columns: Columns) -> list[int] | None:
    """The column of the file that each column of the design belongs to, for --whole-categories."""
    if not columns.whole_categories:
        return None
    return [number for number, coding in enumerate(table.codings) for _ in coding.names]
