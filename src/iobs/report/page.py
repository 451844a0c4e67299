"""The report as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from iobs.core.formats import duration, percent, plural, score, significant, size, without_folders
from iobs.pruning.coverage import KINDS
from iobs.pruning.report import WORTH, Report, Sample
from iobs.pruning.structured_report import StructuredReport, WidthRecord
from iobs.report import plots
from iobs.report.tables import (
    heldout_samples,
    mean_error,
    measured_in,
    of_round,
    round_name,
    score_cells,
    score_names,
)

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf8")
_ALIKE = 0.005  # sparsities of layers within this range count as equal


def render_page(report: Report) -> str:
    """Render the HTML page, with style and figures embedded; it fetches nothing."""
    units = report if isinstance(report, StructuredReport) else None
    amount = (
        f"at {percent(report.sparsity)} zeros" if units is None else f"without {percent(units.removed)} of its units"
    )
    title = f"{without_folders(str(report.settings.get('model', 'model')))} {amount}"
    sections = [
        _command(report),
        _facts(report),
        _coverage(report) if units is None else render_widths(units),
        _samples(report),
        _scores(report),
        _rounds(report),
        _zeros(report) if units is None else "",
        _errors(report),
        _notes(report),
        _layers(report),
        _settings(report),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f'<body class="iobs"><main><h1>{escape(title)}</h1>\n{body}\n<footer>Written by iobs.</footer></main></body>'
        "</html>\n"
    )


def render_summary(report: Report) -> str:
    """The facts and the coverage as a part of another page, such as a notebook."""
    worst = sorted(report.layers, key=lambda layer: -layer.error_calibration)[:5]
    rows = [[escape(layer.name), percent(layer.sparsity), significant(layer.error_calibration)] for layer in worst]
    table = _table(["largest layer errors", "zeros", "relative error"], rows) if rows else ""
    errors = f"<section>{table}</section>" if table else ""
    main = render_widths(report) if isinstance(report, StructuredReport) else f"{_coverage(report)}{errors}"
    return f'<style>{_STYLE}</style><div class="iobs"><main>{_facts(report)}{main}</main></div>'


def _command(report: Report) -> str:
    command = report.settings.get("command")
    return f"<pre>{escape(without_folders(str(command)))}</pre>" if command else ""


def _facts(report: Report) -> str:
    coverage, audited = report.coverage, plural(len(report.audit), "layer")
    facts = [
        (percent(report.sparsity, 2), f"zeros in {audited}: {report.zeros:,} of {report.weights:,}"),
        (percent(coverage.share), f"of the weight entries pruned; {percent(coverage.sparsity)} of all parameters zero"),
    ]
    # The last entry is the pruned model; the others are for comparison.
    dense, pruned = report.scores.get("dense", {}), next(reversed(report.scores.values()), {})
    for metric in score_names({"": pruned}) if pruned is not dense else []:
        if metric in dense:
            of = report.certainty(metric)
            change = f"{score(dense[metric])} → {score(pruned[metric])}"
            facts.append((change, f"{metric}, dense → pruned{f', {of}' if of else ''}"))
    if report.best.loss_heldout is not None:
        text = f"{report.loss_name} on {heldout_samples(report)}"
        text += f"; dense {significant(report.dense_loss, 4)}" if report.dense_loss is not None else ""
        facts.append((significant(report.best.loss_heldout, 4), text))
    if len(report.rounds) > 1:
        kind = "calibration" if report.best.loss_heldout is None else "held-out"
        facts.append((round_name(report.best).capitalize(), f"best by loss on {kind} samples"))
    facts.append((duration(report.seconds), f"total time; peak memory {size(report.peak_memory_bytes)}"))
    facts = facts[2:] if isinstance(report, StructuredReport) else facts
    cards = "".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in facts)
    costs = _costs(report) if isinstance(report, StructuredReport) else ""
    return f'{costs}<div class="facts">{cards}</div>'


def _coverage(report: Report) -> str:
    """A bar of all weight entries: zeros, kept entries of pruned layers, and dense entries by kind."""
    coverage = report.coverage
    if not coverage.weights:
        return ""
    zeros = min(report.zeros, coverage.pruned)
    parts = [("--zeros", zeros, "zeros", ""), ("--kept", coverage.pruned - zeros, "kept entries of pruned layers", "")]
    parts += [
        (f"--c{min(number, 5)}", entries, f"dense: {KINDS[kind]}", coverage.names(kind))
        for number, (kind, entries) in enumerate(coverage.by_kind.items())
    ]
    bar = "".join(
        f'<span style="width:{100 * entries / coverage.weights:.2f}%;background:var({colour})"></span>'
        for colour, entries, _, _ in parts
    )
    legend = "".join(
        f'<li><i style="background:var({colour})"></i><b>{percent(entries / coverage.weights)}</b> {escape(text)}'
        f"{f' <small>{escape(names)}</small>' if names else ''}</li>"
        for colour, entries, text, names in parts
        if entries
    )
    vectors = f"{coverage.vectors:,} further parameters (biases, normalisations) are never pruned."
    rest = vectors if coverage.vectors else ""
    return (
        f"<section><h2>What was pruned</h2><p>All {coverage.weights:,} weight entries of the model. {rest}</p>"
        f'<div class="bar">{bar}</div><ul class="legend">{legend}</ul></section>'
    )


def _costs(report: StructuredReport) -> str:
    """Cards of the shares that are left of every cost."""
    cards = "".join(
        f"<div><b>{percent(cost.share)}</b><span>of the {escape(cost.name)} {escape(cost.where)} are left: "
        f"{significant(cost.before)} → {significant(cost.after)}</span></div>"
        for cost in report.costs
    )
    return f'<div class="facts">{cards}</div>'


def render_widths(report: StructuredReport) -> str:
    """A bar for every site: the units that are left, of those before. Bars of one kind of units have one scale."""
    widest: dict[str, int] = {}
    for record in report.widths:
        widest[record.kind] = max(record.before, widest.get(record.kind, 1))
    rows = "".join(_width_row(record, widest[record.kind]) for record in report.widths)
    headings = "".join(f"<th>{name}</th>" for name in ("layer", "units", "before", "after", ""))
    legend = "".join(
        f'<li><i style="background:var(--{colour})"></i>{text}</li>'
        for colour, text in (("kept", "units that are left"), ("zeros", "removed units"))
    )
    return (
        f'<section><h2>Widths before and after</h2><ul class="legend">{legend}</ul><div class="scroll"><table>'
        f"<thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _width_row(record: WidthRecord, widest: int) -> str:
    before, after = 100 * record.before / widest, 100 * record.after / max(1, record.before)
    bar = (
        f'<div role="img" aria-label="{record.after} of {record.before}" style="width:13rem">'
        f'<div style="width:{before:.2f}%;background:var(--zeros)">'
        f'<div style="width:{after:.2f}%;height:.75rem;background:var(--kept)"></div></div></div>'
    )
    cells = (escape(record.name), escape(record.kind), f"{record.before:,}", f"{record.after:,}", bar)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _samples(report: Report) -> str:
    """Inputs with the outputs of the dense and of the pruned model."""
    shown = ""
    images = [sample for sample in report.samples if sample.is_image]
    for sample in report.samples:
        if not sample.is_image:
            shown += (
                f'<p class="prompt">{escape(sample.shown)} …</p><div class="pairs"><div><b>dense</b><br>'
                f"{escape(sample.dense)}</div><div><b>pruned</b><br>{escape(sample.pruned)}</div></div>"
            )
    if images:
        shown += f'<div class="gallery">{"".join(map(_captioned, images))}</div>'
    return f"<section><h2>Before and after</h2>{shown}</section>" if shown else ""


def _captioned(sample: Sample) -> str:
    changed = ' class="changed"' if sample.pruned != sample.dense else ""
    truth = f"<br><b>label</b> {escape(sample.label)}" if sample.label is not None else ""
    return (
        f'<figure><img alt="calibration sample" src="{escape(sample.shown)}"><figcaption>'
        f"<b>dense</b> {escape(sample.dense)}<br><b>pruned</b> <span{changed}>{escape(sample.pruned)}</span>"
        f"{truth}</figcaption></figure>"
    )


def _scores(report: Report) -> str:
    if len(report.scores) <= 2:  # the facts at the top show them
        return ""
    metrics = score_names(report.scores)
    rows = [
        [escape(name), *(f"<b>{text}</b>" if best else text for text, best in cells)]
        for name, cells in score_cells(report.scores, metrics)
    ]
    figures = "".join(
        _image(plots.comparison(report.scores, metric), f"{metric} by method")
        for metric in metrics
        if metric != "seconds" and sum(metric in values for values in report.scores.values()) > 2
    )
    return f"<section><h2>Scores</h2>{_table(['model', *metrics], rows)}{figures}</section>"


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
    return _figure("Rounds", caption, plots.rounds(report), after=_table(headings, rows))


def _errors(report: Report) -> str:
    if not report.best.layers:
        return ""
    caption = _ERROR_CAPTION.format(escape(measured_in(report.best)))
    if len(report.rounds) > 1:
        caption += _AGAINST_DENSE
    if report.best.kind == "finetune":
        caption += " Fine-tuning changed these weights afterwards; errors are not measured again."
    return _figure(of_round("Error by layer", report), caption, plots.error_by_layer(report))


def _zeros(report: Report) -> str:
    """Figure of the zeros by kind of layer and by depth; one sentence if all layers have the same share."""
    rows = report.audit
    if not rows:
        return ""
    least, most = (choose(row.sparsity for row in rows) for choose in (min, max))
    if most - least < _ALIKE:
        text = f"Every pruned layer has {percent(report.sparsity)} zeros."
        return f"<section><h2>Where the zeros went</h2><p>{text}</p></section>"
    caption = "Share of zeros by kind of layer, and of every layer in the order of the network. "
    caption += "The dashed line is the share of all pruned layers together."
    return _figure("Where the zeros went", caption, plots.zeros(report))


def _notes(report: Report) -> str:
    lines = [escape(note) for note in report.notes]
    if report.skipped:
        rows = [[escape(weight.name), escape(weight.reason), f"{weight.entries:,}"] for weight in report.coverage.dense]
        table = _table(["weight", "why", "entries"], rows, words=True)
        lines.append(f"<details><summary>{len(rows)} left dense</summary>{table}</details>")
    if not lines:
        return ""
    return "<section><h2>Notes</h2><ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul></section>"


def _layers(report: Report) -> str:
    bits = {row.name: row.bits / row.weights for row in report.audit if row.bits is not None}
    kept = set(report.refitted) if isinstance(report, StructuredReport) else set()
    rows = [
        [
            escape(layer.name),
            " × ".join(map(str, layer.shape)),
            "none, refitted" if layer.name in kept else percent(layer.sparsity, 2),
            *((f"{bits[layer.name]:.2f}" if layer.name in bits else "–",) if bits else ()),
            significant(layer.error_calibration),
            significant(layer.error_heldout),
            significant(layer.error_dense),
            significant(layer.damping),
            f"{layer.dead_columns}",
            f"{layer.seconds:.2f}",
        ]
        for layer in report.best.layers
    ]
    stored = ["bits a weight"] if bits else []
    errors = ["error", "held-out", "against dense"]
    share = "inputs lost" if isinstance(report, StructuredReport) else "zeros"
    headings = ["layer", "shape", share, *stored, *errors, "damping", "dead inputs", "seconds"]
    table = _table(headings, rows)
    title = escape(of_round("Layers", report))
    return f"<section><h2>{title}</h2><details><summary>All {len(rows)} layers</summary>{table}</details></section>"


def _settings(report: Report) -> str:
    apart = ("recipe", "decided", "command")
    sections = [("", {name: value for name, value in report.settings.items() if name not in apart})]
    sections += [(f"{name}: ", report.settings.get(name, {})) for name in ("recipe", "decided")]
    rows = [
        [escape(prefix + name), escape(without_folders(_setting(value)))]
        for prefix, some in sections
        for name, value in some.items()
    ]
    table = _table(["setting", "value"], rows, words=True)
    return f"<section><h2>Settings</h2><details><summary>All {len(rows)} settings</summary>{table}</details></section>"


def _setting(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_setting(entry)}" for name, entry in value.items() if entry is not None)
    return "–" if value is None else str(value)


def _figure(title: str, caption: str, svg: str, after: str = "") -> str:
    return f"<section><h2>{escape(title)}</h2><p>{caption}</p>{_image(svg, title)}{after}</section>"


def _image(svg: str, text: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img class="figure" alt="{escape(text)}" src="data:image/svg+xml;base64,{data}">'


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: bool = False) -> str:
    """HTML table; cells are HTML, headings are plain text. It scrolls sideways on a narrow screen."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


_ERROR_CAPTION = (
    "Relative error ‖VX − Y‖² / ‖Y‖² of each layer's sparse weight V in {}, on calibration and on held-out samples; Y "
    "is the output that the layer should have."
)
_AGAINST_DENSE = " “Against dense” uses the output of the dense weights for Y."
