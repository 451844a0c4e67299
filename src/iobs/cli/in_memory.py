"""Runs of `iobs prune` with a model that is in memory as a whole, and their dry runs."""

from __future__ import annotations

import shlex
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
import typer

from iobs.cli import console, options
from iobs.cli.by_blocks import StreamPlace, plan_of, run_where_it_fits, show_peak, show_plan, show_time, store_of
from iobs.cli.loading import batches_of_run, checked_device, load_model
from iobs.cli.output_place import OutputPlace
from iobs.cli.run_file import RunSettings
from iobs.cli.running import open_evaluation, prune_with_progress, score, write_results
from iobs.core.formats import duration
from iobs.core.grids import stored_bits
from iobs.core.outputs import check_output
from iobs.core.patterns import Budget, Rate
from iobs.core.structured import Structured
from iobs.data import Batch, Source
from iobs.errors import DataError, ModelError, first_line
from iobs.evaluate import BeforeAfter
from iobs.exports.source import ExportSource
from iobs.exports.to_nemotron_nas import require_nemotron_nas, write_nemotron_nas
from iobs.models import EMBEDDED, LoadedModel, output_directory, size_in_bytes
from iobs.models.factory import is_built_by_code
from iobs.models.packed_files import pack_directory, scratch_beside
from iobs.models.sixteen_bits import stored_as_half
from iobs.pruning.audit import asked_zeros
from iobs.pruning.cost.foresight import Foreseen, foresee
from iobs.pruning.cost.memory import Plan, peaks_in_memory
from iobs.pruning.coverage import Reason
from iobs.pruning.driver import before_observation, examined, requested, select_on, selected_for
from iobs.pruning.network.selection import Selection
from iobs.pruning.plan.counts import under_pattern
from iobs.pruning.report import Report
from iobs.pruning.runtime.ranks import current
from iobs.pruning.store import Store
from iobs.pruning.structured import plan_structured, require_possible
from iobs.pruning.structured_report import PlannedCost, StructuredReport, StructuredRequest, UnitsPlan
from iobs.pruning.workspace import Request
from iobs.report import layers_table, rounds_table, scores_table, summary_lines, widths_table
from iobs.report.tables import titled_table


def prune_in_memory(
    model: str | None,
    settings: RunSettings,
    eval_data: list[str] | None,
    loading: options.Loading,
    place: OutputPlace,
    streams: StreamPlace,
    dry_run: bool,
    as_json: bool,
) -> BaseException | None:
    """Prune a model that is in memory as a whole; on a GPU that is too small for it block by block.

    Returns:
        The error of scoring the pruned model, which is written nevertheless.
    """
    run_options, request = settings.options, None
    output, checkpoint = place.output, place.checkpoint
    device = checked_device(loading.device)
    loaded = load_model(model, replace(loading, dtype=run_options.dtype), moved=False)
    pattern = run_options.pattern
    if isinstance(pattern, Structured) and pattern.uniform is False and not is_built_by_code(model or ""):
        loaded = _with_unequal_widths(loaded)
    whole, recipe, seed = Store(loaded.module), settings.recipe, run_options.seed

    def select() -> tuple[Selection, Request]:
        layers = selected_for(whole, pattern, run_options.include, run_options.ignore, recipe.depthwise)
        return requested(loaded.module, recipe, pattern, layers, run_options.holdout, seed, checkpoint)

    if not isinstance(pattern, Structured):  # units are found by a forward pass, and their names in the run
        selected = before_observation(whole, select)
        if selected is None:  # names may be of layers that only a forward pass shows
            with whole.prepared():
                selected = select_on(whole, batches_of_run(loaded, run_options)[2], select, seed)[1:]
        selection, request = selected
    store = store_of(loaded, request, device, streams)
    scoring = _scoring_data(loaded, eval_data)  # a mistake in it is reported before calibration data are drawn
    if dry_run and request is None:
        show_units(loaded, store, settings, as_json)
        return None
    if dry_run:
        assert request is not None
        batches: list[Batch] = []
        with suppress(*[] if run_options.data or not store.whole else [DataError]):  # the model has no data of its own
            batches = batches_of_run(loaded, run_options)[2]
        within = run_options.seconds
        if within is not None and not batches:
            console.warn(
                f"--within {run_options.within} is left out of account: no time is foretold without calibration data. "
                "Give --data."
            )
        plan, foreseen = plan_of(store, request, batches, within), None
        if store.whole and batches:
            collected, selection, request = examined(store, batches, select, seed)
            foreseen = foresee(store, request, collected, within)
        if current().first:
            show_layers(request, selection.skipped, as_json, plan, foreseen)
        return None
    assert output is not None
    check_output(output, size_in_bytes(loaded.module), place.replaceable)
    report, failure = run_where_it_fits(
        lambda store: _run(loaded, store, settings, scoring, checkpoint, request), loaded, store, request, streams
    )
    if not current().first:
        return None
    write_and_show(loaded, report, settings, place, as_json)
    return failure


