"""`iobs demo`: the main job on the embedded model and text, from nothing but the package."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobs.cli import console, options
from iobs.core.outputs import check_output

if TYPE_CHECKING:
    from iobs.core.patterns import Pattern
    from iobs.models import LoadedModel
    from iobs.pruning.recipe import Recipe
    from iobs.pruning.report import Report

MODEL_FOLDER = "model"
_DEMO_FILES = ("report.html", "report.json", "recipe.yaml", MODEL_FOLDER)


@options.command
def demo(
    *,
    output: Annotated[Path, typer.Option("--output", "-o")] = Path("iobs-demo"),
    sparsity: str = "50%",
    rounds: Annotated[int, typer.Option(min=2)] = 3,
    samples: Annotated[int, typer.Option(min=8)] = 64,
    seed: int = 0,
    talk: options.Talk,
) -> None:
    """Prune the embedded language model with five methods and compare them on held-out text.

    Keeps the model of the last, I-OBS: writes it with report.html and report.json, reads it back and counts its zeros.

    Args:
        output: Folder for the report and the model.
        sparsity: Share of zeros in every layer: 0.5 or 50%.
        rounds: Rounds of I-OBS.
        samples: Calibration windows of 256 tokens.
        seed: Seed of every random choice.

    Examples:
        iobs demo  # five methods on the embedded model, in about a minute
        iobs demo --sparsity 70% -o demo70  # with more zeros
    """
    started = time.perf_counter()
    replaceable = _DEMO_FILES if _is_demo(output) else ()
    check_output(output, replaceable=replaceable)

    from iobs.core.patterns import Unstructured, share

    pattern = Unstructured(share(sparsity))

    from iobs import models
    from iobs.cli.console import ConsoleSteps
    from iobs.cli.run_file import RunOptions, RunSettings
    from iobs.cli.running import write_results
    from iobs.data import calibration_batches, open_source
    from iobs.models import output_directory
    from iobs.pruning.driver import require_seed

    require_seed(seed)
    loaded = models.load()
    batches = calibration_batches(
        open_source([], "calibration", loaded), loaded, samples=samples, length=256, seed=seed
    )
    out = console.output_console()
    out.print(
        f"A language model of {models.parameter_count(loaded.module) / 1e6:.1f} million parameters that knows Python's "
        f"help pages; {share(sparsity):.0%} of the weights of its layers go.",
    )
    recipes = methods(rounds)
    report = compare(loaded, batches, pattern, recipes, seed)
    with output_directory(output, replaceable=replaceable) as temporary:
        write_results(loaded, report, temporary, MODEL_FOLDER)
        options_of_run = RunOptions(pattern, seed=seed, samples=samples, seq_len=256)
        RunSettings([*recipes.values()][-1], options_of_run).write(temporary)
    if not talk.as_json:
        _show(report)
    _prove(output, loaded, report)
    if talk.as_json:
        console.print_json({"output": str(output), **report.as_dict()})
        return
    with ConsoleSteps("measuring the speed (the first run also compiles)"):
        faster = _faster(output / MODEL_FOLDER)
    out.print(f"Done in {time.perf_counter() - started:.0f} s. Look at {output / 'report.html'}")
    out.print(
        f"Next: iobs inspect {shlex.quote(str(output / MODEL_FOLDER))}, or prune a model of yours: iobs prune --help"
    )
    out.print(faster)


def _is_demo(directory: Path) -> bool:
    """True if the report in a directory is of an earlier demo, which may be replaced."""
    try:
        report = json.loads((directory / "report.json").read_text(encoding="utf8"))
        return bool(report["settings"]["model"] == "embedded")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def methods(rounds: int) -> dict[str, Recipe]:
    """The methods of the comparison: one-shot solvers, and last Algorithm 2 with the best of them."""
    from iobs.pruning.recipe import FineTune, Recipe, Rounds

    step = FineTune(lr=5e-4, optimizer="adam", steps=12, loss="kl", batch_size=16)
    return {
        "magnitude": Recipe(solver="magnitude"),
        "Wanda": Recipe(solver="wanda"),
        "SparseGPT": Recipe(solver="sparsegpt"),
        "ADMM": Recipe(solver="admm"),
        f"I-OBS, {rounds} rounds": Recipe(solver="admm", rounds=Rounds(rounds, finetune=step)),
    }


def compare(loaded: LoadedModel, batches: list[Any], pattern: Pattern, recipes: dict[str, Recipe], seed: int) -> Report:
    """Prune the same dense model with each recipe and score it; the model is left as the last one made it.

    Returns:
        The report of the last recipe, with the scores of all.
    """
    from iobs.cli.console import ConsoleSteps
    from iobs.cli.running import Watch, open_evaluation, score, shown_command
    from iobs.evaluate import BeforeAfter
    from iobs.pruning import prune

    scoring = open_evaluation(loaded, [])
    length = loaded.window_length(2048)
    dense = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    scores = {"dense": score(loaded, scoring, length, "scoring the dense model")}
    report = None
    for name, recipe in recipes.items():
        loaded.module.load_state_dict(dense)
        with ConsoleSteps(name) as steps:
            watch = Watch(steps, f"{name}: ")
            callbacks = [watch, BeforeAfter(batches, loaded.tokenizer)]
            report = prune(loaded.module, batches, pattern, recipe, seed=seed, callbacks=callbacks)
        scores[name] = score(loaded, scoring, length, f"scoring {name}")
        scores[name]["seconds"] = report.seconds
    assert report is not None
    report.scores = scores
    facts = {"command": shown_command(), "model": "embedded", "calibration": "embedded text", "seq_len": length}
    report.settings = {**facts, **report.settings}
    return report


def _show(report: Report) -> None:
    from iobs.report import rounds_table, scores_table, summary_lines

    out = console.output_console()
    out.print(scores_table(report.scores, "On held-out text"))
    out.print(rounds_table(report))
    for line in summary_lines(report):
        out.print(line)


def _faster(folder: Path) -> str:
    """Bytes and speed of the pruned model, dense and packed ready to run, in one line of a terminal."""
    import tempfile

    from iobs import models
    from iobs.cli.benching import Workload, repetition
    from iobs.models.packed import open_packed, packed_share, save_packed

    loaded = models.load(folder)
    workload = Workload(str(folder), tokens=64, prompt=32, shape=None, precision="int8", threads=None)
    size, repeat = models.size_in_bytes(loaded.module), repetition(loaded, workload, stored=False)
    before = max(repeat.run().speed for _ in range(2))
    with tempfile.TemporaryDirectory() as temporary:
        packed = Path(temporary) / "packed"
        save_packed(folder, packed, precision=workload.precision)
        share = packed_share(folder, packed)
        repeat = repetition(open_packed(packed), workload, stored=True)
        after = max(repeat.run().speed for _ in range(3))
    return (
        f"Packed as int8: {size / 1e6:.1f} -> {share * size / 1e6:.1f} MB, {before:,.0f} -> {after:,.0f} tokens/s "
        "(iobs pack, iobs run)."
    )


def _prove(output: Path, original: LoadedModel, report: Report) -> None:
    """Read the model back as any user would, score it again and count its zeros.

    Raises:
        AuditError: a zero or the score was lost on the way.
    """
    from iobs import models
    from iobs.cli.console import ConsoleSteps
    from iobs.data import open_source
    from iobs.errors import AuditError
    from iobs.evaluate import evaluate
    from iobs.pruning.audit import audit

    folder = output / MODEL_FOLDER
    zeros, promised = sum(row.zeros for row in audit(folder)), report.zeros
    if zeros < promised:
        raise AuditError(f"{folder} holds {zeros:,} zeros, {promised:,} were made.")
    reloaded = models.load(folder)
    with ConsoleSteps("scoring the written model") as steps:
        again = evaluate(reloaded, open_source([], "evaluation", original), progress=steps.update)["perplexity"]
    expected = list(report.scores.values())[-1]["perplexity"]
    if abs(again - expected) > 1e-3 * expected:
        raise AuditError(f"{folder} scores {again:.3f} after reloading, {expected:.3f} before.")
    line = f"Reloaded {folder}: {zeros:,} real zeros, perplexity {again:.2f}, as before it was written."
    console.output_console().print(line)
