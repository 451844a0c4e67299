"""`iobs solve --near`: the models whose loss is near the best, as a report and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from iobs.errors import DataError

if TYPE_CHECKING:
    from iobs.cli.solution import Solution

_SHOWN = 10  # models that are printed; the JSON report has all
SECONDS = 60.0


class Model(TypedDict):
    """The columns of a model, forced ones included, and its loss relative to the best."""

    features: list[str]
    coefficients: list[float]
    above_best: float


class Presence(TypedDict):
    """Importance of a column over all models; rises of the loss are relative to the best loss."""

    name: str
    share: float
    least_rise: float
    most_rise: float
    best_without: float | None


class NearOptimal(TypedDict):
    """The models within a gap of the best loss, and whether they are proved to be all."""

    gap: float
    complete: bool
    message: str
    models: list[Model]
    columns: list[Presence]


def require_squared(loss: str) -> None:
    """Refuse a loss without bounds, before any work.

    Raises:
        DataError: the loss is not the squared one.
    """
    if loss != "squared":
        raise DataError(f"--near needs --loss squared, which has bounds that prove the list complete; got {loss}.")


def near_optimal(found: Solution, gap: float, seconds: float) -> NearOptimal:
    """Find every model of at most a relative `gap` above the best loss, within `seconds`."""
    import math

    from iobs.optimize.bounds.rashomon import rashomon_set

    names = found.table.names
    models = rashomon_set(found.objective, found.size, gap=gap, seconds=seconds)
    scale = max(abs(models.best), 1e-300)
    return {
        "gap": gap,
        "complete": models.complete,
        "message": models.message,
        "models": [
            {
                "features": [names[j] for j in member.support],
                "coefficients": member.coefficients.tolist(),
                "above_best": max(0.0, (member.loss - models.best) / scale),
            }
            for member in models
        ],
        "columns": [
            {
                "name": names[row.feature],
                "share": row.share,
                "least_rise": row.least,
                "most_rise": row.most,
                "best_without": row.without if math.isfinite(row.without) else None,
            }
            for row in models.importance()
        ],
    }


def tables(near: NearOptimal) -> list[object]:
    """The columns and the first models as tables, and what a reader must know about both."""
    from rich.table import Table

    columns = Table(title="columns of the near-optimal models", title_justify="left", header_style="bold")
    columns.add_column("column")
    for heading in ("in models", "loss if left out", "best without it"):
        columns.add_column(heading, justify="right")
    used = [row for row in near["columns"] if row["share"] > 0]
    for row in used:
        without = row["best_without"]
        beyond = f"> {near['gap']:.2%}" if near["complete"] else "not found"
        columns.add_row(
            row["name"],
            f"{row['share']:.1%}",
            f"+{row['least_rise']:.2%} to +{row['most_rise']:.2%}",
            beyond if without is None else f"+{without:.2%}",
        )
    models = Table(title="near-optimal models", title_justify="left", header_style="bold")
    models.add_column("above best", justify="right")
    models.add_column("columns")
    for model in near["models"][:_SHOWN]:
        models.add_row(f"{model['above_best']:.3%}", " ".join(model["features"]))
    hidden = len(near["models"]) - _SHOWN
    rest = [f"... and {hidden:,} more models (--json has all)"] if hidden > 0 else []
    return [columns, models, *rest, near["message"]]
