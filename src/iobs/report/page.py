"""The report as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from iobs.pruning.report import WORTH, Report
from iobs.report import plots
from iobs.report.numbers import duration, percent, score, significant, size
from iobs.report.tables import (
    COUNTS,
    best_of,
    heldout_samples,
    mean_error,
    measured_in,
    of_round,
    round_name,
    score_names,
)


def render_page(report: Report) -> str:
    """Render the HTML page, with style and figures embedded; it fetches nothing."""
    title = f"{report.settings.get('model', 'model')} at {percent(report.sparsity)} zeros"
    sections = [
        _facts(report),
        _scores(report),
        _rounds(report),
        _errors(report),
        _sparsity(report),
        _picture("Where the zeros went: allocation over layers", _ALLOCATION_CAPTION, plots.allocation(report))
        if report.allocation
        else "",
        _seconds(report),
        _notes(report),
        _layers(report),
        _settings(report),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n{body}\n<footer>Written by iobs.</footer></main></body></html>\n"
    )


def _facts(report: Report) -> str:
    facts = [(percent(report.sparsity, 2), f"zeros: {report.zeros:,} of {report.weights:,} weights, each counted")]
    # The last entry is the pruned model; the others are for comparison.
    dense, pruned = report.scores.get("dense", {}), next(reversed(report.scores.values()), {})
    facts += [
        (f"{score(dense[metric])} → {score(pruned[metric])}", f"{metric}, dense → pruned")
        for metric in pruned
        if metric in dense and metric not in COUNTS and pruned is not dense
    ]
    if report.best.loss_heldout is not None:
        text = f"{report.loss_name} on {heldout_samples(report)}"
        text += f"; dense {significant(report.dense_loss, 4)}" if report.dense_loss is not None else ""
        facts.append((significant(report.best.loss_heldout, 4), text))
    if len(report.rounds) > 1:
        kind = "calibration" if report.best.loss_heldout is None else "held-out"
        facts.append((round_name(report.best).capitalize(), f"best by loss on {kind} samples"))
    facts.append((duration(report.seconds), f"total time; peak memory {size(report.peak_memory_bytes)}"))
    cards = "".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in facts)
    return f'<div class="facts">{cards}</div>'


def _scores(report: Report) -> str:
    if not report.scores:
        return ""
    metrics = score_names(report.scores)
    rows = []
    for name, values in report.scores.items():
        cells = [
            f"<b>{score(values[metric])}</b>"
            if metric in values and name == best_of(report.scores, metric)
            else score(values[metric])
            if metric in values
            else "–"
            for metric in metrics
        ]
        rows.append([escape(name), *cells])
    pictures = "".join(
        _image(plots.comparison(report.scores, metric), f"{metric} by method")
        for metric in metrics
        if metric != "seconds" and sum(metric in values for values in report.scores.values()) > 2
    )
    return f"<section><h2>Scores</h2>{_table(['model', *metrics], rows)}{pictures}</section>"


def _rounds(report: Report) -> str:
    if len(report.rounds) < 2 or report.best.loss_calibration is None:  # one-shot baselines measure no loss
        return ""
    rows = [
        [
            f"{escape(round_name(record))}{' ★' if record.index == report.best.index else ''}",
            percent(record.sparsity),
            significant(record.loss_calibration, 4),
            significant(record.loss_heldout, 4),
            significant(mean_error(record)),
            duration(record.seconds),
        ]
        for record in report.rounds
    ]
    headings = ["round", "zeros", f"{report.loss_name}, calibration", "held-out", "mean layer error", "time"]
    judges = "calibration samples" if report.best.loss_heldout is None else heldout_samples(report)
    caption = f"★ marks the round with the lowest loss on {judges} among the rounds at the requested sparsity; "
    caption += "its weights are the result."
    if any(record.kind == "finetune" for record in report.rounds):
        caption += f" Fine-tuning must lower the loss by {100 * WORTH:.0f} % to be chosen. "
        caption += "It measures no layer errors."
    return _picture("Rounds", caption, plots.rounds(report), after=_table(headings, rows))


def _errors(report: Report) -> str:
    if not report.best.layers:
        return ""
    caption = _ERROR_CAPTION.format(escape(measured_in(report.best)))
    if report.best.kind == "finetune":
        caption += " Fine-tuning changed these weights afterwards; errors are not measured again."
    return _picture(of_round("Error by layer", report), caption, plots.error_by_layer(report))


def _seconds(report: Report) -> str:
    if not report.best.layers:
        return ""
    caption = f"Seconds spent on each layer in {escape(measured_in(report.best))}."
    return _picture(of_round("Time by layer", report), caption, plots.seconds_by_layer(report))


def _sparsity(report: Report) -> str:
    if not report.best.layers:
        return ""
    caption = "Requested and actual share of zeros in each layer."
    return _picture("Zeros by layer", caption, plots.sparsity_by_layer(report))


def _notes(report: Report) -> str:
    lines = [escape(note) for note in report.notes]
    if report.skipped:
        rows = [[escape(name), escape(reason)] for name, reason in report.skipped.items()]
        lines.append(f"<details><summary>{len(rows)} left dense</summary>{_table(['layer', 'why'], rows)}</details>")
    if not lines:
        return ""
    return "<section><h2>Notes</h2><ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul></section>"


def _layers(report: Report) -> str:
    rows = [
        [
            escape(layer.name),
            " × ".join(map(str, layer.shape)),
            percent(layer.sparsity, 2),
            significant(layer.error_calibration),
            significant(layer.error_heldout),
            significant(layer.error_dense),
            significant(layer.damping),
            f"{layer.dead_columns}",
            f"{layer.seconds:.2f}",
        ]
        for layer in report.best.layers
    ]
    headings = ["layer", "shape", "zeros", "error", "held-out", "against dense", "damping", "dead inputs", "seconds"]
    table = _table(headings, rows)
    title = escape(of_round("Layers", report))
    return f"<section><h2>{title}</h2><details><summary>All {len(rows)} layers</summary>{table}</details></section>"


def _settings(report: Report) -> str:
    sections = [("", {name: value for name, value in report.settings.items() if name not in ("recipe", "decided")})]
    sections += [(f"{name}: ", report.settings.get(name, {})) for name in ("recipe", "decided")]
    rows = [
        [escape(prefix + name), escape(_setting(value))] for prefix, some in sections for name, value in some.items()
    ]
    return f"<section><h2>Settings</h2>{_table(['setting', 'value'], rows, words=True)}</section>"


def _setting(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_setting(entry)}" for name, entry in value.items() if entry is not None)
    return "–" if value is None else str(value)


def _picture(title: str, caption: str, svg: str, after: str = "") -> str:
    return f"<section><h2>{escape(title)}</h2><p>{caption}</p>{_image(svg, title)}{after}</section>"


def _image(svg: str, text: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{data}">'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: bool = False) -> str:
    """HTML table; cells are HTML, headings are plain text. It scrolls sideways on a narrow screen."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