def _with_unequal_widths(loaded: LoadedModel) -> LoadedModel:
    """A model of transformers that is written in the layout nemotron-nas, which has widths for each layer.

    Raises:
        typer.BadParameter: the layout cannot hold the model.
    """
    try:
        require_nemotron_nas(ExportSource(loaded))
    except ModelError as error:
        raise typer.BadParameter(
            "uniform=false gives every layer a width of its own, for which a model directory has the layout "
            f"nemotron-nas alone: {error} Or use iobs.prune and iobs.export in Python.",
            param_hint="--pattern",
        ) from error

    def write(model: LoadedModel, directory: Path) -> None:
        with stored_as_half(model.module):
            added = sum(matrix.added for matrix in write_nemotron_nas(ExportSource(model), directory))
        if added:
            console.say(f"{added:,} zeros fill layers up to widths that nemotron-nas has (heads, 256 neurons).")

    return replace(loaded, writer=write)


def _scoring_data(loaded: LoadedModel, specs: list[str] | None) -> Source | None:
    """Evaluation data: those of --eval-data, for the embedded model its held-out text, otherwise none."""
    if specs or loaded.source == str(EMBEDDED):
        return open_evaluation(loaded, specs or [])
    return None


def _run(
    loaded: LoadedModel,
    store: Store,
    settings: RunSettings,
    scoring: Source | None,
    checkpoint: Path | None,
    request: Request | None,
) -> tuple[Report, BaseException | None]:
    """Score, prune, score again.

    Returns:
        The report, and the error of the second scoring, which does not lose the pruned model.
    """
    run_options = settings.options
    name, window, batches = batches_of_run(loaded, run_options)
    plan = None if request is None else plan_of(store, request, batches, timed=run_options.within is None)
    if plan is not None:
        show_plan(plan, console.say)
    elif request is not None:
        show_peak(peaks_in_memory(store, request, batches), console.say)
    with store.runnable():
        dense = score(loaded, scoring, run_options.seq_len, "scoring the dense model")
    facts = {"model": loaded.source, "calibration": name, "seq_len": window}
    shown = [BeforeAfter(batches, loaded.tokenizer)] if store.whole else []  # every token would move all blocks
    report = prune_with_progress(store, batches, settings, checkpoint, facts, shown)
    try:
        with store.runnable():
            pruned = score(loaded, scoring, run_options.seq_len, "scoring the pruned model")
    except (Exception, KeyboardInterrupt) as error:
        report.notes.append(f"The pruned model could not be scored: {first_line(error)}")
        console.warn(report.notes[-1])
        return report, error
    if dense:
        assert scoring is not None
        report.settings["evaluation"] = scoring.name
        report.add_scores({"dense": dense, "pruned": pruned})
    return report, None


