"""Tables of a report for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from iobs.core.formats import best_name, duration, percent, plural, score, significant, size
from iobs.pruning.report import COUNTS, AuditRow, LayerRecord, Report, RoundRecord
from iobs.pruning.structured_report import StructuredReport

_NAME = 24  # least width of names of layers


def summary_lines(report: Report) -> list[str]:
    """Summary of a run in a few lines: zeros, loss, best round, time and memory."""
    lines = report.sentences() if isinstance(report, StructuredReport) else _counted(report)
    if report.best.loss_heldout is not None:
        text = f"{report.loss_name} on {heldout_samples(report)}: {significant(report.best.loss_heldout, 4)}"
        lines.append(text + (f" (dense {significant(report.dense_loss, 4)})" if report.dense_loss is not None else ""))
    if len(report.rounds) > 1:
        rounds = sum(record.kind == "projection" for record in report.rounds)
        of_all = f" of {rounds}" if report.best.kind == "projection" else ""
        held_out = report.best.loss_heldout is not None
        lines.append(f"best by {'held-out' if held_out else 'calibration'} samples: {round_name(report.best)}{of_all}")
    of = {metric: report.certainty(metric) for metric in (score_names(report.scores) if report.scores else [])}
    lines += [f"{metric} is of {text}" for metric, text in of.items() if text]
    lines += report.cautions
    lines.append(f"{duration(report.seconds)}, peak memory {size(report.peak_memory_bytes)}")
    return lines


def _counted(report: Report) -> list[str]:
    """Zeros, coverage and bits, a line each."""
    counted = f"{report.zeros:,} of {report.weights:,} weights in {plural(len(report.audit), 'layer')}"
    lines = [f"{percent(report.sparsity, 2)} zeros: {counted}", *report.coverage.lines()]
    if report.bits_per_weight is not None:
        lines.append(f"{report.bits_per_weight:.3f} bits a weight in these layers, masks, scales and tables counted")
    return lines


def widths_table(report: StructuredReport) -> Table:
    """Table of the units of every site before and after."""
    table = titled_table("Units", ("layer", "units"), ("before", "after", "error"))
    for record in report.widths:
        table.add_row(record.name, record.kind, f"{record.before:,}", f"{record.after:,}", significant(record.error))
    return table


def layers_table(report: Report, limit: int | None = None) -> Table:
    """Table of the layers of the best round; with `limit`, only the `limit` layers with the largest errors."""
    layers = report.best.layers
    chosen = layers
    title = of_round("Layers", report)
    if limit is not None and len(layers) > limit:
        worst = {id(layer) for layer in sorted(layers, key=_error, reverse=True)[:limit]}
        chosen = [layer for layer in layers if id(layer) in worst]
        title += f" (the {limit} with the largest errors of {len(layers)})"
    as_asked = all(percent(layer.asked) == percent(layer.sparsity) for layer in layers)
    bits = {row.name: row.bits / row.weights for row in report.audit if row.bits is not None}
    extra, stored = (() if as_asked else ("asked",)), (("bits a weight",) if bits else ())
    numbers = ("shape", *extra, "zeros", *stored, "error", "held-out", "seconds")
    table = titled_table(title, ("layer",), numbers, least=_NAME)
    for layer in chosen:
        table.add_row(
            layer.name,
            " x ".join(map(str, layer.shape)),
            *(() if as_asked else (percent(layer.asked),)),
            percent(layer.sparsity),
            *((f"{bits[layer.name]:.2f}" if layer.name in bits else "–",) if bits else ()),
            significant(layer.error_calibration),
            significant(layer.error_heldout),
            f"{layer.seconds:.2f}",
        )
    return table


def rounds_table(report: Report) -> Table:
    """Table of rounds: losses, mean layer error against the dense weights, time."""
    loss = f"{report.loss_name}, calibration"
    table = titled_table("Rounds", (), ("round", "zeros", loss, "held-out", "layer error", "seconds"), wrap=True)
    for record in report.rounds:
        best = record.index == report.best.index
        table.add_row(
            f"{round_name(record).removeprefix('round ')}{' *' if best else '  '}",
            percent(record.sparsity),
            significant(record.loss_calibration, 4),
            significant(record.loss_heldout, 4),
            significant(mean_error(record)),
            f"{record.seconds:.1f}",
            style="bold" if best else None,
        )
    return table


def scores_table(scores: dict[str, dict[str, float]], title: str = "Scores", counts: bool = False) -> Table:
    """Table of models by metrics, the best sparse model per metric in bold; `counts` adds tokens or samples."""
    metrics = (
        score_names(scores) if not counts else list(dict.fromkeys(name for each in scores.values() for name in each))
    )
    table = titled_table(title, ("model",), metrics, wrap=True)
    for name, cells in score_cells(scores, metrics):
        table.add_row(name, *(Text(text, style="bold green" if best else "") for text, best in cells))
    return table


def score_cells(scores: dict[str, dict[str, float]], metrics: list[str]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """The rows of a table of models by metrics: a name, and for each metric its text and whether it is the best."""
    return [
        (
            name,
            [
                (score(values[metric]), name == best_of(scores, metric)) if metric in values else ("–", False)
                for metric in metrics
            ],
        )
        for name, values in scores.items()
    ]


def audit_table(rows: list[AuditRow]) -> Table:
    """Table of the zeros in every matrix of an audited model, with the bits of matrices on grids."""
    on_grids = any(row.bits is not None for row in rows)
    numbers = ("shape", "weights", "zeros", "share", *(("bits a weight",) if on_grids else ()))
    table = titled_table("Audit: zeros counted one by one", ("layer",), numbers, least=_NAME)
    for row in rows:
        bits = "–" if row.bits is None else f"{row.bits / row.weights:.2f}"
        table.add_row(
            row.name,
            " x ".join(map(str, row.shape)),
            f"{row.weights:,}",
            f"{row.zeros:,}",
            percent(row.sparsity, 2),
            *((bits,) if on_grids else ()),
        )
    return table


def score_names(scores: dict[str, dict[str, float]]) -> list[str]:
    """Names of the metrics in order, without counts."""
    names = dict.fromkeys(name for values in scores.values() for name in values)
    return [name for name in names if name.rpartition(" ")[2] not in COUNTS]


def best_of(scores: dict[str, dict[str, float]], metric: str) -> str | None:
    """The best sparse model by a metric. Returns None with fewer than two sparse models, and for seconds."""
    entries = {name: values[metric] for name, values in scores.items() if name != "dense" and metric in values}
    if len(entries) < 2 or metric == "seconds":
        return None
    return best_name(entries, metric)


def round_name(record: RoundRecord) -> str:
    """Name of a round: "round 2", or "fine-tuning of 600 steps" after the last projection."""
    if record.kind == "projection":
        return f"round {record.index + 1}"
    return f"fine-tuning of {len(record.step_losses)} steps"


def measured_in(record: RoundRecord) -> str:
    """The source of a record's layer errors: "round 2", or the projection before a fine-tuning."""
    if record.kind == "projection":
        return round_name(record)
    start = "the projection" if record.parent is None else f"round {record.parent + 1}"
    return f"{start}, before the {round_name(record)}"


