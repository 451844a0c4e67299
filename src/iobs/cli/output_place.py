"""The output directory of `iobs prune` and its checkpoint, checked before anything is loaded."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import typer

from iobs.cli import console
from iobs.core.outputs import beside, check_output, holds, names_to_replace
from iobs.core.specs import is_function_spec


@dataclass(frozen=True)
class OutputPlace:
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
        if output is None:
            return cls(None)
        replaceable = names_to_replace(output, ("recipe.yaml",), overwrite)
        if replaceable and model is not None:
            source = Path(model.rpartition(":")[0] if is_function_spec(model) else model)
            if holds(output, source):  # everything in the directory is replaced
                raise typer.BadParameter(
                    "this is MODEL itself or holds it, and MODEL would be removed; give another directory",
                    param_hint="--output / -o",
                )
        check_output(output, replaceable=replaceable)
        checkpoint = beside(output, "checkpoint")
        if checkpoint.is_dir() and not resume:
            console.say(f"{checkpoint} holds a stopped run; with --resume this command continues it.")
        return cls(output, replaceable, checkpoint if resume else None)

    def finish(self) -> None:
        """Remove the intermediate results of a finished run."""
        if self.checkpoint is not None:
            shutil.rmtree(self.checkpoint)