def write_and_show(
    loaded: LoadedModel, report: Report, settings: RunSettings, place: OutputPlace, as_json: bool
) -> None:
    """Write the output directory, packed if its size was asked for, and show what came out."""

    assert place.output is not None
    packs = isinstance(settings.options.pattern, Budget)
    with output_directory(place.output, place.replaceable) as temporary, ExitStack() as stack:
        folder = stack.enter_context(scratch_beside(place.output, size_in_bytes(loaded.module))) if packs else temporary
        write_results(loaded, report, folder, model_folder=None)
        settings.write(folder)
        if packs:
            pack_directory(folder, temporary, torch.bfloat16)
    place.finish()
    _show_report(report, place.output, loaded, as_json, packed=packs)


def _show_report(report: Report, output: Path, loaded: LoadedModel, as_json: bool, packed: bool) -> None:
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
    if packed:
        size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
        by_code = not (output / "config.json").is_file()  # code of the user builds the network
        commands = ", iobs run and iobs bench" if loaded.task == "causal-lm" else " and iobs.load"
        readers = "iobs.load and iobs bench" if by_code else f"transformers{commands}"
        out.print(f"Its weights are {size / 1e6:.2f} MB, packed: {readers} read them.")
    elif "rate" in str(report.settings.get("pattern", "")):  # alone, or beside zeros
        folder = shlex.quote(str(output))
        out.print(f"These files are dense; a file of the bits of the integers: iobs pack {folder} -o {folder}-packed")
    beside = f" --beside {shlex.quote(loaded.source)}" if isinstance(report, StructuredReport) else ""
    out.print(f"Speed and memory on this machine: iobs bench {shlex.quote(str(output))}{beside}")


# ---- dry runs
def show_layers(
    request: Request,
    skipped: dict[str, Reason],
    as_json: bool,
    plan: Plan | None,
    foreseen: Foreseen | None,
) -> None:
    """Show the layers that a run would prune, with their zeros as far as the run does not choose them.

    Args:
        request: what is asked of every layer.
        skipped: layers that stay dense.
        as_json: print JSON; a number that the run chooses is null there.
        plan: of a run by blocks, or None.
        foreseen: time and memory of a run in memory; None without calibration data.
    """

    patterns, pattern = request.patterns, request.pattern
    zeros = {layer: asked_zeros(patterns[layer], layer.shape) for layer in patterns}
    bits = {
        layer: round(each.bits * layer.weights) if isinstance(each, Rate) else stored_bits(each, layer.shape)
        for layer, each in patterns.items()
    }
    about = _about_the_division(request)
    if as_json:
        layers = [
            {"layer": layer.name, "shape": layer.shape, "zeros": count, "bits": bits[layer]}
            for layer, count in zeros.items()
        ]
        dense = {name: str(reason) for name, reason in skipped.items()}
        blocks: dict[str, object] = {} if plan is None else {"plan": asdict(plan)}
        if foreseen is not None:
            seconds = foreseen.forecast.seconds if foreseen.forecast.parts else None
            blocks |= {"seconds": seconds, "phases": foreseen.forecast.phases}
            blocks |= {"peaks": foreseen.peaks} if foreseen.peaks else {}
            blocks |= {"form": foreseen.form} if foreseen.form else {}
        result = {"pattern": str(pattern), "layers": layers, "dense": dense, "about": about}
        console.print_json({**result, **blocks})
        return
    names = ["shape", "zeros", *(["bits a weight"] if any(bits.values()) else [])]
    table = titled_table(f"{pattern}: what would be pruned", ("layer",), names)
    for layer, count in zeros.items():
        stored = bits[layer]
        shown = f"{stored / layer.weights:.3g}" if stored else "-"
        cells = " x ".join(map(str, layer.shape)), "chosen" if count is None else f"{count:,} of {layer.weights:,}"
        table.add_row(layer.name, *cells, *([shown] * (len(names) - 2)))
    out = console.output_console()
    out.print(table)
    for name, reason in skipped.items():
        out.print(f"left dense: {name} ({reason})")
    if plan is not None:
        show_plan(plan, out.print)
    if foreseen is not None:
        if foreseen.form:
            out.print(foreseen.form)
        show_peak(foreseen.peaks, out.print)
        if foreseen.forecast.parts:
            show_time(foreseen.forecast.seconds, foreseen.forecast.phases, out.print)
        else:  # solvers of whole networks, whose work is not counted
            console.say("The time of this solver is not foretold.")
    if about:
        console.say(about)


