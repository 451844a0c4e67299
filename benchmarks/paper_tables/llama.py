"""The paper's variant for Llama (appendix): ten rounds of pruning and one epoch of Adam without a mask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paper_tables.experiment import Experiment, Request, Results, Row
from paper_tables.rounds import (
    ONE_TEXT,
    STAND_IN,
    Measured,
    Scores,
    Settings,
    calibration,
    data_notes,
    iterate,
    language_model,
    perplexities,
    settings_for,
    stand_in_folder,
    stand_in_settings,
    starred,
)

if TYPE_CHECKING:
    from iobs.data import Questions
    from iobs.models import LoadedModel

# 8 million tokens of RedPajama. The paper does not state the sparsity; 50 % is used elsewhere in the paper.
SETTINGS = {
    "Llama-2": Settings(
        "meta-llama/Llama-2-7b-hf", "redpajama", 2000, 4096, 0.5, 10, 1e-5, "adam", 16, every_parameter=True
    ),
    "Llama-3": Settings(
        "meta-llama/Meta-Llama-3-8B", "redpajama", 1000, 8192, 0.5, 10, 1e-5, "adam", 8, every_parameter=True
    ),
}
# Five-shot MMLU accuracy: dense, then after each round.
PUBLISHED = {
    "Llama-2": (0.4584, 0.3878, 0.3950, 0.3932, 0.3943, 0.3946, 0.3929, 0.3919, 0.3893, 0.3903, 0.3863),
    "Llama-3": (0.6525, 0.5476, 0.5577, 0.5582, 0.5605, 0.5553, 0.5521, 0.5444, 0.5449, 0.5403, 0.5375),
}
CORPORA = ("wikitext2", "c4")


def scores_of(name: str, request: Request) -> tuple[list[Scores], list[str]]:
    """Perplexity and MMLU accuracy of the dense model and of every round, for table and figure; and notes."""
    ((_, settings),) = settings_for({name: SETTINGS[name]}, request).items()
    # Table and figure of a model share one file of scores.
    measured = Measured(request, name.lower())
    notes = ["The number of zeros is not stated in the paper for these runs; 50 % here."]
    if request.stand_in:
        settings = stand_in_settings(settings, samples=64)
        name_of_model = Path(settings.model).name or "the embedded model"
        notes.append(f"Measured on {name_of_model}, 64 windows of 128 tokens a round; chance is 0.25 in MMLU.")
        notes.append(ONE_TEXT)
    asked, _ = _questions(request)
    if asked != "MMLU":
        notes.append(f"Questions: {asked}; the published shares are on all of MMLU.")
    notes += data_notes({name: SETTINGS[name]}, request, ", ".join(CORPORA), "windows (and questions of a subject)")

    label = _label(name, request)

    def compute() -> list[Scores]:
        loaded = language_model(settings)
        batches = calibration(loaded, settings, request)
        right = _mmlu(loaded, request)

        def score(module: object) -> Scores:
            return {**perplexities(loaded, CORPORA, settings.length, request), **right()}

        return iterate(
            loaded.module,
            batches,
            settings,
            score,
            request.say,
            seed=request.seed,
            checkpoint=measured.checkpoint(label),
        )

    scores = measured.get(label, settings, compute)
    if "prompts" in scores[0]:
        cut, count = scores[0]["cut prompts"], scores[0]["prompts"]
        notes.append(f"{cut:.0f} of {count:.0f} prompts were longer than the model's context: beginnings were cut.")
    return scores, notes


def table(name: str) -> Callable[[Request], Results]:
    """Return the function that runs the MMLU table of a model."""

    def run(request: Request) -> Results:
        scores, notes = scores_of(name, request)
        label = _label(name, request)
        published = dict(enumerate(PUBLISHED.get(label.removesuffix(STAND_IN), ())))
        rows = [
            Row(label, "dense" if index == 0 else f"round {index}", published.get(index), found["mmlu"])
            for index, found in enumerate(scores)
        ]
        asked = _questions(request)[0]
        measure = f"Share right with five examples, {asked}; * is the best round by this score"
        return Results(measure, starred(rows, lowest=False), notes)

    return run


def figure(name: str, file: str) -> Callable[[Request], Results]:
    """Return the function that runs the perplexity figure of a model; the paper prints no numbers for it."""

    def run(request: Request) -> Results:
        scores, notes = scores_of(name, request)
        label = _label(name, request)
        rows = []
        for corpus in CORPORA:
            found = [
                Row(f"{label}, {corpus}", "dense" if index == 0 else f"round {index}", None, entry[corpus])
                for index, entry in enumerate(scores)
            ]
            rows += starred(found, lowest=True)
        if request.output is not None:
            notes.append(f"Figure: {_draw(label, scores, request.output / f'{file}.svg')}")
        return Results("Perplexity by round; * is the best round by this score", rows, notes)

    return run


def experiment(name: str, place: str, kind: str) -> Experiment:
    """The experiment for the table or figure (`kind`) of a model."""
    short = f"{kind}-{name.lower().replace('-', '')}"
    title = f"{name} over ten rounds, {'MMLU' if kind == 'table' else 'perplexity'}"
    return Experiment(
        short,
        place,
        title,
        table(name) if kind == "table" else figure(name, short),
        "a small model",
        reads=("model", "data", "eval_data", "questions", "rounds", "limit", "resume"),
        stand_in_reads=("data", "questions", "rounds", "limit", "resume"),
    )


def _label(name: str, request: Request) -> str:
    """Label of the measured model: the paper's model, its stand-in, or the user's model."""
    return next(iter(settings_for({name: SETTINGS[name]}, request))) + (STAND_IN if request.stand_in else "")


def _mmlu(loaded: LoadedModel, request: Request) -> Callable[[], Scores]:
    """Return a function that measures five-shot MMLU accuracy, on a file of questions or with lm-eval."""
    from iobs.evaluate import answer, evaluate_tasks

    _, read = _questions(request)
    if read is None:
        return lambda: {"mmlu": evaluate_tasks(loaded, ["mmlu"], shots=5, limit=request.limit)["mmlu/acc"]}
    questions = read()

    def score() -> Scores:
        table, cut = answer(loaded, questions)
        return {"mmlu": table["average"], "cut prompts": float(cut), "prompts": float(len(questions.test))}

    return score


def _questions(request: Request) -> tuple[str, Callable[[], Questions] | None]:
    """Description of the questions, and a function that reads them; None if lm-eval fetches them."""
    from iobs.data import made_questions, read_questions

    folder, given = stand_in_folder(), request.questions
    if given is not None:
        return given.name, lambda: read_questions(given, each=request.limit)
    if request.stand_in and folder is not None:
        each = request.limit or 10
        file = folder / "mmlu" / "mmlu.jsonl.gz"
        return f"MMLU's first 5 subjects, {each} questions each", lambda: read_questions(file, subjects=5, each=each)
    if request.stand_in:
        return "made questions (sums, the first answer always right)", made_questions
    return "MMLU", None


def _draw(label: str, scores: list[Scores], file: Path) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawing = Figure(figsize=(8, 3), layout="constrained")
    for axes, corpus in zip(drawing.subplots(1, len(CORPORA)), CORPORA, strict=True):
        values = [entry[corpus] for entry in scores[1:]]
        best = min(range(len(values)), key=values.__getitem__)
        axes.plot(range(1, len(values) + 1), values, marker=".")
        axes.plot(best + 1, values[best], marker="*", markersize=14, linestyle="none", label="best round")
        axes.axhline(scores[0][corpus], linestyle=":", color="grey", label="dense")
        axes.set(title=f"{label}, {corpus}", xlabel="round", ylabel="perplexity")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file)
    return file


EXPERIMENTS = [
    experiment("Llama-2", "Figure 2", "figure"),
    experiment("Llama-3", "Figure 3", "figure"),
    experiment("Llama-2", "Table 3", "table"),
    experiment("Llama-3", "Table 4", "table"),
]
