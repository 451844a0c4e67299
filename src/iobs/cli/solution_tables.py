"""The printed tables of `iobs solve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iobs.cli import console
from iobs.core.formats import significant

if TYPE_CHECKING:
    from rich.table import Table

    from iobs.cli.solution import JSONObject, SolveResult
    from iobs.cli.solve_inputs import Regression

_NEAR_SHOWN = 10  # near-optimal models that are printed; the JSON report has all
_BEYOND = 3  # values of k beyond the chosen one that the printed path shows


def show(solution: SolveResult, model: JSONObject) -> None:
    """Print the coefficients, the path and what a reader must know about both."""
    out = console.output_console()
    names = list(dict.fromkeys(row["name"] for row in model["features"]))  # k and the forced columns
    many = len(solution.problem.table.classes) > 2
    title = f"{len(names)} of {model['columns']} columns, {model['samples']:,} rows, {model['loss']} loss"
    shown = _table(title)
    shown.add_column("column")
    if many:
        shown.add_column("class")
    cox = model["loss"] == "cox"
    for heading in ("coefficient", "standard error", "z", "per standard deviation", *(["hazard ratio"] if cox else [])):
        shown.add_column(heading, justify="right")
    for row in model["features"]:
        error, z = row["standard_error"], row["z"]
        shown.add_row(
            row["name"],
            *([row.get("label", "")] if many else []),
            significant(row["coefficient"], 5),
            significant(error, 2),
            "–" if z is None else f"{z:.1f}",
            significant(row["per_standard_deviation"]),
            *([significant(row["hazard_ratio"])] if cox else []),
        )
    intercepts = model["intercept"] if isinstance(model["intercept"], list) else [model["intercept"]]
    for label, value in zip(solution.problem.table.classes if many else [""], intercepts, strict=True):
        if cox:  # the baseline hazard takes the constant
            break
        shown.add_row("(intercept)", *([label] if many else []), significant(value, 5), "", "", "")
    out.print(shown)
    if solution.card is not None:
        out.print(_card_text(solution))
    out.print(_path_table(solution, model))
    for line in _remarks(solution, model):
        out.print(line)
    if "near_optimal" in model:
        for part in _near_tables(model["near_optimal"]):
            out.print(part)


def _card_text(solution: SolveResult) -> str:
    """The scorecard with the names of the columns."""
    from dataclasses import replace

    assert solution.card is not None
    card, names = solution.card.card_, solution.problem.names
    label = (solution.problem.table.classes or ["1"])[-1]
    return f"{replace(card, names=tuple(names[j] for j in card.columns), label=label)}\n{solution.card.message_}"


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left", header_style="bold")


def _path_table(solution: SolveResult, model: JSONObject) -> object:
    title = "best columns for every k" if solution.knockoffs is None else "columns in the order of the filter"
    shown = _table(title)
    for heading in ("k", "loss", *(["score"] if solution.criterion else [])):
        shown.add_column(heading, justify="right")
    shown.add_column("change")
    before: set[str] = set()
    for row in model["path"][: solution.estimator.k_ + 1 + _BEYOND]:
        after = set(row["features"])
        change = [f"+{name}" for name in sorted(after - before)] + [f"-{name}" for name in sorted(before - after)]
        before = after
        score, error = row.get("score"), row.get("score_error")
        cells = [str(row["k"]) + ("*" if row["k"] == solution.estimator.k_ else ""), significant(row["value"], 6)]
        if score is not None:
            cells.append(significant(score, 6) + (f" ± {significant(error, 2)}" if error is not None else ""))
        shown.add_row(*cells, " ".join(change))
    return shown


def _chosen(solution: SolveResult) -> str:
    knockoffs = solution.knockoffs
    if knockoffs is None:
        return f"* the k that is used{f', chosen by {solution.criterion}' if solution.criterion else ''}"
    if not knockoffs.support.size:
        needed = f"{1 / knockoffs.fdr:.0f} columns or more must do so together; a larger --fdr asks for fewer"
        return f"* knockoff filter ({knockoffs.kind}): no column stands out from its knockoff. {needed}"
    return (
        f"* knockoff filter ({knockoffs.kind}): the expected share of false columns is at most {knockoffs.fdr:.0%}, "
        f"estimated {knockoffs.false_share:.0%}; k follows the order of its statistic"
    )


_MEANINGS = {
    "squared": "half the residual sum of squares",
    "logistic": "negative log-likelihood",
    "cox": "negative log partial likelihood",
}


def _loss_in_words(problem: Regression) -> str:
    meaning = _MEANINGS.get(problem.loss, "negative log-likelihood up to a constant")
    return f"{meaning}, with the ridge" if problem.ridge else meaning


def _remarks(solution: SolveResult, model: JSONObject) -> list[str]:
    lines = [_chosen(solution)]
    empty, value = model["value_without_features"], model["value"]
    share = "nothing to explain" if model["explained"] is None else f"{model['explained']:.1%} of it explained"
    loss = f"loss ({_loss_in_words(solution.problem)})"
    lines.append(f"{loss} {significant(value, 6)}, {significant(empty, 6)} without any column: {share}")
    classes = solution.problem.table.classes
    if model["loss"] == "squared":
        noise = model["noise"]
        unknown_noise = "no rows are left to estimate the noise from"
        lines.append(unknown_noise if noise is None else f"noise {significant(noise, 4)} (standard deviation)")
    elif solution.problem.events is not None:
        events = int(solution.problem.events.sum())
        lines.append(f"{events:,} events, {solution.problem.events.size - events:,} censored times")
        if "concordance" in model:
            lines.append(f"concordance {model['concordance']:.3f} on these rows: 0.5 is chance, 1 is a perfect order")
    elif len(classes) == 2:
        lines.append(f"coefficients are for {classes[1]!r} against {classes[0]!r}")
    elif classes:
        lines.append("coefficients of a column are differences from their mean over the classes")
    used = {row["name"] for row in model["features"]}
    for coding in solution.problem.table.codings:
        if coding.levels and used & set(coding.names):
            lines.append(f"{coding.name}: coefficients are against the reference level {coding.levels[0]!r}")
        elif coding.fill is not None and used & set(coding.names):
            lines.append(f"{coding.name}: missing values were replaced by the mean, {coding.fill:.5g}")
    at_bound = [row["name"] for row in model["features"] if row["standard_error"] is None]
    if solution.problem.bounds is not None and at_bound:
        lines.append(f"at a bound, so without a standard error: {', '.join(at_bound)}")
    if solution.problem.table.dropped:
        lines.append(f"{solution.problem.table.dropped:,} rows with missing values were left out")
    lines.append(model["standard_errors"])
    if "certificate" in model:
        lines.append(f"certificate: {model['certificate']}")
    return lines


def _near_tables(near: JSONObject) -> list[object]:
    """The columns and the first models as tables, and what a reader must know about both."""
    columns = _table("columns of the near-optimal models")
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
    models = _table("near-optimal models")
    models.add_column("above best", justify="right")
    models.add_column("columns")
    for model in near["models"][:_NEAR_SHOWN]:
        models.add_row(f"{model['above_best']:.3%}", " ".join(model["features"]))
    hidden = len(near["models"]) - _NEAR_SHOWN
    rest = [f"... and {hidden:,} more models (--json has all)"] if hidden > 0 else []
    return [columns, models, *rest, near["message"]]
