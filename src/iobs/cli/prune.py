"""`iobs prune`: a model in, a sparse model with proven zeros and a report out."""

from __future__ import annotations

import shlex
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iobs.cli import console
from iobs.cli.method import Method, Wanted, option

if TYPE_CHECKING:
    from iobs.cli.offload import Streams
    from iobs.cli.run_file import Asked
    from iobs.cli.running import Place
    from iobs.data import Batch, Source
    from iobs.models import LoadedModel
    from iobs.pruning.recipe import Changes
    from iobs.pruning.report import Report
    from iobs.pruning.store import Store
    from iobs.pruning.workspace import Request


@dataclass(frozen=True)
class Calibration:
    """Options for calibration and evaluation data."""

    data: console.Data = None
    samples: Annotated[
        int | None, option("N", "Number of calibration samples (default 128).", console.DATA_PANEL, least=1)
    ] = None
    seq_len: Annotated[
        int | None,
        option("N", "Tokens per sample (default 2048); at most the model's context.", console.DATA_PANEL, least=2),
    ] = None
    batch_size: Annotated[
        int | None, option("N", "Samples per forward pass (default 8).", console.DATA_PANEL, least=1)
    ] = None
    eval_data: Annotated[
        list[str] | None,
        option(
            "SOURCE",
            "Score the model before and after on these data; by default only the embedded model is scored.",
            console.DATA_PANEL,
        ),
    ] = None


