"""Figures of a report as self-contained SVG; matplotlib is used without pyplot, so no global state changes."""

from __future__ import annotations

import functools
import io
import math
import textwrap
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

from iobs.core.formats import best_name, higher_is_better, score
from iobs.pruning.report import Report
from iobs.report.tables import mean_error, round_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY, INK = "#2f6f9f", "#d9822b", "#3d8b5f", "#9aa5b1", "#243b53"
# With more layers, names would be unreadable: the axis shows positions instead.
_NAMED_LAYERS = 24
_NUMBERED_ROUNDS = 10
_LONGEST_NAME = 26  # characters; longer names lose their beginning
_KINDS = 14  # with more kinds of layers their bars would be unreadable
_COLOURS = (BLUE, ORANGE, GREEN, "#7b4fa3", "#b3423a", "#2a9d9a", "#8a6d3b")

Arguments = ParamSpec("Arguments")


def drawn(draw: Callable[Arguments, Figure]) -> Callable[Arguments, str]:
    """Decorate a function that draws a figure: the result is an SVG string in the style of the report.

    The style must hold until the figure is saved: texts take the style when they are created, ticks when they are
    saved. A figure that fails only warns, and is replaced by a placeholder.
    """

    @functools.wraps(draw)
    def svg(*arguments: Arguments.args, **options: Arguments.kwargs) -> str:
        try:
            from matplotlib import rc_context

            buffer = io.StringIO()
            with rc_context(_STYLE):
                draw(*arguments, **options).savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
            return buffer.getvalue()
        except Exception as error:  # any error: it must not stop the weights of a long run from being written
            warnings.warn(f"The figure {draw.__name__} could not be drawn: {error}", stacklevel=2)
            return _NOT_DRAWN

    return svg


@drawn
def error_by_layer(report: Report) -> Figure:
    """Relative output error of every layer on calibration and held-out samples, in the best round.

    If the best round is a fine-tuning round, the errors are those of the projection before it.
    """
    layers = report.best.layers
    heldout = [layer.error_heldout for layer in layers]
    series = [("calibration", [layer.error_calibration for layer in layers], BLUE)]
    if all(value is not None for value in heldout):
        series.append(("held-out", [value for value in heldout if value is not None], ORANGE))
    if len(report.rounds) > 1:
        series.append(("against dense", [layer.error_dense for layer in layers], GREEN))
    positive = all(value > 0 for _, values, _ in series for value in values)
    label = "relative output error" + ("\nbefore fine-tuning" if report.best.kind == "finetune" else "")
    return _by_layer([layer.name for layer in layers], series, label, positive)


@drawn
def zeros(report: Report) -> Figure:
    """Share of zeros by kind of layer (top) and of every layer in the order of the network (bottom)."""
    rows = report.audit
    kinds = kinds_of([row.name for row in rows])
    names = [*dict.fromkeys(kinds)]
    grouped = {name: [row for row, kind in zip(rows, kinds, strict=True) if kind == name] for name in names}
    panels = len(names) < len(rows) and len(names) <= _KINDS
    figure, axes = figure_of(2.6 + (0.7 + 0.25 * len(names) if panels else 0.0), rows=2 if panels else 1)
    if panels:
        shares = [100 * sum(row.zeros for row in some) / sum(row.weights for row in some) for some in grouped.values()]
        places = range(len(names))
        axes[0].barh(places, shares, color=[_COLOURS[place % len(_COLOURS)] for place in places], height=0.66)
        axes[0].set_yticks(places, _short_names(names))
        axes[0].invert_yaxis()
        axes[0].set(xlabel="zeros, %", xlim=(0, 100))
        axes[0].axvline(100 * report.sparsity, color=GREY, linestyle="--")
        axes[0].grid(axis="y", visible=False)
    depth = axes[-1]
    for number, name in enumerate(names if panels else [""]):
        at = [place for place, kind in enumerate(kinds) if not panels or kind == name]
        colour = _COLOURS[number % len(_COLOURS)]
        depth.plot(at, [100 * rows[place].sparsity for place in at], "o", color=colour, markersize=4.5)
    depth.axhline(100 * report.sparsity, color=GREY, linestyle="--")
    _count(depth)
    depth.set(xlabel="layer, in the order of the network", ylabel="zeros, %", ylim=(0, 103))
    return figure


def kinds_of(names: list[str]) -> list[str]:
    """The kind of each layer: its name without the numbers, from the part on that tells kinds apart."""
    parts = [[part for part in name.split(".") if not part.isdigit()] or [name] for name in names]
    depth = 1
    if len({tuple(words[-1:]) for words in parts}) == 1:  # such as the "conv" of many modules
        depth = 2
    return [".".join(words[-depth:]) for words in parts]


