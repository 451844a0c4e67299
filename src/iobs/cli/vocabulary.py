"""`iobs prune --units vocabulary`: tokens that the text of --data uses least are removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

import typer

from iobs.cli import console, options
from iobs.cli.console import ConsoleSteps
from iobs.cli.in_memory import show_units_plan
from iobs.cli.loading import load_model, local_directory
from iobs.cli.run_file import RunSettings
from iobs.cli.running import shown_command
from iobs.core.patterns import Pattern
from iobs.core.structured import Structured
from iobs.data import CORPORA, Batch, BatchSource, TextSource, open_source
from iobs.errors import DataError
from iobs.models import LoadedModel
from iobs.pruning.structured_report import StructuredReport
from iobs.vocabulary import VocabularyRemoval, open_without_weights

_DOCUMENTS = 20_000  # of a public corpus, which has no end: ten million tokens of C4
_USELESS = ("solver", "rounds", "settings", "within", "include", "ignore", "samples", "batch_size", "resume", "streams")


def is_vocabulary(pattern: Pattern | None) -> bool:
    """True if a pattern removes tokens."""
    return isinstance(pattern, Structured) and pattern.units == "vocabulary"


def refuse_useless(values: Mapping[str, object]) -> None:
    """Refuse options that change nothing when tokens are counted.

    Raises:
        typer.BadParameter: one was given.
    """
    names = ["--" + name.replace("_", "-").replace("settings", "set") for name in _USELESS if values.get(name)]
    recipe = values.get("recipe")
    if isinstance(recipe, str) and not recipe.endswith((".yaml", ".yml")):
        names.append("--recipe")
    if names:
        raise typer.BadParameter(
            f"{', '.join(names)}: not with a vocabulary, whose tokens are counted in all of --data",
            param_hint="--units",
        )


def prune_vocabulary(
    model: str | None,
    settings: RunSettings,
    eval_data: list[str] | None,
    loading: options.Loading,
    dry_run: bool,
    as_json: bool,
) -> tuple[LoadedModel, StructuredReport | None]:
    """The model without tokens, and the report; None after a dry run, which shows what would be removed.

    Raises:
        DataError: the data are no text.
        IOBSError: as `iobs.reduce_vocabulary`.
    """
    run, pattern = settings.options, settings.options.pattern
    assert isinstance(pattern, Structured)
    if run.low_memory:
        loaded = open_without_weights(local_directory(model))
    else:
        loaded = load_model(model, replace(loading, dtype=run.dtype))
    loaded.require_tokenizer()
    name, corpus = _corpus([*run.data], loaded)
    heldout = None if not eval_data else _documents(eval_data, loaded)
    removal = VocabularyRemoval(loaded, corpus, 1 - pattern.sparsity, heldout)
    if dry_run:
        show_units_plan(pattern, removal.plan(run.seq_len), as_json, "The run measures bits per byte before and after.")
        return loaded, None
    with ConsoleSteps("bits per byte") as steps:
        smaller, report = removal.remove(run.seq_len, steps.update)
    facts = {"command": shown_command(), "calibration": name, "seq_len": loaded.window_length(run.seq_len)}
    report.settings = {**facts, **report.settings, "pattern": str(pattern)}
    console.say(removal.about_the_split())
    return smaller, report


def _corpus(specs: list[str], loaded: LoadedModel) -> tuple[str, Iterable[str] | Iterable[Batch]]:
    """The name and the texts, or batches, of --data."""
    source = open_source(specs, "calibration", loaded)
    if isinstance(source, BatchSource):
        return source.name, source.batches
    if not isinstance(source, TextSource):
        raise DataError(f"{source.name} holds no text, in which tokens could be counted.")
    return source.name, islice(source.documents(), _DOCUMENTS if source.name in CORPORA else None)


def _documents(specs: list[str], loaded: LoadedModel) -> Iterable[str]:
    """The texts of --eval-data."""
    source = open_source(specs, "evaluation", loaded)
    if not isinstance(source, TextSource):
        raise DataError(f"{source.name} is no text; bits per byte are measured on text.")
    return source.documents()
