"""`iobs prune`: a network in, a sparse network with proven zeros and a report out."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from iobs.cli import console

if TYPE_CHECKING:
    from iobs.core.patterns import Pattern
    from iobs.data import Source
    from iobs.models import LoadedModel
    from iobs.prune.layers import Selection
    from iobs.prune.record import Report
    from iobs.prune.steps import GradientStep


_METHOD, _STEPS, _LAYERS = "Method", "Gradient steps between rounds", "Layers"


def _option(
    metavar: str, text: str, panel: str | None = None, default: bool = False, least: float | None = None
) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel, show_default=default, min=least)


def prune(
    model: console.Model = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=console.at_home,
            metavar="DIR",
            help="Directory to write; new, or empty.",
            show_default=False,
        ),
    ] = None,
    sparsity: Annotated[
        float | None, _option("SHARE", "Share of zeros in the pruned layers; 0.5 if nothing is given.")
    ] = None,
    pattern: Annotated[str | None, _option("N:M", "Instead: keep N of every M neighbours, as 2:4 or 4:8.")] = None,
    rounds: Annotated[
        int | None, _option("N", "Rounds of I-OBS. More than one alone is --recipe best, which may find one enough.")
    ] = None,
    recipe: Annotated[str | None, _option("NAME", "best, fast or paper: sets all that is not given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show which layers would be pruned, and stop.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep a checkpoint in DIR.checkpoint, and go on from the one that is there."),
    ] = False,
    low_memory: Annotated[
        bool,
        typer.Option(
            "--low-memory",
            help="One block in memory at a time, no recipes, no steps; with --dry-run, only say what it takes.",
        ),
    ] = False,
    data: console.Data = None,
    samples: Annotated[int, _option("N", "Calibration samples.", console.DATA_PANEL, default=True, least=1)] = 128,
    seq_len: console.SequenceLength = 2048,
    batch_size: Annotated[
        int, _option("N", "Samples in one forward pass.", console.DATA_PANEL, default=True, least=1)
    ] = 8,
    fresh_data: Annotated[
        bool,
        typer.Option(
            "--fresh-data", help="Each round sees its own share of the samples.", rich_help_panel=console.DATA_PANEL
        ),
    ] = False,
    holdout: Annotated[
        float | None, _option("SHARE", "Samples kept aside to judge by; 0.1, with --low-memory 0.", console.DATA_PANEL)
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        _option(
            "SOURCE",
            "Score the model before and after on this; left out, only the embedded one is scored.",
            console.DATA_PANEL,
        ),
    ] = None,
    solver: Annotated[
        str | None, _option("NAME", "admm (default), sparsegpt, obc, wanda, magnitude or exact.", _METHOD)
    ] = None,
    refine: Annotated[str | None, _option("NAME", "refit or swap, after the solver.", _METHOD)] = None,
    budget: Annotated[
        str | None, _option("NAME", "Of admm: fast, default or best, time against error; no recipe.", _METHOD)
    ] = None,
    allocation: Annotated[
        str | None,
        _option(
            "NAME", "Of sparsity over layers: uniform (without a recipe), error, fisher, kl, evolve, auto.", _METHOD
        ),
    ] = None,
    target: Annotated[
        str | None,
        _option(
            "NAME", "What layers imitate: current (their own weights), dense, or network (its steps too).", _METHOD
        ),
    ] = None,
    inputs: Annotated[
        str | None, _option("NAME", "pruned or dense: the network that layers' inputs come through.", _METHOD)
    ] = None,
    schedule: Annotated[
        str | None, _option("NAME", "Sparsity of the rounds: constant, cubic (growing) or auto.", _METHOD)
    ] = None,
    damping: Annotated[float | None, _option("SHARE", "Of the mean diagonal of the Hessian; 0.01.", _METHOD)] = None,
    batch_norm: Annotated[str | None, _option("NAME", "keep its statistics or update them.", _METHOD)] = None,
    seed: Annotated[int, _option("N", "Seed of every random choice.", _METHOD, default=True)] = 0,
    steps: Annotated[int | None, _option("N", "Steps after each round but the last.", _STEPS, least=1)] = None,
    lr: Annotated[
        str | None, _option("RATE", "Step size, or auto: by short trials; without a recipe 0.01.", _STEPS)
    ] = None,
    optimizer: Annotated[
        str | None, _option("NAME", "sgd, momentum, adam or auto; without a recipe sgd.", _STEPS)
    ] = None,
    loss: Annotated[
        str | None,
        _option(
            "NAME", "task, kl to the dense model, or block for its blocks' outputs; without a recipe task.", _STEPS
        ),
    ] = None,
    polish: Annotated[
        int | None,
        _option(
            "N", "Steps on the final support, after the last round; best takes 600, or up to 4,800.", _STEPS, least=0
        ),
    ] = None,
    include: Annotated[
        list[str] | None, _option("PATTERN", "Prune only these layers: `*.mlp.*` or re:EXPRESSION; repeat.", _LAYERS)
    ] = None,
    skip: Annotated[list[str] | None, _option("PATTERN", "Leave these layers dense; repeat.", _LAYERS)] = None,
    depthwise: Annotated[
        bool, typer.Option("--depthwise", help="Prune depthwise convolutions too.", rich_help_panel=_LAYERS)
    ] = False,
    keep_zeros: Annotated[
        bool,
        typer.Option("--keep-zeros", help="What is zero already stays zero: prune further.", rich_help_panel=_LAYERS),
    ] = False,
    device: console.Device = None,
    dtype: console.DType = None,
    allow_pickle: console.AllowPickle = False,
    trust_remote_code: console.TrustRemoteCode = False,
) -> None:
    """Prune MODEL and write it to a directory that loads as before, with report.json and report.html beside it."""
    from iobs.cli.loading import checked_device, checked_dtype, load_model
    from iobs.cli.low_memory import prune_low_memory
    from iobs.cli.results import write_results
    from iobs.data import open_source
    from iobs.models import check_output, output_directory, size_in_bytes
    from iobs.prune.distributed import current
    from iobs.prune.layers import select
    from iobs.prune.spread import require_fit

    wanted = _pattern(sparsity, pattern)
    if output is None and not dry_run:
        raise typer.BadParameter("say where the pruned model goes", param_hint="--output / -o")
    if output is not None:
        check_output(output)
    calibration = _Calibration(data or [], samples, seq_len, batch_size, seed)
    checkpoint = _checkpoint(output, resume)
    options = {
        "solver": solver,
        "refine": refine,
        "budget": budget,
        "recipe": recipe,
        "rounds": rounds,
        "allocation": allocation,
        "target": target,
        "inputs": inputs,
        "schedule": schedule,
        "data": "fresh" if fresh_data else None,
        "step": _step(recipe, rounds, {"steps": steps, "lr": lr, "optimizer": optimizer, "loss": loss}),
        "polish": _polish(recipe, polish),
        "batch_norm": batch_norm,
        "depthwise": depthwise or None,
        "keep_zeros": keep_zeros or None,
        "include": include,
        "skip": skip,
        "holdout": holdout,
        "damping": damping,
        "seed": seed,
        "checkpoint": checkpoint,
    }
    allocates = _allocates(options, wanted)
    if low_memory:
        whole = {"eval_data": eval_data, "allow_pickle": allow_pickle or None, "remote_code": trust_remote_code or None}
        opening = {"device": checked_device(device), "arithmetic": checked_dtype(dtype)}
        prune_low_memory(model, output, wanted, calibration, {**options, **whole, **opening}, dry_run)
        return
    loaded = load_model(model, dtype, device, allow_pickle, trust_remote_code)
    selection = select(loaded.module, include, skip, depthwise=depthwise)
    require_fit(selection, wanted)
    scoring = _scoring_data(loaded, eval_data)  # a mistake there is to be known before calibration data are drawn
    if dry_run:
        if data:
            open_source(data, "calibration", loaded)
        if current().first:
            _show_plan(selection, wanted)
        if allocates:
            console.say("The zeros of a layer are those of an even spread; an allocation moves them between layers.")
        return
    assert output is not None
    check_output(output, needed_bytes=size_in_bytes(loaded.module))
    report, failure = _run(loaded, wanted, calibration, scoring, options)
    if not current().first:
        return
    with output_directory(output) as temporary:
        write_results(loaded, report, temporary, model_folder=None)
    if checkpoint is not None:
        shutil.rmtree(checkpoint)
    _show(report, output)
    if failure is not None:  # a script must not take a model without its scores for one that was scored
        raise typer.Exit(130 if isinstance(failure, KeyboardInterrupt) else 1)


def _checkpoint(output: Path | None, resume: bool) -> Path | None:
    from iobs.models import beside

    return beside(output, "checkpoint") if resume and output is not None else None


class _Calibration:
    """What the network is shown, as the options say."""

    def __init__(self, specs: list[str], samples: int, length: int, batch: int, seed: int) -> None:
        self.specs, self.samples, self.length, self.batch, self.seed = specs, samples, length, batch, seed
        self.window = length  # what is left of the length in the model's context, once batches were drawn

    def batches(self, loaded: LoadedModel) -> tuple[str, list[Any]]:
        """The source's name and its batches."""
        from iobs.cli.loading import draw_batches
        from iobs.data import TextSource, open_source

        source = open_source(self.specs, "calibration", loaded)
        if isinstance(source, TextSource):
            self.window = loaded.window_length(self.length)
        return source.name, draw_batches(
            source, loaded, samples=self.samples, length=self.length, seed=self.seed, batch=self.batch
        )


