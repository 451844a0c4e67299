"""Model card of a pruned network."""

from __future__ import annotations

from iobs.pruning.report import Report
from iobs.report.numbers import percent, score
from iobs.report.tables import score_names


def render_card(report: Report, base_model: str, library: str | None) -> str:
    """Render the model card (README.md) of an output directory: settings, number of zeros, scores.

    Args:
        report: the run's report.
        base_model: the pruned model, as the user named it.
        library: "transformers" if transformers can load the directory, else None.
    """
    settings = report.settings
    front = ["---", "tags:", "- sparse", "- pruned", "- iobs"]
    front += [f"library_name: {library}"] if library else []
    lines = [
        *front,
        "---",
        "",
        f"# {base_model}, {percent(report.sparsity)} sparse",
        "",
        f"{base_model} with {report.zeros:,} of the {report.weights:,} weights in {len(report.audit)} layers set to "
        f"zero (pattern: {settings.get('pattern')}; solver: {settings.get('recipe', {}).get('solver')}; "
        f"rounds: {len(report.rounds)}).",
        "The zeros are stored as ordinary zeros, so the directory loads like any other; `iobs inspect` counts them.",
        "",
    ]
    lines += _scores(report)
    lines += ["`report.html` shows all results, `report.json` holds the same for programs.", ""]
    return "\n".join(lines)


def _scores(report: Report) -> list[str]:
    metrics = score_names(report.scores)
    if not metrics:
        return []
    return [
        f"| model | {' | '.join(metrics)} |",
        f"| --- |{' ---: |' * len(metrics)}",
        *(
            f"| {name} | {' | '.join(score(values[m]) if m in values else '–' for m in metrics)} |"
            for name, values in report.scores.items()
        ),
        "",
    ]
