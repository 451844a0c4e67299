"""The run of a command: `iobs.prune` with its options, and the message when the user stops it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer

from iobs.cli import command, console

if TYPE_CHECKING:
    from torch import nn

    from iobs.cli.run_file import Asked
    from iobs.data import Batch
    from iobs.pruning.callbacks import Callback
    from iobs.pruning.report import Report
    from iobs.pruning.store import Store


@dataclass(frozen=True)
class Place:
    """Output directory and checkpoint of a run.

    Attributes:
        output: the output directory; None if nothing is written.
        replaceable: names in it that are replaced at the end.
        checkpoint: directory of intermediate results; None without --resume.
    """

    output: Path | None
    replaceable: tuple[str, ...] = ()
    checkpoint: Path | None = None

    @classmethod
    def of(cls, model: str | None, output: Path | None, overwrite: bool, resume: bool) -> Self:
        """The place that the options name, checked before any work.

        Raises:
            typer.BadParameter: the output is the model itself.
            OutputError: the output exists and may not be replaced, or cannot be written.
        """
        from iobs.models import beside, check_output, names_to_replace
        from iobs.models.factory import is_function_spec
        from iobs.models.output import holds

        if output is None:
            return cls(None)
        replaceable = names_to_replace(output, ("recipe.yaml",), overwrite)
        if replaceable and model is not None:
            source = Path(model.rpartition(":")[0] if is_function_spec(model) else model)
            if holds(output, source):  # everything in the directory is replaced
                told = "this is MODEL itself or holds it, and MODEL would be removed; give another directory"
                raise typer.BadParameter(told, param_hint="--output / -o")
        check_output(output, replaceable=replaceable)
        checkpoint = beside(output, "checkpoint")
        if checkpoint.is_dir() and not resume:
            console.say(f"{checkpoint} holds a stopped run; with --resume this command continues it.")
        return cls(output, replaceable, checkpoint if resume else None)

    def finish(self) -> None:
        """Remove the intermediate results of a finished run."""
        if self.checkpoint is not None:
            shutil.rmtree(self.checkpoint)


def prune_as_asked(
    model: nn.Module | Store,
    batches: list[Batch],
    asked: Asked,
    checkpoint: Path | None,
    facts: Mapping[str, object],
    callbacks: Sequence[Callback] = (),
) -> Report:
    """Prune a model as a command line or a recipe.yaml asks, with progress on the console.

    Args:
        model: as in `iobs.prune`.
        batches: calibration data.
        asked: recipe and options.
        checkpoint: directory of intermediate results, or None.
        facts: further settings for the report, such as the name of the model.
        callbacks: further callbacks of the run.

    Returns:
        The report; its settings begin with the command line and the facts.

    Raises:
        IOBSError: as `iobs.prune`.
    """
    import iobs
    from iobs.cli.progress import Steps
    from iobs.cli.watch import Watch

    options = asked.options
    with Steps("pruning") as steps:
        report = iobs.prune(
            model,
            batches,
            options.pattern,
            asked.recipe,
            include=options.include,
            ignore=options.ignore,
            holdout=options.holdout,
            seed=options.seed,
            callbacks=[Watch(steps), *callbacks],
            checkpoint=checkpoint,
        )
    report.settings = {"command": command.shown(), **facts, **report.settings}
    return report


@contextmanager
def saying_how_to_continue(checkpoint: Path | None) -> Iterator[None]:
    """Show, when the user stops a run, what is saved and the command that continues it.

    Args:
        checkpoint: directory of intermediate results; None without --resume.
    """
    from iobs.pruning.runtime.ranks import current

    try:
        yield
    except KeyboardInterrupt:
        again = command.typed(current().size)
        if checkpoint is None:
            console.warn("Nothing of this run is saved; with --resume a stopped run can be continued.")
        elif any(checkpoint.glob("*.safetensors")):
            console.warn(f"Finished layers and steps are saved in {checkpoint}. Continue with: {again}")
        else:
            console.warn(f"Nothing of this run is saved yet. Start it again with: {again}")
        raise