def _step(recipe: str | None, rounds: int | None, given: dict[str, Any]) -> GradientStep | None:
    """The gradient step with the options that were given, over that of the recipe; None where none was given."""
    from iobs.prune.settings import resolve
    from iobs.prune.steps import GradientStep

    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if given.get("lr", "auto") != "auto":
        try:
            given["lr"] = float(given["lr"])
        except ValueError:
            raise typer.BadParameter("give a number or auto", param_hint="--lr") from None
    settings = resolve(recipe, {})
    usual = settings.step
    if (rounds or settings.rounds) < 2:
        raise typer.BadParameter("steps are taken between rounds: give --rounds 2 or more", param_hint="--rounds")
    if usual is not None and usual.optimizer == "auto" and given.get("lr", "auto") != "auto":
        given = {"optimizer": "adam", **given}
    return GradientStep(**given) if usual is None else replace(usual, **given)


def _polish(recipe: str | None, steps: int | None) -> GradientStep | Literal[False] | None:
    """The polish of a recipe, or else that of "best", with another number of steps; None as nothing was given."""
    from iobs.prune.settings import resolve

    if not steps:
        return False if steps == 0 else None
    usual = resolve(recipe, {}).polish or resolve("best", {}).polish
    assert usual is not None
    return replace(usual, steps=steps, most_steps=None)


