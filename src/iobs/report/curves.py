"""Comparison of methods over sparsities: table and figure of scores and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from iobs.core.formats import duration, higher_is_better, score
from iobs.report.plots import BLUE, GREEN, GREY, INK, ORANGE, drawn, figure_of, logarithmic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (GREEN, BLUE, ORANGE, INK, "#7b4fa3", "#b3423a", "#2a9d9a", "#8a6d3b")
_MARKERS = ("o", "s", "^")  # change when there are more methods than colours


@dataclass(frozen=True)
class MethodTrial:
    """Result of one method at one pattern: metric, score, and seconds."""

    method: str
    pattern: str
    sparsity: float
    metric: str
    score: float
    seconds: float


def trials_table(trials: list[MethodTrial], dense: float | None) -> Table:
    """Table of methods (rows) by patterns (columns): score and time; the best score of a pattern is bold."""
    metric = trials[0].metric
    title = f"{metric} after pruning" + ("" if dense is None else f" (dense {score(dense)})")
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    patterns = list(dict.fromkeys(trial.pattern for trial in trials))
    for pattern in patterns:
        table.add_column(pattern, justify="right")
    choose = max if higher_is_better(metric) else min
    best = {pattern: choose(t.score for t in trials if t.pattern == pattern) for pattern in patterns}
    by_cell = {(trial.method, trial.pattern): trial for trial in trials}
    for method in dict.fromkeys(trial.method for trial in trials):
        cells: list[Text | str] = []
        for pattern in patterns:
            trial = by_cell.get((method, pattern))
            if trial is None:
                cells.append("–")
                continue
            style = "bold green" if trial.score == best[pattern] else ""
            cells.append(Text.assemble((score(trial.score), style), f", {duration(trial.seconds)}"))
        table.add_row(method, *cells)
    return table


@drawn
def trials_figure(trials: list[MethodTrial], dense: float | None) -> Figure:
    """Figure of score (top) and seconds (bottom) over sparsity, one line per method; hollow points are N:M patterns."""
    figure, (scores, times) = figure_of(6.4, rows=2)
    metric = trials[0].metric
    for number, method in enumerate(dict.fromkeys(trial.method for trial in trials)):
        of_method = sorted((trial for trial in trials if trial.method == method), key=lambda trial: trial.sparsity)
        marker = _MARKERS[number // len(_COLOURS) % len(_MARKERS)]
        style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "marker": marker}
        lines = [trial for trial in of_method if ":" not in trial.pattern]
        # N:M points share a sparsity with others, but are not part of the line.
        apart = [trial for trial in of_method if ":" in trial.pattern]
        hollow = {"markerfacecolor": "none", "linestyle": "none"}
        for group, look in ((lines, {**style, "label": method}), (apart, style | hollow)):
            places = [100 * trial.sparsity for trial in group]
            scores.plot(places, [trial.score for trial in group], **look)
            times.plot(places, [trial.seconds for trial in group], **look)
        for trial in apart:
            at = (100 * trial.sparsity, trial.score)
            scores.annotate(trial.pattern, at, xytext=(6, -3), textcoords="offset points", color=INK, fontsize=8)
    if dense is not None:
        scores.axhline(dense, color=GREY, linestyle="--", label="dense")
    if not higher_is_better(metric):
        logarithmic(scores, "y")
    scores.set_ylabel(f"{metric} ({'higher' if higher_is_better(metric) else 'lower'} is better)")
    scores.legend(frameon=False)
    logarithmic(times, "y")
    times.set_ylabel("seconds")
    times.set_xlabel("sparsity, per cent")
    return figure
