"""Options of `iobs solve` that say how columns are chosen, and the choice by the knockoff filter."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from iobs.cli.columns import Columns
    from iobs.cli.limits import Limits
    from iobs.cli.sides import Sides
    from iobs.cli.solution import Solution
    from iobs.data.tables import Table
    from iobs.optimize.estimators.base import SparseEstimator
    from iobs.optimize.objectives.design import Array


@dataclass(frozen=True)
class Selection:
    """Options that say how columns are chosen."""

    select: Annotated[
        str,
        typer.Option(
            metavar="best|knockoff",
            help="best: the best k columns. knockoff: columns whose expected share of false ones is at most --fdr.",
        ),
    ] = "best"
    fdr: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of --select knockoff: limit on that share (default 0.1).", min=0, max=1),
    ] = None

    @property
    def knockoff(self) -> bool:
        """True for the knockoff filter."""
        return self.select == "knockoff"

    def check(self, columns: Columns, limits: Limits, k: str, proofs: bool) -> None:
        """Refuse an unknown choice, and all options that do not go with the knockoff filter, at once."""
        if self.select not in ("best", "knockoff"):
            raise typer.BadParameter("give best or knockoff", param_hint="--select")
        if not self.knockoff:
            if self.fdr is not None:
                raise typer.BadParameter("it belongs to --select knockoff", param_hint="--fdr")
            return
        others = {
            "-k": k != "ebic",
            "--force": columns.force,
            "--weight": columns.weight,
            "--offset": columns.offset,
            "--exposure": columns.exposure,
            "--whole-categories": columns.whole_categories,
            "--interactions": columns.interactions,
            "bounds on coefficients": limits.given,
            "--certify or --near": proofs,
        }
        given = [name for name, value in others.items() if value]
        if given:
            raise typer.BadParameter(f"knockoff does not go with {', '.join(given)}", param_hint="--select")

    def solution(self, table: Table, sides: Sides, target: str, loss: str, ridge: float, seed: int) -> Solution:
        """The fits of the first k columns in the order of the filter's statistic, up to all that it chooses.

        Raises:
            DataError: a target of more than two classes, or constant columns.
            ProblemError: columns that have no knockoffs.
        """
        import numpy as np

        from iobs.cli.choice import objective_of
        from iobs.cli.solution import Solution
        from iobs.errors import DataError
        from iobs.optimize.estimators.knockoffs import knockoff_filter
        from iobs.optimize.refit.newton import refit

        if len(table.classes) > 2:
            raise DataError("--select knockoff needs a target of numbers, or of at most two classes.")
        constant = [name for name, values in zip(table.names, table.X.T, strict=True) if (values == values[0]).all()]
        if constant:
            what = " ".join(f"--drop {shlex.quote(name)}" for name in constant)
            raise DataError(f"Constant columns have no knockoffs; leave them out with {what}.")
        objective = objective_of(table, loss, ridge, [], sides)[0]
        estimator, answers = _estimator(table, sides, loss, ridge)
        fdr = 0.1 if self.fdr is None else self.fdr
        found = knockoff_filter(estimator, table.X, answers, fdr=fdr, seed=seed)
        order = found.support[np.argsort(-found.statistics[found.support], kind="stable")]
        fits = [refit(objective, np.union1d(order[:k], objective.forced)) for k in range(order.size + 1)]
        return Solution(table, target, loss, objective, fits, None, "knockoff", sides, found)


def _estimator(table: Table, sides: Sides, loss: str, ridge: float) -> tuple[SparseEstimator, Array]:
    """The estimator of a loss, and the targets that it takes."""
    from typing import cast

    import numpy as np

    from iobs.cli.choice import ridge_of
    from iobs.optimize.estimators import SparseClassifier, SparseCox, SparseRegressor
    from iobs.optimize.estimators.regressor import Loss

    if sides.events is not None:
        return SparseCox(ridge=ridge), np.column_stack([table.y, sides.events])
    if loss == "logistic":
        return SparseClassifier(ridge=ridge_of(loss, ridge)), table.y
    return SparseRegressor(loss=cast("Loss", loss), ridge=ridge), table.y
