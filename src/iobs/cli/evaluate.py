"""`iobs evaluate`: score a model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from iobs.cli import console, options


@options.command
def evaluate(
    model: options.Model = None,
    *,
    data: options.DataOptions,
    tasks: str | None = None,
    questions: options.Questions = None,
    shots: Annotated[int | None, typer.Option(min=0)] = None,
    seq_len: options.SequenceLength = 2048,
    limit: options.OptionalPositive = None,
    batch_size: options.OptionalPositive = None,
    loading: options.Loading,
    talk: options.Talk,
) -> None:
    """Evaluate a model: perplexity on text, accuracy on labelled inputs, multiple choice, or lm-eval tasks.

    An embedding model is scored by the rank correlation of cosines with the labels of pairs of texts.

    Without --data, the embedded model is scored on its held-out text, other language models on WikiText-2.

    Args:
        tasks: lm-eval tasks, separated by commas.
        questions (FILE): Multiple-choice questions as in MMLU: .jsonl(.gz) with split, subject, question, choices,
            answer.
        shots: Examples before each question; by default 5, or the default of each task.
        limit: Maximum number of windows or samples, or of questions per subject or task.
        batch_size: Samples per forward pass.

    Examples:
        iobs evaluate OUT --data text.txt  # perplexity on your own text
        iobs evaluate OUT --data pairs.csv  # an embedding model on labelled pairs of texts
        iobs evaluate OUT --tasks arc_easy,hellaswag  # tasks of lm-eval
    """
    # Check everything that may fail before the long computations.
    sources = data.data
    if shots is not None and not (tasks or questions):
        raise typer.BadParameter("examples come before questions: give --questions or --tasks", param_hint="--shots")
    if batch_size is not None and not sources and (tasks or questions):
        raise typer.BadParameter("questions are asked one by one, and tasks as lm-eval does", param_hint="--batch-size")
    task_names = options.unique_names(tasks or "")
    if tasks is not None and not task_names:
        raise typer.BadParameter("name at least one task of lm-eval", param_hint="--tasks")

    from iobs.cli.console import ConsoleSteps
    from iobs.cli.loading import load_to_run
    from iobs.data import open_source, read_questions
    from iobs.evaluate import answer, check_tasks, evaluate_tasks
    from iobs.evaluate import evaluate as score
    from iobs.evaluate.tasks import letter_tokens
    from iobs.report import scores_table

    question_set = read_questions(questions, each=limit) if questions else None
    if task_names:
        check_tasks(task_names)
    loaded = load_to_run(model, loading)
    if task_names or question_set:
        tokenizer = loaded.require_tokenizer()
        if question_set:
            letter_tokens(tokenizer)
    scores: dict[str, float] = {}
    answers: dict[str, float] = {}
    name = model or "embedded"
    if sources or not (task_names or questions):
        source = open_source(sources or [], "evaluation", loaded)
        with ConsoleSteps("scoring") as steps:
            scores |= score(loaded, source, length=seq_len, limit=limit, batch=batch_size, progress=steps.update)
        name += f" on {source.name}"
    if task_names:
        scores |= evaluate_tasks(loaded, task_names, shots=shots, limit=limit)
    if questions and question_set:
        with ConsoleSteps("answering") as steps:
            table, cut = answer(loaded, question_set, shots=5 if shots is None else shots, progress=steps.update)
        answers = {f"{questions.name}: {subject}": share for subject, share in table.items()}
        if cut:  # the shares are then those of other prompts
            console.warn(
                f"{cut} of {len(question_set.test)} prompts were longer than the model's context: beginnings were cut."
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
    from iobs.report.tables import titled_table

    table = titled_table(f"Right answers of {model}; chance is 25 %", ["subject"], ["right"])
    for subject, share in shares.items():
        table.add_row(subject, f"{share:.1%}")
    return table