@console.with_groups
def prune(
    model: console.Model = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=console.at_home,
            metavar="DIR",
            help="Directory to write; new, empty, or with --overwrite an earlier output.",
            show_default=False,
        ),
    ] = None,
    wanted: Wanted = Wanted(),  # noqa: B008 - frozen
    method: Method = Method(),  # noqa: B008 - frozen
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be pruned, and stop.")] = False,
    overwrite: console.Overwrite = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep a checkpoint in DIR.checkpoint, and continue the one that is there."),
    ] = False,
    low_memory: Annotated[
        bool | None,
        typer.Option(
            "--low-memory/--no-low-memory",
            help="Two or three blocks in memory at a time, instead of the model; --dry-run shows what it takes.",
            show_default=False,
        ),
    ] = None,
    streams: Annotated[
        str | None,
        typer.Option(
            "--streams",
            metavar="PLACE",
            help="By blocks: hidden states on device, in memory or on disk (beside DIR); default auto, where room is.",
            show_default=False,
        ),
    ] = None,
    calibration: Calibration = Calibration(),
    loading: console.Loading = console.Loading(),  # noqa: B008 - frozen
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Prune MODEL and write it to a directory that loads as before, with report.html, report.json and recipe.yaml."""
    from iobs.cli.low_memory import prune_low_memory
    from iobs.cli.offload import Streams, refuse_streams
    from iobs.cli.running import Place, saying_how_to_continue

    asked = _asked(wanted, method, calibration, loading.dtype, low_memory)
    _refuse_units(asked, model)
    if output is None and not dry_run:
        raise typer.BadParameter("say where the pruned model goes", param_hint="--output / -o")
    place = Place.of(model, output, overwrite, resume)
    if asked.options.low_memory:
        _refuse_whole(asked, calibration, loading)
    elif streams is not None:
        refuse_streams(streams, loading.device)
    failure = None
    with nullcontext() if dry_run else saying_how_to_continue(place.checkpoint):
        if asked.options.low_memory:
            prune_low_memory(model, asked, loading.device, place, dry_run, talk.as_json, streams or "auto")
        else:
            kept = Streams.of(streams, place.output)
            failure = _prune_resident(model, asked, calibration.eval_data, loading, place, kept, dry_run, talk.as_json)
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    if failure is not None:  # a script must not take a model without its scores for one that was scored
        raise typer.Exit(1)


def _asked(
    wanted: Wanted, method: Method, calibration: Calibration, dtype: str | None, low_memory: bool | None
) -> Asked:
    """The recipe and the options of the run: the command line first, then the file given as --recipe, then defaults.

    Raises:
        typer.BadParameter: --sparsity beside --pattern.
        ProblemError, PatternError: choices that are unknown or exclude each other.
    """
    from iobs.cli.run_file import Asked, RunOptions, read_recipe
    from iobs.core.structured import Structured
    from iobs.pruning.allocation.counts import under_pattern
    from iobs.pruning.recipe import as_allocation
    from iobs.pruning.recipe.network_solvers import NETWORK_SOLVERS

    if wanted.pattern is not None and wanted.sparsity is not None:
        raise typer.BadParameter("give --sparsity or --pattern, not both", param_hint="--pattern")
    usual = "one-shot" if method.solver in NETWORK_SOLVERS else "fast"
    changes: Changes = {}
    if method.solver is not None:
        changes["solver"] = method.solver
    if method.rounds is not None:
        changes["rounds"] = method.rounds
    pattern = wanted.parsed()
    recipe, run = read_recipe(
        method.recipe or usual, changes, method.settings or [], units=isinstance(pattern, Structured)
    )
    given = {
        "pattern": pattern,
        "seed": method.seed,
        "include": method.include,
        "ignore": method.ignore,
        "data": calibration.data,
        "samples": calibration.samples,
        "seq_len": calibration.seq_len,
        "batch_size": calibration.batch_size,
        "dtype": dtype,
        "low_memory": low_memory,
    }
    options = RunOptions.of(given, run, judged=recipe.blocks is not None)
    under_pattern(as_allocation(recipe.allocation), options.pattern)
    return Asked(recipe, options)


def _refuse_units(asked: Asked, model: str | None) -> None:
    """Refuse, before the model is loaded, units that cannot be written.

    Raises:
        typer.BadParameter: OUT could not say the narrower model.
    """
    from iobs.core.structured import Structured
    from iobs.models.factory import is_built_by_code

    pattern, by_code = asked.options.pattern, is_built_by_code(model or "")
    if not isinstance(pattern, Structured):
        return
    if pattern.uniform is False and not by_code:
        raise typer.BadParameter(
            "uniform=false gives every layer a width of its own, which the configuration in a model directory cannot "
            "say; use iobs.prune in Python, and export the narrower model",
            param_hint="--pattern",
        )
    if pattern.whole and by_code:
        raise typer.BadParameter(
            "removes whole blocks or experts, and the code of this network builds all of them; use iobs.prune in "
            "Python, and save the narrower network with torch.save(model, file) or export it",
            param_hint="--units",
        )


def _refuse_whole(asked: Asked, calibration: Calibration, loading: console.Loading) -> None:
    """Refuse options that need the whole model in memory."""
    from iobs.core.structured import Structured

    given = {
        "--pattern structured": isinstance(asked.options.pattern, Structured),
        "--eval-data": calibration.eval_data,
        "--allow-pickle": loading.allow_pickle,
        "--trust-remote-code": loading.trust_remote_code,
    }
    whole = [name for name, value in given.items() if value]
    if whole:
        raise typer.BadParameter(
            f"{', '.join(whole)}: not with one block in memory at a time", param_hint="--low-memory"
        )


def _prune_resident(
    model: str | None,
    asked: Asked,
    eval_data: list[str] | None,
    loading: console.Loading,
    place: Place,
    streams: Streams,
    dry_run: bool,
    as_json: bool,
) -> BaseException | None:
    """Prune a model that is in memory as a whole; on a GPU that is too small for it block by block.

    Returns:
        The error of scoring the pruned model, which is written nevertheless.
    """
    from iobs.cli.dry_run import show_layers, show_units
    from iobs.cli.loading import batches_of_run, checked_device, load_model
    from iobs.cli.offload import plan_of, run_where_it_fits, store_of
    from iobs.cli.results import write_results
    from iobs.core.structured import Structured
    from iobs.errors import DataError
    from iobs.models import check_output, output_directory, size_in_bytes
    from iobs.pruning.cost.foresight import foresee
    from iobs.pruning.driver import requested
    from iobs.pruning.runtime.ranks import current
    from iobs.pruning.store import Store

    options, request = asked.options, None
    output, checkpoint = place.output, place.checkpoint
    device = checked_device(loading.device)
    loaded = load_model(model, options.dtype, device, loading.allow_pickle, loading.trust_remote_code, moved=False)
    if not isinstance(options.pattern, Structured):  # units are found by a forward pass, and their names in the run
        selection = Store(loaded.module).select(options.include, options.ignore, asked.recipe.depthwise)
        selection, request = requested(
            asked.recipe, options.pattern, selection, options.holdout, options.seed, checkpoint
        )
    store = store_of(loaded, request, device, streams)
    scoring = _scoring_data(loaded, eval_data)  # a mistake in it is reported before calibration data are drawn
    if dry_run and request is None:
        show_units(loaded, store, asked, as_json)
        return None
    if dry_run:
        assert request is not None
        batches: list[Batch] = []
        with suppress(*[] if options.data or not store.whole else [DataError]):  # the model has no data of its own
            batches = batches_of_run(loaded, options)[2]
        plan, forecast = plan_of(store, request, batches), None
        if store.whole and batches:
            forecast = foresee(
                store,
                request.recipe,
                request.patterns,
                request.pattern,
                batches,
                holdout=request.holdout,
                seed=request.seed,
            )
        if current().first:
            show_layers(request, selection.skipped, as_json, plan, forecast)
        return None
    assert output is not None
    check_output(output, size_in_bytes(loaded.module), place.replaceable)
    report, failure = run_where_it_fits(
        lambda store: _run(loaded, store, asked, scoring, checkpoint, request), loaded, store, request, streams
    )
    if not current().first:
        return None
    with output_directory(output, place.replaceable) as temporary:
        write_results(loaded, report, temporary, model_folder=None)
        asked.write(temporary)
    place.finish()
    _show(report, output, loaded.source, as_json)
    return failure


def _scoring_data(loaded: LoadedModel, specs: list[str] | None) -> Source | None:
    """Evaluation data: as asked, for the embedded model its held-out text, otherwise none."""
    from iobs.cli.results import open_evaluation
    from iobs.models import EMBEDDED

    if specs or loaded.source == str(EMBEDDED):
        return open_evaluation(loaded, specs or [])
    return None


def _run(
    loaded: LoadedModel,
    store: Store,
    asked: Asked,
    scoring: Source | None,
    checkpoint: Path | None,
    request: Request | None,
) -> tuple[Report, BaseException | None]:
    """Score, prune, score again.

    Returns:
        The report, and the error of the second scoring, which does not lose the pruned model.
    """
    from iobs.cli.loading import batches_of_run
    from iobs.cli.offload import plan_of, show_plan
    from iobs.cli.results import score
    from iobs.cli.running import prune_as_asked
    from iobs.errors import first_line
    from iobs.evaluate import BeforeAfter

    options = asked.options
    name, window, batches = batches_of_run(loaded, options)
    if request is not None and (plan := plan_of(store, request, batches)) is not None:
        show_plan(plan, console.say)
    with store.runnable():
        dense = score(loaded, scoring, options.seq_len, "scoring the dense model")
    facts = {"model": loaded.source, "calibration": name, "seq_len": window}
    shown = [BeforeAfter(batches, loaded.tokenizer)] if store.whole else []  # every token would move all blocks
    report = prune_as_asked(store, batches, asked, checkpoint, facts, shown)
    try:
        with store.runnable():
            pruned = score(loaded, scoring, options.seq_len, "scoring the pruned model")
    except (Exception, KeyboardInterrupt) as error:
        report.notes.append(f"The pruned model could not be scored: {first_line(error)}")
        console.warn(report.notes[-1])
        return report, error
    if dense:
        report.add_scores({"dense": dense, "pruned": pruned})
    return report, None


def _show(report: Report, output: Path, model: str, as_json: bool) -> None:
    from iobs.pruning.structured_report import StructuredReport
    from iobs.report import layers_table, rounds_table, scores_table, summary_lines, widths_table

    if as_json:
        console.print_json({"output": str(output), **report.as_dict()})
        return
    out = console.output_console()
    if isinstance(report, StructuredReport):
        out.print(widths_table(report))
    elif report.best.layers:
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
    beside = f" --beside {shlex.quote(model)}" if isinstance(report, StructuredReport) else ""
    out.print(f"Speed and memory on this machine: iobs bench {shlex.quote(str(output))}{beside}")
