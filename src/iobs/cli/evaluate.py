"""`iobs evaluate`: score a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from iobs.cli import console


@console.with_groups
def evaluate(
    model: console.Model = None,
    data: console.Data = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, separated by commas.", show_default=False)] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            callback=console.at_home,
            metavar="FILE",
            help="Multiple-choice questions as in MMLU: .jsonl(.gz) with split, subject, question, choices, answer.",
            show_default=False,
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            min=0, help="Examples before each question; by default 5, or the default of each task.", show_default=False
        ),
    ] = None,
    seq_len: console.SequenceLength = 2048,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of windows or samples, or of questions per subject or task."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per forward pass.")] = None,
    loading: console.Loading = console.Loading(),  # noqa: B008 - frozen
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Evaluate a model: perplexity on text, accuracy on labelled inputs, multiple choice, or lm-eval tasks.

    Without --data, the embedded model is scored on its held-out text, other language models on WikiText-2.
    """
    from iobs.cli.loading import load_to_run
    from iobs.cli.progress import Steps
    from iobs.data import open_source, read_questions
    from iobs.evaluate import answer, check_tasks, evaluate_tasks
    from iobs.evaluate import evaluate as score
    from iobs.evaluate.answers import letter_tokens
    from iobs.report import scores_table

    # Check everything that may fail before the long computations.
    asked = read_questions(questions, each=limit) if questions else None
    if shots is not None and not (tasks or questions):
        raise typer.BadParameter("examples come before questions: give --questions or --tasks", param_hint="--shots")
    if batch_size is not None and not data and (tasks or questions):
        raise typer.BadParameter("questions are asked one by one, and tasks as lm-eval does", param_hint="--batch-size")
    named = [task.strip() for task in tasks.split(",") if task.strip()] if tasks is not None else []
    if tasks is not None and not named:
        raise typer.BadParameter("name at least one task of lm-eval", param_hint="--tasks")
    if named:
        check_tasks(named)
    loaded = load_to_run(model, loading.dtype, loading.device, loading.allow_pickle, loading.trust_remote_code)
    if named or asked:
        tokenizer = loaded.require_tokenizer()
        if asked:
            letter_tokens(tokenizer)
    scores: dict[str, float] = {}
    answers: dict[str, float] = {}
    name = model or "embedded"
    if data or not (named or questions):
        source = open_source(data or [], "evaluation", loaded)
        with Steps("scoring") as steps:
            scores |= score(loaded, source, length=seq_len, limit=limit, batch=batch_size, progress=steps.update)
        name += f" on {source.name}"
    if named:
        scores |= evaluate_tasks(loaded, named, shots=shots, limit=limit)
    if questions and asked:
        with Steps("answering") as steps:
            table, cut = answer(loaded, asked, shots=5 if shots is None else shots, progress=steps.update)
        answers = {f"{questions.name}: {subject}": share for subject, share in table.items()}
        if cut:  # the shares are then those of other prompts
            console.warn(
                f"{cut} of {len(asked.test)} prompts were longer than the model's context: beginnings were cut."
            )
    if talk.as_json:
        console.print_json(scores | answers)
        return
    out = console.output_console()
    if scores:
        out.print(scores_table({name: scores}, counts=True))
    if answers:
        out.print(_by_subject(name, answers))


def _by_subject(model: str, shares: dict[str, float]) -> Table:
    table = Table(title=f"Right answers of {model}; chance is 25 %", title_justify="left", header_style="bold")
    table.add_column("subject")
    table.add_column("right", justify="right")
    for subject, share in shares.items():
        table.add_row(subject, f"{share:.1%}")
    return table