@drawn
def rounds(report: Report) -> Figure:
    """Loss of every round with a star at the best (top), and mean layer error against the dense weights (bottom).

    A line joins the projections. Fine-tuning rounds are separate points, since each starts from a projection.
    """
    projections = [record for record in report.rounds if record.kind == "projection"]
    tuned = [record for record in report.rounds if record.kind != "projection"]
    # With many rounds their spacing is narrow, and the labels of the fine-tuning rounds need more of it.
    room = max(1.0, len(projections) / 4) if tuned else 1.0
    places = {record.index: float(number) for number, record in enumerate(projections)}
    places |= {record.index: len(projections) - 1 + room * (number + 1) for number, record in enumerate(tuned)}
    figure, (upper, lower) = figure_of(5.4, rows=2)
    for label, colour, values in (
        ("calibration", BLUE, {record.index: record.loss_calibration for record in report.rounds}),
        ("held-out", ORANGE, {record.index: record.loss_heldout for record in report.rounds}),
    ):
        for records, line, name in ((projections, "-", label), (tuned, "none", None)):
            points = [(places[record.index], values[record.index]) for record in records]
            points = [(place, value) for place, value in points if value is not None]
            if points:
                upper.plot(*zip(*points, strict=True), marker="o", linestyle=line, color=colour, label=name)
    if report.dense_loss is not None:
        upper.axhline(report.dense_loss, color=GREY, linestyle="--", label="dense, held-out")
    best = report.best
    starred = best.loss_heldout if best.loss_heldout is not None else best.loss_calibration
    if starred is not None:
        upper.plot(places[best.index], starred, marker="*", markersize=17, color=ORANGE, linestyle="none", label="best")
    upper.set_ylabel(report.loss_name)
    figure.legend(frameon=False, ncols=2, loc="outside upper left", columnspacing=1, handletextpad=0.3)
    errors = [mean_error(record) for record in projections]
    lower.plot(
        [places[record.index] for record in projections],
        [math.nan if error is None else error for error in errors],
        marker="o",
        color=GREEN,
    )
    lower.set_ylabel("mean layer error\nagainst dense")
    lower.set_xlabel("round", loc="left")
    named = [*projections[:: math.ceil(len(projections) / _NUMBERED_ROUNDS)], *tuned]
    labels = [textwrap.fill(round_name(record).removeprefix("round "), 7) for record in named]
    upper.tick_params(labelbottom=False)
    for axes in (upper, lower):
        axes.set_xticks([places[record.index] for record in named], labels)
        axes.set_xlim(-0.5, max(places.values()) + 0.5 * room)
    return figure


@drawn
def comparison(scores: dict[str, dict[str, float]], metric: str) -> Figure:
    """Bar chart of one metric over methods; the dense network is grey, the best method green."""
    entries = {name: values[metric] for name, values in scores.items() if metric in values}
    best = best_name({name: value for name, value in entries.items() if name != "dense"}, metric)
    figure, (axes,) = figure_of(0.9 + 0.42 * len(entries))
    positions = range(len(entries))
    colours = [GREY if name == "dense" else GREEN if name == best else BLUE for name in entries]
    lengths = [value if math.isfinite(value) else 0.0 for value in entries.values()]
    axes.barh(positions, lengths, color=colours, height=0.66)
    for position, length, value in zip(positions, lengths, entries.values(), strict=True):
        axes.annotate(score(value), (length, position), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(positions, list(entries))
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel(f"{metric} ({'higher' if higher_is_better(metric) else 'lower'} is better)")
    axes.grid(axis="y", visible=False)
    return figure


def _count(axes: Axes) -> None:
    """Whole numbers alone at the horizontal axis: no layer is at 0.25."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _by_layer(
    names: list[str], series: list[tuple[str, list[float], str]], label: str, positive: bool = False
) -> Figure:
    named = len(names) <= _NAMED_LAYERS
    figure, (axes,) = figure_of(1.1 + 0.23 * (len(names) + label.count("\n")) if named else 3.2)
    positions = list(range(len(names)))
    for name, values, colour in series:
        if named:
            axes.plot(values, positions, marker="o", linestyle="none", color=colour, label=name, markersize=5.5)
        else:
            axes.plot(positions, values, linewidth=1.3, color=colour, label=name)
    value_axis = "x" if named else "y"
    if named:
        axes.set_yticks(positions, _short_names(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(label)
    else:
        _count(axes)
        axes.set_xlabel("layer, in the order of the network")
        axes.set_ylabel(label)
    if positive:
        logarithmic(axes, value_axis)
    else:
        axes.set(**{f"{value_axis}lim": (0, None)})
    if len(series) > 1:
        figure.legend(frameon=False, ncols=3, loc="outside upper left", columnspacing=1, handletextpad=0.3)
    return figure


def _short_names(names: list[str]) -> list[str]:
    """Remove the common path prefix of all names, and shorten long names from the left."""
    paths = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    short = [".".join(path[shared:]) for path in paths]
    return [name if len(name) <= _LONGEST_NAME else "…" + name[-_LONGEST_NAME:] for name in short]


def figure_of(height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure 5 inches wide with its axes below each other; the text stays readable on a phone, 360 points wide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, height), layout="constrained")
    axes = [figure.add_subplot(rows, 1, number + 1) for number in range(rows)]
    for each in axes:
        each.set_axisbelow(True)
    return figure, axes


def logarithmic(axes: Axes, name: str) -> None:
    """Make the "x" or "y" axis logarithmic with plain-text numbers: TeX is switched off in reports."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):  # matplotlib still chooses which ticks have labels
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain())


_NOT_DRAWN = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 40">'
    '<text x="8" y="25" font-family="sans-serif" font-size="12">This figure could not be drawn.</text></svg>\n'
)

_STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.8,
    "svg.hashsalt": "iobs",
    # Names of layers, methods and scores are plain text, also if they contain dollar signs.
    "text.parse_math": False,
    "text.usetex": False,
    "axes.formatter.use_mathtext": False,
}
