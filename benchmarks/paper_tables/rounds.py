"""Algorithm 2 to the letter, scored after every projection: shared by the paper's tables of networks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobs.core.files import replaced
from iobs.errors import DataError, OutputError
from paper_tables.experiment import Request, Row

if TYPE_CHECKING:
    from torch import nn

    from iobs.models import LoadedModel
    from iobs.pruning.recipe import Recipe
    from iobs.pruning.report import RoundRecord

Scores = dict[str, float]
EMBEDDED = ""  # the model, or the text, that comes with the package
STAND_IN = " (stand-in)"  # behind a model's name where another was measured
STAND_IN_WINDOWS = 32  # that it is scored on where no limit is given
ONE_TEXT = (
    "Both corpora are one text here, held out from the small model's own, in windows of 128 tokens, "
    f"{STAND_IN_WINDOWS} of them without --limit."
)


@dataclass(frozen=True)
class Settings:
    """A table's settings, as appendix A of the paper states them.

    Attributes:
        model: what is pruned.
        data: what it is calibrated on.
        samples: calibration samples a round.
        length: tokens in a sample; 0 for images.
        sparsity: share of zeros in every layer.
        rounds: projections.
        lr: learning rate between them.
        optimizer: of the steps between them.
        batch_size: samples a step; None for one step on the whole round's data.
        damping: of the Hessians, relative.
        every_parameter: step on all parameters, not on the pruned ones alone.
    """

    model: str
    data: str
    samples: int
    length: int
    sparsity: float
    rounds: int
    lr: float
    optimizer: str = "sgd"
    batch_size: int | None = None
    damping: float = 0.01
    every_parameter: bool = False


def iterate(
    model: nn.Module,
    batches: Sequence[Any],
    settings: Settings,
    score: Callable[[nn.Module], Scores],
    say: Callable[[str], None],
    ignore: Sequence[str] = (),
    scored: Collection[int] | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
) -> list[Scores]:
    """Algorithm 2 to the letter, scored after every projection.

    Args:
        model: the dense model; left with the weights of its best round.
        batches: calibration data, none of it held out.
        settings: of the table.
        score: scores of a model.
        say: shows a line.
        ignore: names of layers that stay dense.
        scored: rounds to score, from 1; None: all. The scores of the others are empty.
        seed: of every random choice.
        checkpoint: folder to resume from, or None.

    Returns:
        Scores of the dense model first, then of every projection.
    """
    from iobs import prune

    scorer = _scorer(score, say, settings.rounds, scored, checkpoint)
    prune(
        model,
        batches,
        settings.sparsity,
        recipe_of(settings, batches),
        ignore=[*ignore] or None,
        holdout=0.0,
        seed=seed,
        callbacks=[scorer],
        checkpoint=None if checkpoint is None else checkpoint / "run",
    )
    scores: list[Scores] = scorer.scores
    return scores


def recipe_of(settings: Settings, batches: Sequence[Any]) -> Recipe:
    """The recipe of a table: SparseGPT, and between two rounds one pass of gradient steps on the task loss."""
    from iobs import FineTune, Recipe, Rounds
    from iobs.pruning.samples.batches import size

    count = sum(size(batch) for batch in batches)
    step = FineTune(
        lr=settings.lr,
        optimizer="adam" if settings.optimizer == "adam" else "sgd",
        steps=1 if settings.batch_size is None else max(1, count // settings.batch_size),
        loss="task",
        parameters="all" if settings.every_parameter else "prunable",
        batch_size=settings.batch_size,
    )
    rounds = Rounds(settings.rounds, finetune=step) if settings.rounds > 1 else Rounds()
    return Recipe(solver="sparsegpt", damping=settings.damping, rounds=rounds)


def _scorer(
    score: Callable[[nn.Module], Scores],
    say: Callable[[str], None],
    rounds: int,
    scored: Collection[int] | None,
    checkpoint: Path | None,
) -> Any:
    """A callback that scores the dense model and every projection; `scores` holds the results.

    Scores are kept in the checkpoint: a resumed run repeats no scoring.
    """
    from iobs import Callback
    from iobs.pruning.runtime.checkpoint import RUN

    file = None if checkpoint is None else checkpoint / "scores.json"
    begun = checkpoint is not None and (checkpoint / "run" / RUN).is_file()  # else the scores are of another run

    class Scorer(Callback):
        def __init__(self) -> None:
            self.scores: list[Scores] = []
            self.known = _read_run_scores(file) if file is not None and begun and file.is_file() else []
            if len(self.known) > 1:
                say(f"rounds up to {len(self.known) - 1}: scores taken from {file}")

        def on_start(self, model: nn.Module, layers: Sequence[str], rounds: int) -> None:
            self.model = model
            self._add(True)

        def on_round(self, record: RoundRecord) -> None:
            number = record.index + 1
            known = self._add(scored is None or number in scored)
            if not known:
                say(f"round {number} of {rounds}{': ' if self.scores[-1] else ''}{_shown(self.scores[-1])}")

        def _add(self, wanted: bool) -> bool:
            """Add the scores of the model as it is; returns whether they were known."""
            if len(self.scores) < len(self.known):
                self.scores.append(self.known[len(self.scores)])
                return True
            self.scores.append(score(self.model) if wanted else {})
            if file is not None:
                with replaced(file) as written:
                    written.write_text(json.dumps(self.scores), encoding="utf8")
            return False

    return Scorer()


def _read_run_scores(file: Path) -> list[Scores]:
    try:
        found: list[Scores] = json.loads(file.read_text(encoding="utf8"))
    except ValueError as error:
        raise DataError(f"{file} is damaged ({error}); remove {file.parent} to begin the run anew.") from error
    return found


class Measured:
    """Scores that were measured before, kept in the output folder, so that a table is continued and not begun anew.

    Make it before any work: a damaged file of scores is found here.

    Raises:
        DataError: the file that is there holds no scores.
    """

    def __init__(self, request: Request, name: str) -> None:
        self.file = None if request.output is None else request.output / f"{name}.json"
        self.known = {} if self.file is None or not self.file.is_file() else _read_scores(self.file)
        self.say, self.resume = request.say, request.resume
        # Whatever else of the request changes a score.
        self.asked = [str(request.data), str(request.eval_data), str(request.questions), request.limit, request.seed]
        named = [request.model, *request.data, *request.eval_data, request.questions]
        self.files = [_state(str(name)) for name in named if name is not None]

    def get(self, key: str, settings: Settings, compute: Callable[[], list[Scores]]) -> list[Scores]:
        """The scores under a key, settings and all that was asked for: from the folder, or computed and put there.

        Raises:
            OutputError: the computed scores cannot be written.
        """
        full = json.dumps([key, asdict(settings), self.asked, _state(settings.model), self.files])
        if full in self.known:
            self.say(f"{key}: measured before, taken from {self.file}")
            return self.known[full]
        self.known[full] = compute()
        if self.file is not None:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with replaced(self.file) as written:
                    written.write_text(json.dumps(self.known, indent=1), encoding="utf8")
            except OSError as error:
                raise OutputError(f"{self.file} could not be written ({error.strerror}).") from error
        if (done := self.checkpoint(key)) is not None:
            shutil.rmtree(done, ignore_errors=True)
        return self.known[full]

    def checkpoint(self, key: str) -> Path | None:
        """The folder to resume the work under a key from, if resuming was asked for; `get` removes it at the end.

        Whatever else was asked for is a part of its name: rounds that were scored on other data are not taken up.
        """
        if self.file is None or not self.resume:
            return None
        digest = hashlib.sha256(json.dumps([key, self.asked, self.files]).encode()).hexdigest()
        return self.file.parent / f"{self.file.stem}.{digest[:12]}.checkpoint"


def _read_scores(file: Path) -> dict[str, list[Scores]]:
    try:
        known = json.loads(file.read_text(encoding="utf8"))
        rounds = [scores for table in known.values() for scores in table]
        if not all(isinstance(value, int | float) for scores in rounds for value in scores.values()):
            raise ValueError("a score is no number")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{file} should hold the scores measured before and is damaged ({error}); remove it to measure anew."
        ) from error
    return known  # type: ignore[no-any-return]


def _state(spec: str) -> str | None:
    """A digest of names, sizes and times of the files that a model or data spec names; None where none is local.

    A file that was changed under its old name gives other scores.
    """
    place = os.path.expanduser(re.sub(r"\.py:\w+$", ".py", spec))  # the file of FILE.py:function
    inside = sorted(os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names)
    files = [file for file in (place, *inside) if os.path.isfile(file)]
    digest = hashlib.sha256()
    for file in files:
        found = os.stat(file)
        digest.update(os.fsencode(f"{os.path.relpath(file, place)} {found.st_size} {found.st_mtime_ns}\n"))
    return digest.hexdigest() if files else None


def starred(rows: list[Row], lowest: bool) -> list[Row]:
    """The rows with a star at the best measured one."""
    measured = [row for row in rows if row.measured is not None and "dense" not in row.method]
    if not measured:
        return rows
    best = (min if lowest else max)(measured, key=lambda row: row.measured or 0.0)
    return [Row(row.setting, f"{row.method} *", row.published, row.measured) if row is best else row for row in rows]


def settings_for(table: Mapping[str, Settings], request: Request) -> dict[str, Settings]:
    """A table's settings as the request changes them: all of it, or only the entry that the user's model belongs to.

    A model belongs to the entry whose name is part of the model's name. A size that the model's name states must be the
    size of the entry: the published figures of Llama-2 are of 7B. Any other model takes the first entry's settings.
    """
    entries = dict(table)
    if request.model is not None:
        plain = request.model.lower().replace("_", "-")
        sizes = _sizes(plain)
        names = [name for name in table if name.lower() in plain and sizes <= _sizes(table[name].model.lower())]
        first = next(iter(table.values()))
        entries = {name: replace(table[name], model=request.model) for name in names}
        entries = entries or {request.model: replace(first, model=request.model)}
    return {
        name: replace(settings, data=", ".join(request.data) or settings.data, rounds=request.rounds or settings.rounds)
        for name, settings in entries.items()
    }


def data_notes(table: Mapping[str, Settings], request: Request, scored: str, counted: str) -> list[str]:
    """One note where the user's data or limit part the measured figures from the published ones; else none.

    Args:
        table: the settings of the paper.
        request: what the user gave.
        scored: what the paper scores on.
        counted: what the limit counts.
    """
    if not (request.data or request.eval_data or request.limit):
        return []
    entries = settings_for(table, request)
    published = [table[name].data for name in entries if name in table] or [entry.data for entry in table.values()]
    usual = [entry.data for entry in entries.values()]
    calibrated = "the stand-in's own data" if request.stand_in and not request.data else _listed(usual)
    here = _listed(request.eval_data) or ("the stand-in's own data" if request.stand_in else scored)
    limit = "" if request.limit is None else f", {request.limit:,} {counted} at most"
    return [
        f"Calibrated on {calibrated}, scored on {here}{limit}; "
        f"the published figures are calibrated on {_listed(published)} and scored on all of {scored}."
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _sizes(model: str) -> set[str]:
    """The thousands of millions of parameters that a model's name states, such as 7b."""
    return set(re.findall(r"\d+(?:\.\d+)?b\b", Path(model).name))