_ERROR_CAPTION = (
    "Relative error ‖VX − Y‖² / ‖Y‖² of each layer's sparse weight V in {}, on calibration and on held-out "
    "samples. Y is the output of the weights that were pruned in this round, which gradient steps may have changed; "
    "“against dense” uses the output of the dense weights."
)

_ALLOCATION_CAPTION = (
    "Left: share of zeros allocated to each layer; the dashed line is the share of the whole network. Right: predicted "
    "cost per zero in each layer at that common share, from the measured error curves, relative to the mean. Layers "
    "with a higher cost get fewer zeros."
)

_STYLE = """
:root { color: #243b53; background: #f5f7fa; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0; }
main { max-width: 52rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: 0 0 .75rem; color: #52606d; font-size: .9rem; }
section { background: #fff; border-radius: .6rem; padding: 1rem; margin: 1rem 0; box-shadow: 0 1px 2px #0001; }
.facts { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); }
.facts div { background: #fff; border-radius: .6rem; padding: .8rem 1rem; box-shadow: 0 1px 2px #0001; }
.facts b { display: block; font-size: 1.35rem; }
.facts span { color: #52606d; font-size: .85rem; }
img { display: block; width: 100%; max-width: 34rem; margin: .5rem auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; margin: .5rem 0; }
th, td { text-align: right; padding: .3rem .5rem; border-bottom: 1px solid #e4e7eb; }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, .words td, .words th { text-align: left; }
.words td { white-space: normal; overflow-wrap: anywhere; }
.words td:first-child { overflow-wrap: normal; }
summary { cursor: pointer; color: #2f6f9f; }
ul { padding-left: 1.2rem; margin: 0; }
footer { color: #829ab1; font-size: .8rem; text-align: center; padding: 1rem; }
"""
