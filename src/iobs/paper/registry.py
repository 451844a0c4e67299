"""The registry that `iobs reproduce` reads: every module of this package that defines `EXPERIMENT`.

Adding a table or figure is adding one file. Its import must be cheap: networks, data and solvers are imported inside
`run`, since the list of experiments imports every file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from iobs.errors import DataError

# Of a request, what only some experiments read.
OPTIONS = ("model", "data", "eval_data", "questions", "rounds", "limit", "resume")


@dataclass(frozen=True)
class Request:
    """How to run an experiment.

    Attributes:
        stand_in: run the small stand-in for a network or data set that has to be fetched first.
        seed: of every random choice.
        output: folder for pictures and logs, or None to write nothing.
        say: told, in one line each, what is being done.
        model: MODEL to run on instead of the paper's.
        data: calibration data instead of the paper's, as --data has it.
        eval_data: what to score on instead; of language models one for each corpus of the table.
        questions: a file of MMLU's questions; without it lm-eval fetches them.
        rounds: rounds instead of the paper's.
        limit: pictures or windows scored at most, or questions of a subject.
        resume: keep a checkpoint in `output` while a network is measured, and go on from one that is there.

    Those from `model` on are read by some experiments only (`Experiment.reads`).
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
    """One number of the paper beside the one measured; None where there is none."""

    setting: str
    method: str
    published: float | None
    measured: float | None


@dataclass(frozen=True)
class Results:
    """What an experiment gave.

    Attributes:
        measure: what the numbers are, with their unit and direction.
        rows: the numbers.
        notes: what a reader must know to compare them, one sentence each.
    """

    measure: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper.

    Attributes:
        name: what the command line calls it, such as "table-llm".
        place: where it is in the paper, such as "Table 2".
        title: what it shows, in a few words.
        run: runs it.
        stand_in: what is used with --stand-in, or "" where nothing needs to be replaced.
        reads: which of `OPTIONS` it reads.
        stand_in_reads: and which with --stand-in.
    """

    name: str
    place: str
    title: str
    run: Callable[[Request], Results]
    stand_in: str = ""
    reads: tuple[str, ...] = ()
    stand_in_reads: tuple[str, ...] = ()

    def check(self, request: Request) -> None:
        """Refuse what this experiment would ignore.

        Raises:
            DataError: the request holds an option that is not read, or wants to resume without a folder.
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


def experiments() -> list[Experiment]:
    """Every experiment, by name."""
    package = Path(__file__).parent
    found = []
    for module in pkgutil.iter_modules([str(package)]):
        entry = vars(importlib.import_module(f"iobs.paper.{module.name}")).get("EXPERIMENT")
        if isinstance(entry, Experiment):
            found.append(entry)
    return sorted(found, key=lambda entry: entry.name)


def find(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        DataError: there is none; the message lists those that there are.
    """
    known = {entry.name: entry for entry in experiments()}
    if name not in known:
        raise DataError(f"There is no experiment {name!r}; there are: {', '.join(known) or 'none yet'}.")
    return known[name]