def _pattern(sparsity: float | None, text: str | None) -> Pattern:
    from iobs.core import patterns

    if text is not None and sparsity is not None:
        raise typer.BadParameter("give --sparsity or --pattern, not both", param_hint="--pattern")
    if text is not None:
        return patterns.parse(text)
    return patterns.Unstructured(0.5 if sparsity is None else sparsity)


def _scoring_data(loaded: LoadedModel, specs: list[str] | None) -> Source | None:
    """What to score on: as asked, for the embedded model its held-out text, otherwise nothing."""
    from iobs.cli.results import open_evaluation
    from iobs.models import EMBEDDED

    if specs or loaded.source == str(EMBEDDED):
        return open_evaluation(loaded, specs or [])
    return None


def _run(
    loaded: LoadedModel,
    pattern: Pattern,
    calibration: _Calibration,
    scoring: Source | None,
    options: dict[str, Any],
) -> tuple[Report, BaseException | None]:
    """Score, prune, score again; the report, and what went wrong after the pruning, which is not lost by it."""
    from iobs.cli.progress import Steps
    from iobs.cli.results import score
    from iobs.cli.watch import Watch
    from iobs.errors import first_line
    from iobs.prune import prune as prune_network

    name, batches = calibration.batches(loaded)
    dense = score(loaded, scoring, calibration.length, "scoring the dense model")
    with Steps("pruning") as steps:
        report = prune_network(loaded.module, batches, pattern, progress=Watch(steps), **options)
    report.settings = {"model": loaded.source, "calibration": name, "seq_len": calibration.window, **report.settings}
    try:
        pruned = score(loaded, scoring, calibration.length, "scoring the pruned model")
    except (Exception, KeyboardInterrupt) as error:
        report.notes.append(f"The pruned model could not be scored: {first_line(error)}")
        console.say(report.notes[-1])
        return report, error
    if dense:
        report.scores = {"dense": dense, "pruned": pruned}
    return report, None


def _allocates(options: dict[str, Any], pattern: Pattern) -> bool:
    """Whether layers get more zeros or fewer than an even spread gives them.

    Raises:
        PatternError, ProblemError: choices that are unknown or exclude each other.
    """
    from iobs.prune.allocation import as_allocation
    from iobs.prune.settings import Settings, resolve

    given = {name: value for name, value in options.items() if name in Settings.__dataclass_fields__}
    settings = resolve(options["recipe"], given)
    return as_allocation(settings.allocation).under(pattern).criterion != "uniform"


def _show_plan(selection: Selection, pattern: Pattern) -> None:
    from rich.table import Table

    from iobs.prune.audit import asked_zeros

    table = Table(title=f"{pattern}: what would be pruned", title_justify="left", header_style="bold")
    table.add_column("layer", overflow="fold")
    table.add_column("shape", justify="right", no_wrap=True)
    table.add_column("zeros", justify="right", no_wrap=True)
    for layer in selection.layers:
        zeros = asked_zeros(pattern, layer.shape)
        table.add_row(layer.name, " x ".join(map(str, layer.shape)), f"{zeros:,} of {layer.weights:,}")
    out = console.output_console()
    out.print(table)
    for name, reason in selection.skipped.items():
        out.print(f"left dense: {name} ({reason})")


def _show(report: Report, output: Path) -> None:
    from iobs.report import layers_table, rounds_table, scores_table, summary_lines

    out = console.output_console()
    out.print(layers_table(report, limit=12))
    if len(report.rounds) > 1:
        out.print(rounds_table(report))
    if report.scores:
        out.print(scores_table(report.scores))
    for line in summary_lines(report):
        out.print(line)
    out.print(
        f"Written: {output} (read {output / 'report.html'}; check it with: iobs inspect {shlex.quote(str(output))})"
    )
