"""Score and write a pruned model, and check its zeros, for prune and demo."""

from __future__ import annotations

from pathlib import Path

from iobs.cli.progress import Steps
from iobs.data import Source, TextSource, open_source
from iobs.evaluate import evaluate
from iobs.models import LoadedModel
from iobs.models.output import with_licence
from iobs.pruning.audit import audit, require_promised
from iobs.pruning.report import Report
from iobs.report import render_card, write_report

_TRIED = 8  # samples of a trial run that checks whether evaluation data fits the model


def score(loaded: LoadedModel, source: Source | None, length: int, description: str) -> dict[str, float]:
    """Scores on evaluation data; empty without a source."""
    if source is None:
        return {}
    with Steps(description) as steps:
        return evaluate(loaded, source, length=length, progress=steps.update)


def open_evaluation(loaded: LoadedModel, specs: list[str]) -> Source:
    """Open evaluation data, once for all compared models: a function may return other data the next time.

    Data other than text is tried on a few samples, to find out early whether it fits the network.

    Raises:
        DataError: the data does not fit the network, or cannot be read.
    """
    source = open_source(specs, "evaluation", loaded)
    if not isinstance(source, TextSource):
        evaluate(loaded, source, limit=_TRIED)
    return source


def write_results(loaded: LoadedModel, report: Report, directory: Path, model_folder: str | None) -> None:
    """Write the model and its card, check the zeros in the written files, and write the report.

    Args:
        loaded: the pruned model.
        report: its report.
        directory: an existing directory for the report.
        model_folder: subfolder of `directory` for the model; None writes the model into `directory`.

    Raises:
        AuditError: the written files hold fewer zeros than the report says.
    """
    folder = directory if model_folder is None else directory / model_folder
    folder.mkdir(exist_ok=True)
    loaded.write(folder)
    require_promised(audit(folder), report.audit, folder)  # a dtype conversion while writing could lose zeros
    library = "transformers" if (folder / "config.json").is_file() else None
    write_card(report, library, folder, folder / "README.md")
    write_report(report, directory)


def write_card(report: Report, library: str | None, folder: Path, original: Path) -> None:
    """Write the model card, with the licence of the original model card if it states one."""
    card = render_card(report, str(report.settings["model"]), library)
    (folder / "README.md").write_text(with_licence(card, original), encoding="utf8", errors="backslashreplace")
