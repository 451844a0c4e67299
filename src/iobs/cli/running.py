"""The run of a command: the command line, output, pruning with progress, scores, and what is written at the end."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import iobs
from iobs.cli import console
from iobs.cli.console import ConsoleSteps, say
from iobs.cli.run_file import RunSettings
from iobs.core.files import expanded
from iobs.core.formats import duration, percent, significant
from iobs.data import Source, TextSource, open_source
from iobs.evaluate import evaluate
from iobs.models import LoadedModel
from iobs.models.output import with_licence
from iobs.pruning.audit import audit, require_promised
from iobs.pruning.callbacks import ProgressBar
from iobs.pruning.report import Report, RoundRecord
from iobs.pruning.runtime.ranks import current
from iobs.report import render_card, write_report
from iobs.report.tables import round_name

if TYPE_CHECKING:
    from torch import nn

    from iobs.data import Batch
    from iobs.pruning.callbacks import Callback
    from iobs.pruning.store import Store

# An option in one word with its value, as in --data=FILE and -oDIR.
_OPTION = re.compile(r"--[\w-]+=|-\w(?=.)")


def typed_command(processes: int = 1) -> str:
    """The command that started this process, ready to be typed again.

    Args:
        processes: number of processes that torchrun started.
    """
    start = ["iobs"] if processes == 1 else ["torchrun", f"--nproc-per-node={processes}", "-m", "iobs"]
    return _joined([*start, *sys.argv[1:]])


def shown_command() -> str:
    """The command of this process without the folders of this machine, for the report.

    An absolute path below the current folder becomes relative; of any other absolute path only the name remains.
    """
    return _joined(["iobs", *map(_without_folders, sys.argv[1:])])


def _without_folders(argument: str) -> str:
    option = _OPTION.match(argument)
    start = option.end() if option is not None else 0
    path = expanded(argument[start:])
    if not path.is_absolute():
        return argument
    here = Path.cwd()
    return argument[:start] + (str(path.relative_to(here)) if path.is_relative_to(here) else path.name)


def _joined(words: Sequence[str]) -> str:
    """The words as one line, quoted for the shell of this system."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def prune_with_progress(
    model: nn.Module | Store,
    batches: list[Batch],
    settings: RunSettings,
    checkpoint: Path | None,
    facts: Mapping[str, object],
    callbacks: Sequence[Callback] = (),
) -> Report:
    """Prune a model with the settings of a command line or a recipe.yaml, and progress on the console.

    Args:
        model: as in `iobs.prune`.
        batches: calibration data.
        settings: recipe and options.
        checkpoint: directory of intermediate results, or None.
        facts: further settings for the report, such as the name of the model.
        callbacks: further callbacks of the run.

    Returns:
        The report; its settings begin with the command line and the facts.

    Raises:
        IOBSError: as `iobs.prune`.
    """
    options = settings.options
    with ConsoleSteps("pruning") as steps:
        report = iobs.prune(
            model,
            batches,
            options.pattern,
            settings.recipe,
            include=options.include,
            ignore=options.ignore,
            holdout=options.holdout,
            seed=options.seed,
            callbacks=[Watch(steps), *callbacks],
            checkpoint=checkpoint,
            within=options.within,
        )
    report.settings = {"command": shown_command(), **facts, **report.settings}
    return report


@contextmanager
def saying_how_to_continue(checkpoint: Path | None) -> Iterator[None]:
    """Show, when the user stops a run, what is saved and the command that continues it.

    Args:
        checkpoint: directory of intermediate results; None without --resume.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = typed_command(current().size)
        if checkpoint is None:
            console.warn("Nothing of this run is saved; with --resume a stopped run can be continued.")
        elif any(checkpoint.glob("*.safetensors")):
            console.warn(f"Finished layers and steps are saved in {checkpoint}. Continue with: {again}")
        else:
            console.warn(f"Nothing of this run is saved yet. Start it again with: {again}")
        raise


_TRIAL_SAMPLES = 8  # samples of a trial run that checks whether evaluation data fits the model


def score(loaded: LoadedModel, source: Source | None, length: int, description: str) -> dict[str, float]:
    """Scores on evaluation data; empty without a source."""
    if source is None:
        return {}
    with ConsoleSteps(description) as steps:
        return evaluate(loaded, source, length=length, progress=steps.update)


def open_evaluation(loaded: LoadedModel, specs: list[str]) -> Source:
    """Open evaluation data, once for all compared models: a function may return other data the next time.

    Data other than text is tried on a few samples, to find out early whether it fits the network.

    Raises:
        DataError: the data does not fit the network, or cannot be read.
    """
    source = open_source(specs, "evaluation", loaded)
    if not isinstance(source, TextSource):
        evaluate(loaded, source, limit=_TRIAL_SAMPLES)
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


class Watch(ProgressBar):
    """A bar of layers and gradient steps, and a line after every round and every fine-tuning.

    A projection that is the only round gets a line only if fine-tuning follows. Otherwise it is the result of the
    command, which needs no line.

    Args:
        steps: the bar, already shown.
        prefix: put before every description, such as the name of the method.
        quiet: leave out notes and lines.
        clock: () -> seconds, for the time left.
    """

    def __init__(
        self, steps: ConsoleSteps, prefix: str = "", quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(steps, prefix, clock)
        self._quiet = quiet
        self._pending: RoundRecord | None = None

    def on_note(self, text: str) -> None:
        """Show the note."""
        if not self._quiet:
            say(f"{self._prefix}{text}")

    def on_step(self, round_index: int, done: int, total: int, loss: float) -> None:
        """Advance the bar; before the first step of fine-tuning, show the line of the projection."""
        if round_index >= self._rounds:
            self._show_pending()
        super().on_step(round_index, done, total, loss)

    def on_round(self, record: RoundRecord) -> None:
        """Show the line of the record, or store it if it is the only projection."""
        if self._quiet:
            return
        if record.kind == "finetune":
            self._show_pending()
            self._line(round_name(record), record)
        elif self._rounds < 2:
            self._pending = record
        else:
            self._line(f"round {record.index + 1} of {self._rounds}", record)

    def _show_pending(self) -> None:
        if self._pending is not None:
            self._line("projection", self._pending)
            self._pending = None

    def _line(self, name: str, record: RoundRecord) -> None:
        loss = record.loss_heldout if record.loss_heldout is not None else record.loss_calibration
        say(
            f"{self._prefix}{name}: {percent(record.sparsity)} zeros, loss {significant(loss, 4)}, "
            f"{duration(record.seconds)}"
        )