def stand_in_settings(settings: Settings, samples: int) -> Settings:
    """The settings on a small language model: a real one where $IOBS_SHARED_DATA has it, else the embedded one."""
    folder = stand_in_folder()
    model, data = EMBEDDED, EMBEDDED
    if folder is not None:
        model, data = str(folder / "llama_stories260K"), str(folder / "tinystories" / "calibration.txt")
    return replace(settings, model=model, data=data, samples=samples, length=128)


def language_model(settings: Settings) -> LoadedModel:
    """The model in float32."""
    import torch

    from iobs.models import load

    return load(None if settings.model == EMBEDDED else settings.model, dtype=torch.float32)


def calibration(loaded: LoadedModel, settings: Settings, request: Request, batch: int = 8) -> list[Any]:
    """The paper's calibration data, or the user's."""
    from iobs.data import calibration_batches, open_source

    usual = [] if settings.data == EMBEDDED else [settings.data]
    source = open_source([*request.data] or usual, "calibration", loaded)
    return calibration_batches(
        source, loaded, samples=settings.samples, length=settings.length, seed=request.seed, batch=batch
    )


def perplexities(loaded: LoadedModel, corpora: Sequence[str], length: int, request: Request) -> Scores:
    """Perplexity of a model on each corpus, or on the user's texts in its place; a stand-in on its own.

    Raises:
        DataError: the user's texts are not one for each corpus.
    """
    from iobs.data import open_source
    from iobs.evaluate import evaluate

    def score(specs: list[str], limit: int | None) -> float:
        source = open_source(specs, "evaluation", loaded)
        return evaluate(loaded, source, length=length, limit=limit)["perplexity"]

    if request.stand_in:
        folder = stand_in_folder()
        held_out = [] if folder is None else [str(folder / "tinystories" / "validation.txt")]
        return dict.fromkeys(corpora, score(held_out, request.limit or STAND_IN_WINDOWS))
    if request.eval_data and len(request.eval_data) != len(corpora):
        raise DataError(f"Give one --eval-data for each of {', '.join(corpora)}, in this order, or none.")
    specs = request.eval_data or tuple(corpora)
    return {corpus: score([spec], request.limit) for corpus, spec in zip(corpora, specs, strict=True)}


def stand_in_folder() -> Path | None:
    """The folder of real small networks and data that $IOBS_SHARED_DATA names, or None."""
    folder = os.environ.get("IOBS_SHARED_DATA")
    return Path(folder) if folder and (Path(folder) / "zoo.py").is_file() else None


def _shown(scores: Scores) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
