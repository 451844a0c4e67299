"""Figures of a path: the score and the coefficients for every k, the chosen k marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from iobs.optimize.objectives.design import Array, Indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from iobs.optimize.estimators.paths import PathEntry

_NAMED = 12  # most coefficient paths that are named
_LONGEST = 28  # characters of a name in a figure


def path_figure(
    path: Sequence[PathEntry],
    scores: Sequence[float],
    score: str,
    *,
    chosen: int,
    columns: Indices,
    spread: Array,
    names: Sequence[str],
    outputs: str = "class",
) -> Figure:
    """A figure of the score and the coefficients for every k, the chosen k marked.

    Args:
        path: the fit of every k.
        scores: one for each k; lower is better.
        score: name of the score.
        chosen: the chosen k.
        columns: sorted columns to draw (m,); they include every support.
        spread: standard deviations of these columns (m,).
        names: of these columns.
        outputs: name of what a column has several coefficients for.
    """
    figure = shown_figure((11, 4))
    score_axes, axes = figure.subplots(1, 2)
    sizes = [entry["k"] for entry in path]
    errors = np.array([entry["score_error"] for entry in path])
    _draw_scores(score_axes, sizes, scores, errors, chosen, score)
    table = _largest_coefficients(path, columns) * spread
    _draw_coefficients(axes, sizes, table, names, chosen)
    if np.ndim(path[0]["coef"]) > 1:
        axes.set_ylabel(f"per standard deviation, largest of a {outputs}")
    return figure


def shown_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of a size in inches; a notebook shows it as an image, also where pyplot is not imported."""
    from io import BytesIO

    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            self.savefig(file := BytesIO(), format="png")
            return file.getvalue()

    return ShownFigure(figsize=size, layout="constrained")


def _draw_scores(
    ax: Axes, sizes: Sequence[int], scores: Sequence[float], errors: Array, chosen: int, name: str
) -> None:
    """Draw the score of every k, with error bars where known, and mark the chosen k.

    Args:
        ax: where to draw.
        sizes: ascending k.
        scores: one for each k; lower is better.
        errors: standard error of each score; NaN draws no bar.
        chosen: the chosen k.
        name: name of the score.
    """
    from matplotlib.ticker import MaxNLocator

    values, bars = np.asarray(scores, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    place = list(sizes).index(chosen)
    if np.isfinite(bars).any():
        ax.errorbar(sizes, values, yerr=np.nan_to_num(bars), fmt="o-", markersize=3, linewidth=1, capsize=2)
        limit = values[place] + bars[place]
        ax.axhline(limit, linestyle=":", linewidth=1, color="grey", label="best + one standard error")
    else:
        ax.plot(sizes, values, "o-", markersize=3, linewidth=1)
    ax.plot([chosen], [values[place]], "o", markersize=9, fillstyle="none", color="C3", label=f"chosen: k = {chosen}")
    ax.set(xlabel="number of columns k", ylabel=name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(fontsize="small")


def _draw_coefficients(ax: Axes, sizes: Sequence[int], table: Array, names: Sequence[str], chosen: int) -> None:
    """Draw each coefficient over k, named at the right end where it is large.

    Args:
        ax: where to draw.
        sizes: ascending k.
        table: coefficients per standard deviation (number of k, columns).
        names: one for each column of the table.
        chosen: the chosen k, marked by a vertical line.
    """
    from matplotlib.ticker import MaxNLocator

    place = list(sizes).index(chosen)
    order = np.argsort(-np.abs(table[place]), kind="stable")
    used = [int(j) for j in order if table[:, j].any()]
    named = [j for j in used if table[place, j] != 0][:_NAMED]
    for j in used:
        style = {"linewidth": 1.2} if j in named else {"linewidth": 0.6, "color": "lightgrey", "zorder": 1}
        ax.plot(sizes, table[:, j], "o-" if j in named else "-", markersize=2.5, **style)
    ax.axvline(chosen, linestyle=":", linewidth=1, color="C3")
    ax.axhline(0, linewidth=0.6, color="grey")
    lines = [line for line in ax.get_lines() if line.get_marker() == "o"]
    if named:
        legend = ax.legend(
            lines[: len(named)], ["name"] * len(named), fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1)
        )
        for text, j in zip(legend.get_texts(), named, strict=True):
            text.set_parse_math(False)  # column names may hold dollar signs
            text.set_text(_short(names[j]))  # a label given to legend must not begin with an underscore
    ax.set(xlabel="number of columns k", ylabel="coefficient per standard deviation")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _largest_coefficients(path: Sequence[PathEntry], columns: Indices) -> Array:
    """Coefficients along a path (number of k, columns), the largest over the classes in absolute value."""
    table = np.zeros((len(path), columns.size))
    for row, entry in zip(table, path, strict=True):
        values = np.atleast_2d(entry["coef"])
        largest = values[np.abs(values).argmax(axis=0), np.arange(values.shape[1])]
        row[np.searchsorted(columns, entry["support"])] = largest
    return table


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
