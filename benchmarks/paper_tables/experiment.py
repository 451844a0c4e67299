"""What a table or figure of the paper is: its settings, its request, its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from iobs.errors import DataError

# Fields of a request that only some experiments use.
OPTIONS = ("model", "data", "eval_data", "questions", "rounds", "limit", "resume")


@dataclass(frozen=True)
class Request:
    """Options of an experiment. Those from `model` on are used by some experiments only (`Experiment.reads`).

    Attributes:
        stand_in: use a small network or data set instead of the paper's.
        seed: seed of all random choices.
        output: folder for figures and logs, or None to write nothing.
        say: called with one line of progress.
        model: MODEL instead of the paper's.
        data: calibration data instead of the paper's, as in --data.
        eval_data: evaluation data instead of the paper's; for language models one per corpus of the table.
        questions: file of MMLU questions; None to fetch them with lm-eval.
        rounds: number of rounds instead of the paper's.
        limit: maximum number of images or windows, or of questions per subject.
        resume: keep a checkpoint in `output` while a network is measured, and continue from an existing one.
    """

    stand_in: bool
    seed: int
    output: Path | None
    say: Callable[[str], None]
    model: str | None = None
    data: tuple[str, ...] = ()
    eval_data: tuple[str, ...] = ()
    questions: Path | None = None
    rounds: int | None = None
    limit: int | None = None
    resume: bool = False


@dataclass(frozen=True)
class Row:
    """A published number and the measured number; None if missing."""

    setting: str
    method: str
    published: float | None
    measured: float | None


@dataclass(frozen=True)
class Results:
    """Results of an experiment.

    Attributes:
        measure: description of the numbers, with unit and direction.
        rows: the numbers.
        notes: facts that matter for the comparison, one sentence each.
    """

    measure: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper.

    Attributes:
        name: name on the command line, such as "table-llm".
        place: place in the paper, such as "Table 2".
        title: short title.
        run: function that runs the experiment.
        stand_in: description of what --stand-in uses; "" if the experiment has no stand-in.
        reads: names in `OPTIONS` that the experiment uses.
        stand_in_reads: names in `OPTIONS` that it uses with --stand-in.
    """

    name: str
    place: str
    title: str
    run: Callable[[Request], Results]
    stand_in: str = ""
    reads: tuple[str, ...] = ()
    stand_in_reads: tuple[str, ...] = ()

    def check(self, request: Request) -> None:
        """Raise if the request sets options that this experiment ignores.

        Raises:
            DataError: an option is set that the experiment does not use, or `resume` is set without `output`.
        """
        reads = self.stand_in_reads if request.stand_in else self.reads
        unread = [name for name in OPTIONS if getattr(request, name) and name not in reads]
        if unread:
            raise DataError(
                f"{self.name}{' with --stand-in' if request.stand_in else ''} does not read {_as_options(unread)}; "
                f"leave {'it' if len(unread) == 1 else 'them'} out. It reads: {_as_options(reads) or 'none of these'}."
            )
        if request.resume and request.output is None:
            raise DataError("--resume keeps its checkpoint in the folder of -o; give one.")


def _as_options(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)
