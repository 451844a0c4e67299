"""The pictures of a report, each a self-contained SVG. matplotlib is used without pyplot, so nothing global changes."""

from __future__ import annotations

import io
from typing import Any

from iobs.prune.record import Report
from iobs.report.numbers import higher_is_better, score
from iobs.report.tables import mean_error

BLUE, ORANGE, GREEN, GREY, INK = "#2f6f9f", "#d9822b", "#3d8b5f", "#9aa5b1", "#243b53"
# Above this many layers their names would be unreadable and positions stand for them.
_NAMED_LAYERS = 40


def error_by_layer(report: Report) -> str:
    """Relative output error of every layer of the best round, on calibration and on held-out samples."""
    layers = report.best.layers
    heldout = [layer.error_heldout for layer in layers]
    series = [("calibration", [layer.error_calibration for layer in layers], BLUE)]
    if all(value is not None for value in heldout):
        series.append(("held-out", [value for value in heldout if value is not None], ORANGE))
    if len(report.rounds) > 1:
        series.append(("against dense", [layer.error_dense for layer in layers], GREEN))
    positive = all(value > 0 for _, values, _ in series for value in values)
    return _by_layer([layer.name for layer in layers], series, "relative output error", logarithmic=positive)


def sparsity_by_layer(report: Report) -> str:
    """Share of zeros of every layer, asked and got."""
    layers = report.best.layers
    series = [
        ("asked", [100 * layer.asked for layer in layers], GREY),
        ("got", [100 * layer.sparsity for layer in layers], GREEN),
    ]
    return _by_layer([layer.name for layer in layers], series, "zeros, %", logarithmic=False)


def allocation(report: Report) -> str:
    """The zeros that each layer was allotted, and what a zero of it costs, were all layers as sparse as the network."""
    from matplotlib.ticker import LogFormatter, NullFormatter

    records = report.allocation
    sizes = [record.shape[0] * record.shape[1] for record in records]
    share = sum(record.chosen * size for record, size in zip(records, sizes, strict=True)) / sum(sizes)
    damages = [record.damage(share) for record in records]
    mean = sum(damages) / sum(sizes)
    costs = [damage / size / mean for damage, size in zip(damages, sizes, strict=True)] if mean else damages
    named = len(records) <= _NAMED_LAYERS
    figure, (left, right) = _figure(1.1 + 0.23 * len(records) if named else 5.0, columns=2)
    positions = range(len(records))
    for axes, values, colour, middle in (
        (left, [100 * record.chosen for record in records], GREEN, 100 * share),
        (right, costs, ORANGE, 1.0),
    ):
        axes.plot(values, positions, marker="o", linestyle="none", color=colour, markersize=5.5)
        axes.axvline(middle, color=GREY, linestyle="--")
        axes.invert_yaxis()
        if named:
            axes.set_yticks(positions, _short_names([record.name for record in records]) if axes is left else [])
    if not named:
        left.set_ylabel("layer, in the order of the network")
    left.set(xlabel="zeros, %", xlim=(0, 100))
    right.set(xlabel="cost of a zero / mean")
    if min(costs) > 0:
        right.set_xscale("log")
        right.xaxis.set_major_formatter(LogFormatter())
        right.xaxis.set_minor_formatter(NullFormatter())
    return _svg(figure)


def seconds_by_layer(report: Report) -> str:
    """Time spent on every layer in the best round."""
    layers = report.best.layers
    series = [("seconds", [layer.seconds for layer in layers], BLUE)]
    return _by_layer([layer.name for layer in layers], series, "seconds", logarithmic=False)


