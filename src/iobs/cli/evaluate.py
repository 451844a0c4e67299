"""`iobs evaluate`: score a model."""

from __future__ import annotations

from typing import Annotated

import typer

from iobs.cli import console


def evaluate(
    model: console.Model = None,
    data: console.Data = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval, with commas between.", show_default=False)
    ] = None,
    seq_len: console.SequenceLength = 2048,
    limit: Annotated[int | None, typer.Option(min=1, help="Windows, pictures or questions at most.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in one forward pass.")] = None,
    dtype: console.DType = None,
    device: console.Device = None,
    allow_pickle: console.AllowPickle = False,
    trust_remote_code: console.TrustRemoteCode = False,
    as_json: console.AsJson = False,
) -> None:
    """Score a model: perplexity on text, accuracy on labelled inputs, or tasks of lm-eval.

    Without --data the embedded model is scored on its held-out text and any other language model on WikiText-2.
    """
    from iobs.cli.loading import load_model
    from iobs.cli.progress import Steps
    from iobs.data import open_source
    from iobs.evaluate import evaluate as score
    from iobs.evaluate import evaluate_tasks
    from iobs.report import scores_table

    loaded = load_model(model, dtype, device, allow_pickle, trust_remote_code)
    scores: dict[str, float] = {}
    name = model or "embedded"
    if data or not tasks:
        source = open_source(data or [], "evaluation", loaded)
        with Steps("scoring") as steps:
            scores |= score(loaded, source, length=seq_len, limit=limit, batch=batch_size, progress=steps.update)
        name += f" on {source.name}"
    if tasks:
        scores |= evaluate_tasks(loaded, [task.strip() for task in tasks.split(",")], limit=limit)
    if as_json:
        console.print_json(scores)
    else:
        console.output_console().print(scores_table({name: scores}, counts=True))
