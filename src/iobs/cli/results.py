"""What prune and demo do with a pruned model: score it, write it, prove its zeros."""

from __future__ import annotations

from pathlib import Path

from iobs.cli.progress import Steps
from iobs.data import Source, TextSource, open_source
from iobs.evaluate import evaluate
from iobs.models import LoadedModel
from iobs.models.companions import with_licence
from iobs.prune.audit import audit, require_promised
from iobs.prune.record import Report
from iobs.report import render_card, write_report

_TRIED = 8  # samples that tell whether evaluation data fit


def score(loaded: LoadedModel, source: Source | None, length: int, description: str) -> dict[str, float]:
    """Scores on evaluation data; none where there is no data to score on."""
    if source is None:
        return {}
    with Steps(description) as steps:
        return evaluate(loaded, source, length=length, progress=steps.update)


def open_evaluation(loaded: LoadedModel, specs: list[str]) -> Source:
    """Open evaluation data, once for all models that are compared on them: a function may give others the next time.

    A few of those that may not fit the network are scored.

    Raises:
        DataError: they do not fit, or cannot be read.
    """
    source = open_source(specs, "evaluation", loaded)
    if not isinstance(source, TextSource):
        evaluate(loaded, source, limit=_TRIED)
    return source


def write_results(loaded: LoadedModel, report: Report, directory: Path, model_folder: str | None) -> None:
    """Write the model with its card, count the zeros in its files, and write the report.

    Args:
        loaded: the pruned model.
        report: its report.
        directory: an existing directory, where the report goes.
        model_folder: the folder inside it for the model, or None for the directory itself.

    Raises:
        AuditError: the files hold fewer zeros than the report says.
    """
    folder = directory if model_folder is None else directory / model_folder
    folder.mkdir(exist_ok=True)
    loaded.write(folder)
    require_promised(audit(folder), report.audit, folder)  # a conversion on the way to the disk could have lost a zero
    library = "transformers" if (folder / "config.json").is_file() else None
    write_card(report, library, folder, folder / "README.md")
    write_report(report, directory)


def write_card(report: Report, library: str | None, folder: Path, original: Path) -> None:
    """Write the model card, with the licence that the original's card states, if there is one."""
    card = render_card(report, str(report.settings["model"]), library)
    (folder / "README.md").write_text(with_licence(card, original), encoding="utf8")
