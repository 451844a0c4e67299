"""Model card of a pruned network."""

from __future__ import annotations

import os

from iobs.core.formats import percent, plural, without_folders
from iobs.pruning.coverage import KINDS
from iobs.pruning.report import JsonObject, Report
from iobs.pruning.structured_report import StructuredReport
from iobs.report.tables import score_cells, score_names


def render_card(report: Report, base_model: str, library: str | None) -> str:
    """Render the model card (README.md) of an output directory: recipe, coverage, scores; no absolute path.

    Args:
        report: the run's report.
        base_model: the pruned model, as the user named it.
        library: "transformers" if transformers can load the directory, else None.
    """
    settings, name = report.settings, without_folders(base_model)
    front = ["---", "tags:", "- sparse", "- pruned", "- iobs"]
    front += [f"library_name: {library}"] if library else []
    front += [f"base_model: {base_model}"] if library and _on_the_hub(base_model) else []
    command = settings.get("command")
    lines = [
        *front,
        "---",
        "",
        *_result(report, name),
        "",
        *_recipe(report),
        *(["```", without_folders(str(command)), "```", ""] if command else []),
        *([] if isinstance(report, StructuredReport) else _coverage(report)),
        *_scores(report),
        "`report.html` shows all results, `report.json` holds the same for programs.",
        "",
    ]
    return "\n".join(lines)


def _result(report: Report, name: str) -> list[str]:
    """The heading and the sentences that say what was removed."""
    if isinstance(report, StructuredReport):
        heading = f"# {name} without {percent(report.removed)} of its units"
        return [heading, "", *(f"- {line}" for line in report.sentences())]
    return [
        f"# {name}, {percent(report.sparsity)} sparse",
        "",
        f"{name} with {report.zeros:,} of the {report.weights:,} weights in "
        f"{plural(len(report.audit), 'layer')} set to zero.",
        "The zeros are stored as ordinary zeros, so the directory loads like any other; `iobs inspect` counts them.",
    ]


def _on_the_hub(name: str) -> bool:
    """True if a name can be that of a model on the hub, "owner/model"."""
    return name.count("/") == 1 and not os.path.exists(name) and not name.startswith(("/", ".", "~"))


def _recipe(report: Report) -> list[str]:
    settings, recipe = report.settings, report.settings.get("recipe", {})
    pattern = settings.get("pattern")
    if report.allocation and pattern is not None:
        pattern = str(pattern).removesuffix(" per layer")  # the count is that of all layers together
    facts = {
        "pattern": pattern,
        "sparsity of single layers": "divided by the damage to the model" if report.allocation else None,
        "solver": recipe.get("solver"),
        "target": recipe.get("target"),
        "rounds": len([record for record in report.rounds if record.kind == "projection"]),
        "block reconstruction": _blocks(settings.get("decided", {}).get("blocks")),
        "gradient steps between and after rounds": sum(len(record.step_losses) for record in report.rounds),
        "calibration": settings.get("calibration"),
        "calibration samples": settings.get("samples"),
        "seed": settings.get("seed"),
    }
    lines = [f"- {name}: {without_folders(str(value))}" for name, value in facts.items() if value is not None]
    return ["## Recipe", "", *lines, ""]


def _blocks(fit: JsonObject | None) -> str | None:
    """The steps of a block reconstruction, in words."""
    if not fit:
        return None
    window = "one block" if fit["window"] == 1 else f"{fit['window']} blocks"
    whole = f", then at most {fit['network_steps']:,} of the whole network" if fit["network_steps"] else ""
    return f"at most {fit['steps']:,} gradient steps in each window of {window}{whole}"


def _coverage(report: Report) -> list[str]:
    coverage = report.coverage
    if not coverage.weights:
        return []
    rows = [f"| pruned layers | {coverage.pruned:,} | {percent(coverage.share)} |"]
    rows += [
        f"| dense: {KINDS[kind]} | {entries:,} | {percent(entries / coverage.weights)} |"
        for kind, entries in coverage.by_kind.items()
    ]
    return [
        "## Coverage",
        "",
        f"{coverage.zeros:,} of all {coverage.parameters:,} parameters are zero ({percent(coverage.sparsity)}).",
        "",
        "| weight entries | number | share |",
        "| --- | ---: | ---: |",
        *rows,
        "",
    ]


def _scores(report: Report) -> list[str]:
    metrics = score_names(report.scores)
    if not metrics:
        return []
    return [
        "## Evaluation",
        "",
        f"| model | {' | '.join(metrics)} |",
        f"| --- |{' ---: |' * len(metrics)}",
        *(
            f"| {name} | {' | '.join(text for text, _ in cells)} |"
            for name, cells in score_cells(report.scores, metrics)
        ),
        "",
    ]