def _about_the_division(request: Request) -> str:
    """Sentence about the zeros that the run itself chooses; empty if it chooses none."""
    pattern = request.pattern
    if isinstance(pattern, Rate) and request.recipe.division.criterion != "uniform":
        weights = sum(layer.weights for layer, of_layer in request.patterns.items() if of_layer is pattern)
        megabytes = weights * pattern.bits / 8e6
        return (
            "The bits shown are those of an even division; the run divides them among these layers. Together they take "
            f"{megabytes:.4g} MB."
        )
    allocation = under_pattern(request.recipe.division, pattern)
    moved = allocation.criterion != "uniform" or request.recipe.network_solver is not None
    return "The zeros shown are those of an even division; the run moves zeros between layers." if moved else ""


def show_units(loaded: LoadedModel, store: Store, settings: RunSettings, as_json: bool) -> None:
    """Show the units that a run may remove, and what is left of the costs at most.

    Args:
        loaded: the model, with what its calibration data need.
        store: of the model.
        settings: recipe and options; the pattern is `Structured`.
        as_json: print JSON; a number that the run finds out is null there.

    Raises:
        IOBSError: as the run, before it removes anything.
    """
    options, pattern = settings.options, settings.options.pattern
    assert isinstance(pattern, Structured)
    named = (options.include, options.ignore)
    request = StructuredRequest(pattern, settings.recipe, *named, options.holdout, options.seed)
    require_possible(store, request)  # before the data are read
    plan = plan_structured(store, store.collect_batches(batches_of_run(loaded, options)[2]), request, timed=True)
    if current().first:
        show_units_plan(pattern, plan, as_json, _about_the_units(pattern, plan))


def show_units_plan(pattern: Structured, plan: UnitsPlan, as_json: bool, about: str) -> None:
    """Show the plan of a run that removes units, and a sentence about what the run itself finds out."""
    if as_json:
        console.print_json({"pattern": str(pattern), **asdict(plan), "about": about})
        return
    _print_units(pattern, plan)
    console.say(about)


def _print_units(pattern: Structured, plan: UnitsPlan) -> None:
    whole = pattern.whole
    names = "in" if whole else "read by", "units"
    table = titled_table(f"{pattern}: what would be removed", names, ("now", "left"))
    for group in plan.units:
        kept = f"{group.least:,} or more" if group.kept is None else f"{group.kept:,}"
        table.add_row(group.name if whole else ", ".join(group.layers), group.kind, f"{group.count:,}", kept)
    out = console.output_console()
    out.print(table)
    for cost in plan.costs:
        out.print(_line_of(cost))
    for note in plan.notes:
        out.print(note)
    if plan.seconds is not None:
        out.print(f"Estimated time: {duration(plan.seconds)}")


def _line_of(cost: PlannedCost) -> str:
    """A cost before and at most after, as a line."""
    begin = f"{cost.name} {cost.where}: {cost.before:.4g}"
    if cost.most is None:
        return f"{begin}; what is left is known after the run"
    return f"{begin} -> at most {cost.most:.4g} ({cost.most / cost.before:.1%})"


def _about_the_units(pattern: Structured, plan: UnitsPlan) -> str:
    """Sentence about what the run itself finds out."""
    if pattern.whole:
        which = f"The run chooses which {pattern.units} are removed."
    elif pattern.of == "latency":
        which = f"The run measures times, and removes {pattern.sparsity:.0%} of the time of the network."
    elif any(group.kept is None for group in plan.units):
        which = "The run measures how many units each layer needs."
    else:
        which = "The run chooses which units are removed."
    return which
