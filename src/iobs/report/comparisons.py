"""Tables and figures of the commands that compare: methods over sparsities, and forms of a model that run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from iobs.core.formats import duration, higher_is_better, score
from iobs.pruning.structured_report import FASTER
from iobs.report.plots import BLUE, GREEN, GREY, INK, ORANGE, drawn, figure_of, logarithmic
from iobs.report.tables import titled_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (GREEN, BLUE, ORANGE, INK, "#7b4fa3", "#b3423a", "#2a9d9a", "#8a6d3b")
_MARKERS = ("o", "s", "^")  # change when there are more methods than colours
_KINDS = {
    "embeddings": "embeddings",
    "matrices": "matrices",
    "others": "biases, norms and buffers",
    "copies": "copies for the compiled step",
}


# ---- methods over sparsities
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
    patterns = list(dict.fromkeys(trial.pattern for trial in trials))
    table = titled_table(title, ("method",), patterns)
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


# ---- forms of a model that run
@dataclass(frozen=True)
class RunningRow:
    """One form of a model, measured.

    Args:
        form: name of the form, such as "dense float32".
        speed: tokens, images or texts a second, median of the repetitions.
        unit: "tokens/s", "images/s" or "texts/s".
        prompt_speed: tokens of a prompt a second; None for a model that generates no text.
        held: bytes of all tensors in this form, by kind: "embeddings", "matrices", "others" (biases, norms, buffers),
            and "copies" that the compiled step keeps beside them.
        peak_bytes: greatest memory of the process while it ran; None where the system does not tell.
    """

    form: str
    speed: float
    unit: str
    prompt_speed: float | None
    held: Mapping[str, int]
    peak_bytes: int | None

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in this form."""
        return sum(self.held.values())


@dataclass(frozen=True)
class BesideRow:
    """Seconds of one sample in a model and in another one beside it, in one runtime, both in float32.

    Args:
        beside: name of the other model, such as the one before units were removed.
        model: name of the model.
        runtime: name of the runtime.
        seconds_beside: of the other model.
        seconds: of the model.
        entries_beside: number of parameters of the other model.
        entries: number of parameters of the model.
    """

    beside: str
    model: str
    runtime: str
    seconds_beside: float
    seconds: float
    entries_beside: int
    entries: int

    @property
    def sentence(self) -> str:
        """The share of the time, and whether the model is faster."""
        share = self.seconds / self.seconds_beside
        if share > FASTER:
            return f"NOT faster than {self.beside} in {self.runtime}: {share:.2f} of its time."
        return f"{1 / share:.2f} times as fast as {self.beside} in {self.runtime}: {share:.2f} of its time."


def beside_table(rows: list[BesideRow]) -> Table:
    """Table of the two models (rows) by milliseconds in each runtime, and parameters."""
    numbers = (*(f"ms in {row.runtime}" for row in rows), "million parameters")
    table = titled_table("One sample in float32 on this machine", ("model",), numbers, wrap=True)
    first = rows[0]
    times = [_short(1e3 * row.seconds_beside) for row in rows], [_short(1e3 * row.seconds) for row in rows]
    table.add_row(first.beside, *times[0], _short(first.entries_beside / 1e6))
    table.add_row(first.model, *times[1], _short(first.entries / 1e6))
    return table


def running_table(rows: list[RunningRow]) -> Table:
    """Table of forms (rows) by speed, bytes and memory."""
    unit = rows[0].unit
    prompts = ["prompt tokens/s"] if any(row.prompt_speed is not None for row in rows) else []
    numbers = (unit, *prompts, "MB of weights", "MB of memory")
    table = titled_table("Speed and memory on this machine", ("form",), numbers, wrap=True)
    for row in rows:
        prompt = [] if row.prompt_speed is None else [_short(row.prompt_speed)]
        memory = "unknown" if row.peak_bytes is None else _short(row.peak_bytes / 1e6)
        table.add_row(row.form, _short(row.speed), *prompt, _short(row.bytes / 1e6), memory)
    return table


def running_notes(rows: list[RunningRow]) -> list[str]:
    """Lines that say what the columns of the table count."""
    lines = ["MB of weights: every tensor that the form holds in memory."]
    for row in rows:
        parts = [f"{_short(size / 1e6)} {_KINDS[kind]}" for kind, size in row.held.items() if size]
        lines.append(f"  {row.form}: {', '.join(parts)}")
    return [*lines, "MB of memory: the most that the process took while it ran, Python and torch included."]


def running_line(rows: list[RunningRow]) -> str:
    """Last row against the fastest of the others, in one line."""
    before, after = max(rows[:-1], key=lambda row: row.speed), rows[-1]
    return (
        f"{after.form} against {before.form}, the fastest dense form: {after.speed / before.speed:.2f} times the "
        f"{after.unit}, {after.bytes / before.bytes:.0%} of the bytes."
    )


@drawn
def running_figure(rows: list[RunningRow]) -> Figure:
    """Bars of speed, bytes and memory of every form."""
    peaks = [row.peak_bytes or 0 for row in rows]
    panels = [(rows[0].unit, [row.speed for row in rows]), ("MB of weights", [row.bytes / 1e6 for row in rows])]
    if all(peaks):
        panels.append(("MB of memory", [size / 1e6 for size in peaks]))
    colours = [GREY] * (len(rows) - 1) + [BLUE]
    figure, places = figure_of((0.6 + 0.35 * len(rows)) * len(panels), rows=len(panels))
    for axes, (name, values) in zip(places, panels, strict=True):
        bars = axes.barh(range(len(rows)), values, color=colours)
        axes.bar_label(bars, [_short(value) for value in values], padding=3)
        axes.set_yticks(range(len(rows)), [row.form for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(values))
        axes.set_xlabel(name)
    return figure


def _short(value: float) -> str:
    """A number with three digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