def of_round(title: str, report: Report) -> str:
    """Title of a per-layer table or figure; it names the round if there are several."""
    return f"{title} of {measured_in(report.best)}" if len(report.rounds) > 1 else title


def heldout_samples(report: Report) -> str:
    """Description of the samples behind all held-out losses, also that of the dense network."""
    decided = report.settings.get("decided", {})
    step = decided.get("finetune") or decided.get("rounds", {}).get("finetune")
    altered = isinstance(step, dict) and step.get("augment") is not None
    return "held-out samples" + (" (altered like those of the gradient steps)" if altered else "")


def mean_error(record: RoundRecord) -> float | None:
    """Mean error of the layers against the dense weights. Returns None for fine-tuning rounds, which measure none."""
    if record.kind != "projection" or not record.layers:
        return None
    return sum(layer.error_dense for layer in record.layers) / len(record.layers)


def titled_table(
    title: str, names: Sequence[str], numbers: Sequence[str], *, least: int | None = None, wrap: bool = False
) -> Table:
    """A table without rows: columns of names, of which long ones are folded, and then columns of numbers.

    Args:
        title: of the table.
        names: headings of the columns of names.
        numbers: headings of the columns of numbers.
        least: least width of a column of names.
        wrap: headings of numbers may have several lines.
    """
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold", min_width=least)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=not wrap)
    return table


def _error(layer: LayerRecord) -> float:
    return layer.error_calibration
