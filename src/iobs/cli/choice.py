"""The objective of `iobs solve`, and its choice of k."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from iobs.cli.sides import Sides
    from iobs.data.tables import Table
    from iobs.optimize.estimators.base import Choice, SparseEstimator
    from iobs.optimize.estimators.regressor import Loss
    from iobs.optimize.objectives.base import Objective
    from iobs.optimize.objectives.design import Array
    from iobs.optimize.search.groups import CoordinateGroups
    from iobs.optimize.search.hierarchy import Hierarchy


class _Search(TypedDict):
    """Settings of every estimator that chooses k."""

    thorough: bool
    random_state: int
    forced: list[int]
    ridge: float


class _Columns(_Search):
    """Settings of the estimators whose terms are columns of the design."""

    groups: list[int] | None
    lower: Array | None
    upper: Array | None


def forced_of(table: Table, names: list[str]) -> list[int]:
    """The columns of the design that belong to forced columns of the file, all dummy columns of a category."""
    from iobs.errors import DataError

    owners = [coding.name for coding in table.codings for _ in coding.names]
    own = table.names[: len(owners)]  # without interactions
    unknown = [name for name in names if name not in owners and name not in own]
    if unknown:
        raise DataError(f"There is no column {', '.join(map(repr, unknown))} to force in.")
    return [j for j, (owner, name) in enumerate(zip(owners, own, strict=True)) if owner in names or name in names]


def objective_of(
    table: Table, loss: str, ridge: float, forced: list[int], sides: Sides
) -> tuple[Objective, CoordinateGroups | Hierarchy | None]:
    """The loss on the table, and the groups of coordinates that enter together, if there are any."""
    import numpy as np

    from iobs.cli.sides import columns_of_file
    from iobs.optimize.estimators.regressor import FAMILIES
    from iobs.optimize.objectives.centring import variances
    from iobs.optimize.objectives.cox import Cox
    from iobs.optimize.objectives.families import Logistic
    from iobs.optimize.objectives.linear import LeastSquares
    from iobs.optimize.objectives.multinomial import Multinomial
    from iobs.optimize.search.groups import CoordinateGroups, labels_to_groups
    from iobs.optimize.search.hierarchy import Hierarchy

    spread = variances(table.X, sides.weights, True)  # so that units do not matter
    penalty = ridge_of(loss, ridge) * spread
    members = None if sides.labels is None else labels_to_groups(sides.labels, len(table.names))
    owned = [np.array([j]) for j in range(len(table.names))] if members is None else members
    always = frozenset(number for number, columns in enumerate(owned) if np.isin(columns, forced).any())
    weights = sides.weights if (sides.weights != 1).any() else None
    if len(table.classes) > 2:
        penalty = np.where(spread > 0, penalty, 1.0)
        many = Multinomial(table.X, table.y, len(table.classes), ridge=penalty, sample_weight=weights)
        rows = many.groups
        grouped = rows if members is None else [np.concatenate([rows[j] for j in member]) for member in members]
        return many, CoordinateGroups(many, grouped, always)
    if sides.events is not None:
        always_in = forced if members is None else ()
        cox = Cox(
            table.X,
            table.y,
            sides.events,
            ridge=penalty,
            sample_weight=weights,
            offset=sides.offset,
            forced=always_in,
        )
        if sides.interactions is not None:
            return cox, Hierarchy(cox, columns_of_file(table), sides.interactions, frozenset(forced))
        return cox, None if members is None else CoordinateGroups(cox, members, always)
    choices: dict[str, Callable[..., Objective]] = {"squared": LeastSquares, "logistic": Logistic, **FAMILIES}
    objective = choices[loss](
        table.X,
        table.y,
        ridge=penalty,
        intercept=True,
        sample_weight=weights,
        offset=sides.offset,
        forced=forced if members is None else (),
    )
    if sides.interactions is not None:
        return objective, Hierarchy(objective, columns_of_file(table), sides.interactions, frozenset(forced))
    return objective, None if members is None else CoordinateGroups(objective, members, always)


def ridge_of(loss: str, ridge: float) -> float:
    """The ridge; for the logistic loss at least a tiny one, without which separable classes have no finite fit."""
    return max(ridge, 1e-6) if loss == "logistic" else ridge


def size_of(
    table: Table, loss: str, ridge: float, k: str, seed: int, forced: list[int], sides: Sides
) -> tuple[int, SparseEstimator | None]:
    """k, and the estimator that chose it."""
    import numpy as np

    from iobs.cli.sides import columns_of_file
    from iobs.errors import DataError
    from iobs.optimize.estimators import SparseClassifier, SparseCox, SparseInteractions, SparseRegressor

    labels = list(range(len(table.names))) if sides.labels is None else sides.labels
    free = len(set(labels) - {labels[j] for j in forced})
    if k in ("cv", "cv-1se", "aic", "bic", "ebic"):
        choice = cast("Choice", k)
        _refuse_choice(table, loss, k)
        ridge = ridge_of(loss, ridge)
        search: _Search = {"thorough": False, "random_state": seed, "forced": forced, "ridge": ridge}
        low, high = (None, None) if sides.bounds is None else (sides.bounds.lower, sides.bounds.upper)
        columns: _Columns = {**search, "groups": sides.labels, "lower": low, "upper": high}
        if sides.events is not None:
            if sides.interactions is not None:
                raise DataError(f"-k {k} cannot choose among interactions with the cox loss; give a number.")
            cox = SparseCox(choice, **columns)
            times = np.column_stack([table.y, sides.events])
            return int(cox.fit(table.X, times, sides.weights, offset=sides.offset).k_), cox
        if loss == "logistic":
            if sides.interactions is not None:
                raise DataError(f"-k {k} cannot choose among interactions with the logistic loss; give a number.")
            chooser = SparseClassifier(choice, **columns)
            return int(chooser.fit(table.X, table.y, sides.weights, offset=sides.offset).k_), chooser
        kind = cast("Loss", loss)
        if sides.interactions is not None:
            products = SparseInteractions(choice, hierarchy=sides.interactions, loss=kind, **search)
            own = table.X[:, : columns_of_file(table)]
            return int(products.fit(own, table.y, sides.weights, offset=sides.offset).k_), products
        regressor = SparseRegressor(choice, loss=kind, **columns)
        return int(regressor.fit(table.X, table.y, sides.weights, offset=sides.offset).k_), regressor
    if not (k.isascii() and k.isdecimal()) or int(k) > free:
        raise DataError(f"-k must be a number from 0 to {free}, or cv, cv-1se, aic, bic, ebic; got {k!r}.")
    return int(k), None


def _refuse_choice(table: Table, loss: str, k: str) -> None:
    """Refuse a target that choosing k cannot handle.

    Raises:
        DataError: more than two values with the logistic loss, or too few rows for cross-validation.
    """
    from collections import Counter

    from iobs.errors import DataError

    counts = Counter(table.y.tolist())
    if loss == "logistic" and len(counts) > 2 and not table.classes:
        raise DataError(f"-k {k} with --loss logistic needs a target of two values, got {len(counts)}; give a number.")
    most = max(counts.values()) if loss == "logistic" else len(table.y)
    if k in ("cv", "cv-1se") and most < 5:
        needed = "5 rows of one class" if loss == "logistic" else "5 rows"
        raise DataError(f"-k {k} cuts the table into 5 parts and needs {needed}, there are {most}; give a number.")