def rounds(report: Report) -> str:
    """Loss of every round with the best starred, and beneath it the layers' mean error against the dense weights."""
    numbers = [record.index + 1 for record in report.rounds]
    figure, (upper, lower) = _figure(5.0, rows=2)
    for label, colour, values in (
        ("calibration", BLUE, [record.loss_calibration for record in report.rounds]),
        ("held-out", ORANGE, [record.loss_heldout for record in report.rounds]),
    ):
        known = [(number, value) for number, value in zip(numbers, values, strict=True) if value is not None]
        if known:
            upper.plot(*zip(*known, strict=True), marker="o", color=colour, label=label)
    if report.dense_loss is not None:
        upper.axhline(report.dense_loss, color=GREY, linestyle="--", label="dense, held-out")
    best = report.best
    starred = best.loss_heldout if best.loss_heldout is not None else best.loss_calibration
    if starred is not None:
        upper.plot(best.index + 1, starred, marker="*", markersize=17, color=ORANGE, linestyle="none", label="best")
    upper.set_ylabel(report.loss_name)
    upper.legend(frameon=False, ncols=2)
    errors = [mean_error(record) for record in report.rounds]
    lower.plot(numbers, [float("nan") if value is None else value for value in errors], marker="o", color=GREEN)
    lower.set_ylabel("mean layer error\nagainst dense")
    lower.set_xlabel("round")
    for axes in (upper, lower):
        axes.xaxis.get_major_locator().set_params(integer=True)
    return _svg(figure)


def comparison(scores: dict[str, dict[str, float]], metric: str) -> str:
    """One metric of several methods as bars, the dense network in grey."""
    entries = {name: values[metric] for name, values in scores.items() if metric in values}
    best = (max if higher_is_better(metric) else min)(
        (name for name in entries if name != "dense"), key=lambda name: entries[name], default=""
    )
    figure, (axes,) = _figure(0.9 + 0.42 * len(entries))
    positions = range(len(entries))
    colours = [GREY if name == "dense" else GREEN if name == best else BLUE for name in entries]
    axes.barh(positions, list(entries.values()), color=colours, height=0.66)
    for position, value in zip(positions, entries.values(), strict=True):
        axes.annotate(score(value), (value, position), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(positions, list(entries))
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel(f"{metric} ({'higher' if higher_is_better(metric) else 'lower'} is better)")
    axes.grid(axis="y", visible=False)
    return _svg(figure)


def _by_layer(names: list[str], series: list[tuple[str, list[float], str]], label: str, logarithmic: bool) -> str:
    named = len(names) <= _NAMED_LAYERS
    figure, (axes,) = _figure(1.1 + 0.23 * len(names) if named else 3.2)
    positions = list(range(len(names)))
    for name, values, colour in series:
        if named:
            # A ring for what was asked, so that it shows around what was got.
            look = {"markersize": 9, "markerfacecolor": "none"} if name == "asked" else {"markersize": 5.5}
            axes.plot(values, positions, marker="o", linestyle="none", color=colour, label=name, **look)
        else:
            axes.plot(positions, values, linewidth=1.3, color=colour, label=name)
    value_axis = "x" if named else "y"
    if named:
        axes.set_yticks(positions, _short_names(names))
        axes.invert_yaxis()
        axes.set_xlabel(label)
    else:
        axes.set_xlabel("layer, in the order of the network")
        axes.set_ylabel(label)
    if logarithmic:
        axes.set(**{f"{value_axis}scale": "log"})
    elif label == "zeros, %":
        axes.set(**{f"{value_axis}lim": (0, 100)})
    else:
        axes.set(**{f"{value_axis}lim": (0, None)})
    if len(series) > 1:
        figure.legend(frameon=False, ncols=3, loc="outside upper left", columnspacing=1, handletextpad=0.3)
    return _svg(figure)


def _short_names(names: list[str], longest: int = 26) -> list[str]:
    """Names without the path that all of them begin with, cut from the left where still long."""
    paths = [name.split(".") for name in names]
    shared = 0
    while len(names) > 1 and all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    short = [".".join(path[shared:]) for path in paths]
    return [name if len(name) <= longest else "…" + name[-longest:] for name in short]


def _figure(height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure 5 inches wide: its text stays readable when a phone shows it 360 points wide."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(5.0, height), layout="constrained")
        axes = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
        for each in axes:
            each.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


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
}
