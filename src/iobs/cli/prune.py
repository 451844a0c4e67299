"""`iobs prune`: a model in, a sparse model with proven zeros and a report out."""

from __future__ import annotations

import shlex
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from iobs.cli import console, options

if TYPE_CHECKING:
    from iobs.cli.by_blocks import StreamPlace
    from iobs.cli.run_file import RunSettings
    from iobs.cli.running import OutputPlace
    from iobs.core.patterns import Pattern
    from iobs.data import Batch, Source
    from iobs.models import LoadedModel
    from iobs.pruning.recipe import Changes
    from iobs.pruning.report import Report
    from iobs.pruning.store import Store
    from iobs.pruning.workspace import Request


@dataclass(frozen=True)
class PatternOptions:
    """Options for what becomes smaller, and how much.

    Attributes:
        sparsity (SHARE): Share of zeros: 0.5 or 50% (default 50%).
        pattern (N:M|structured:SHARE): Instead: keep N of every M neighbours, as 2:4; or remove whole units, as
            structured:30%.
        bits (2..8): Values of the kept weights on a grid; alone, without --sparsity or --pattern, no zeros.
        bits_per_weight (NUMBER): Instead: integers whose entropy code has this many bits a weight, as 3.0.
        megabytes (NUMBER): Instead: integers so that the packed file of the whole network has this size, embeddings
            and heads included.
        of (COST): Of structured:SHARE: macs (default), parameters or latency.
        runtime (NAME): Of structured:SHARE: times are those of torch (default) or onnx.
        units (KIND): Of structured:SHARE: auto (channels, neurons, heads; default), stream, blocks, experts
            or vocabulary (tokens that --data uses least).
    """

    sparsity: Annotated[str | None, options.completed(options.SHARES)] = None
    pattern: Annotated[str | None, options.completed(options.PATTERNS)] = None
    bits: int | None = None
    bits_per_weight: float | None = None
    megabytes: float | None = None
    of: str | None = None
    runtime: str | None = None
    units: str | None = None

    def parse(self) -> Pattern | None:
        """The pattern that the options ask for, or None.

        Raises:
            typer.BadParameter: options that exclude each other.
            PatternError: the options name no pattern.
        """
        from iobs.core.grids import grid_of
        from iobs.core.patterns import Budget, Grid, Rate, parse

        if self.pattern is not None and self.sparsity is not None:
            raise typer.BadParameter("give --sparsity or --pattern, not both", param_hint="--pattern")
        text = self.pattern if self.pattern is not None else self.sparsity
        sizes = {"--bits-per-weight": self.bits_per_weight, "--megabytes": self.megabytes}
        for option, size in sizes.items():
            if size is None:
                continue
            if text is not None or self.bits is not None or None not in sizes.values():
                raise typer.BadParameter(
                    "give one of --sparsity, --pattern, --bits, --bits-per-weight and --megabytes", param_hint=option
                )
            return Rate(size) if option == "--bits-per-weight" else Budget(megabytes=size)
        for name in ("of", "runtime", "units"):
            value = getattr(self, name)
            if value is not None and not (text or "").startswith("structured"):
                raise typer.BadParameter("it belongs to --pattern structured:SHARE", param_hint=f"--{name}")
            text = text if value is None else f"{text},{name}={value}"
        pattern = None if text is None else parse(text)
        if self.bits is None:
            return pattern
        if pattern is not None and grid_of(pattern) is not None:
            raise typer.BadParameter(f"{pattern} has bits already", param_hint="--bits")
        return Grid(self.bits) if pattern is None else pattern & Grid(self.bits)


@dataclass(frozen=True)
class MethodOptions:
    """Options for the recipe, and changes of it.

    Attributes:
        recipe (NAME|FILE): fast (default), best, one-shot, paper, or a recipe.yaml.
        rounds (N): Rounds of Algorithm 2, with fine-tuning between them.
        solver (NAME): admm, sparsegpt, obc, lobs, nettrim, wanda, magnitude, exact; or chita, cbs, woodfisher,
            global-magnitude; of whole units search, greedy, osscar, flap, random.
        settings (KEY=VALUE): Any field of the recipe, as damping=0.1 or finetune.steps=200; repeat.
        seed (N): Seed of every random choice (default 0).
        within (TIME): Time that the run may take, as 30min or 2h: fewer gradient steps, or what else fits.
    """

    panel: ClassVar = "Method"
    recipe: options.Recipe = None
    rounds: int | None = None
    solver: Annotated[
        str | None, options.completed([*options.SOLVERS, *options.NETWORK_SOLVERS, *options.UNIT_SOLVERS])
    ] = None
    settings: Annotated[list[str] | None, typer.Option("--set")] = None
    seed: int | None = None
    within: str | None = None


@dataclass(frozen=True)
class LayerOptions:
    """Options for the layers.

    Attributes:
        include (PATTERN): Prune only these layers: `*.mlp.*` or re:EXPRESSION; repeat.
        ignore (PATTERN): Leave these layers dense; repeat.
    """

    panel: ClassVar = "Layers"
    include: list[str] | None = None
    ignore: list[str] | None = None


@dataclass(frozen=True)
class CalibrationOptions(options.DataOptions):
    """Options for calibration and evaluation data.

    Attributes:
        samples (N): Number of calibration samples (default 128).
        seq_len (N): Tokens per sample (default 2048); at most the model's context.
        batch_size (N): Samples per forward pass (default 8).
        eval_data (SOURCE): Score the model before and after on these data; by default only the embedded model is
            scored.
    """

    samples: options.OptionalPositive = None
    seq_len: Annotated[int | None, typer.Option(min=2)] = None
    batch_size: options.OptionalPositive = None
    eval_data: options.EvaluationData = None


@options.command
def prune(
    model: options.Model = None,
    *,
    output: options.Output = None,
    pattern: PatternOptions,
    method: MethodOptions,
    layers: LayerOptions,
    dry_run: bool = False,
    overwrite: options.Overwrite = False,
    resume: bool = False,
    low_memory: Annotated[bool | None, typer.Option("--low-memory/--no-low-memory")] = None,
    streams: str | None = None,
    calibration: CalibrationOptions,
    loading: options.Loading,
    talk: options.Talk,
) -> None:
    """Prune MODEL and write it to a directory that loads as before, with report.html, report.json and recipe.yaml.

    Args:
        output (DIR): Directory to write; new, empty, or with --overwrite an earlier output.
        dry_run: Show what would be pruned, and stop.
        resume: Keep a checkpoint in DIR.checkpoint, and continue the one that is there.
        low_memory: Two or three blocks in memory at a time, instead of the model; --dry-run shows what it takes.
        streams (PLACE): By blocks: hidden states on device, in memory or on disk (beside DIR); default auto, where
            room is.

    Examples:
        iobs prune MODEL -o OUT --sparsity 50%  # a Hugging Face directory or name
        iobs prune net.py:model -o OUT --data net.py:batches --recipe best  # a network of your own, fine-tuned
        iobs prune MODEL -o OUT --pattern 2:4 --ignore '*.down_proj' --resume  # with a checkpoint
        iobs prune MODEL -o OUT2 --recipe OUT/recipe.yaml  # the same run again
    """
    from iobs.cli.by_blocks import StreamPlace, prune_low_memory, refuse_streams
    from iobs.cli.running import OutputPlace, saying_how_to_continue
    from iobs.cli.vocabulary import is_vocabulary, prune_vocabulary, refuse_useless
    from iobs.pruning.runtime.ranks import current

    settings = _settings(
        pattern, method, {**vars(layers), **vars(calibration), "dtype": loading.dtype, "low_memory": low_memory}
    )
    _refuse_units(settings, model)
    if output is None and not dry_run:
        raise typer.BadParameter("say where the pruned model goes", param_hint="--output / -o")
    place = OutputPlace.of(model, output, overwrite, resume)
    if is_vocabulary(settings.options.pattern):
        refuse_useless(vars(method) | vars(layers) | vars(calibration) | {"resume": resume, "streams": streams})
    if settings.options.low_memory:
        _refuse_whole(settings, calibration, loading)
    elif streams is not None:
        refuse_streams(streams, loading.device)
    failure = None
    with nullcontext() if dry_run else saying_how_to_continue(place.checkpoint):
        if is_vocabulary(settings.options.pattern):
            smaller, report = prune_vocabulary(model, settings, calibration.eval_data, loading, dry_run, talk.as_json)
            if report is not None and current().first:  # ranks do the same work, and one writes
                _write_and_show(smaller, report, settings, place, talk.as_json)
        elif settings.options.low_memory:
            prune_low_memory(model, settings, loading.device, place, dry_run, talk.as_json, streams or "auto")
        else:
            failure = _prune_resident(
                model,
                settings,
                eval_data=calibration.eval_data,
                loading=loading,
                place=place,
                streams=StreamPlace.of(streams, place.output),
                dry_run=dry_run,
                as_json=talk.as_json,
            )
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    if failure is not None:  # a script must not take a model without its scores for one that was scored
        raise typer.Exit(1)


def _settings(pattern_options: PatternOptions, method: MethodOptions, others: dict[str, object]) -> RunSettings:
    """The recipe and the options of the run: the command line first, then the file given as --recipe, then defaults.

    Args:
        pattern_options: what becomes smaller.
        method: recipe, and changes of it.
        others: values of further options by name; those that are no fields of `RunOptions` are ignored.

    Raises:
        typer.BadParameter: options that exclude each other.
        ProblemError, PatternError: choices that are unknown or exclude each other.
    """
    from iobs.cli.run_file import RunOptions, RunSettings, read_recipe
    from iobs.core.structured import Structured
    from iobs.pruning.cost.affordable import require_forms
    from iobs.pruning.plan.counts import under_pattern
    from iobs.pruning.recipe import NETWORK_SOLVERS, as_allocation

    pattern = pattern_options.parse()
    name = method.recipe or ("one-shot" if method.solver in NETWORK_SOLVERS else "fast")
    changes: Changes = {}
    if method.solver is not None:
        changes["solver"] = method.solver
    if method.rounds is not None:
        changes["rounds"] = method.rounds
    recipe, run = read_recipe(name, changes, method.settings or [], units=isinstance(pattern, Structured))
    values = {**others, "pattern": pattern, "seed": method.seed, "within": method.within}
    of_run = {field.name: values[field.name] for field in fields(RunOptions) if field.name in values}
    options = RunOptions.of(of_run, run, judged=recipe.blocks is not None)
    under_pattern(as_allocation(recipe.allocation), options.pattern)
    if options.within is not None:
        require_forms(recipe, options.pattern)
    return RunSettings(recipe, options)


def _refuse_units(settings: RunSettings, model: str | None) -> None:
    """Refuse, before the model is loaded, units that cannot be written.

    Raises:
        typer.BadParameter: OUT could not say the narrower model.
    """
    from iobs.core.structured import Structured
    from iobs.models.factory import is_built_by_code

    pattern, by_code = settings.options.pattern, is_built_by_code(model or "")
    if isinstance(pattern, Structured) and pattern.units in ("blocks", "experts") and by_code:
        raise typer.BadParameter(
            "removes whole blocks or experts, and the code of this network builds all of them; use iobs.prune in "
            "Python, and save the narrower network with torch.save(model, file) or export it",
            param_hint="--units",
        )


def _with_unequal_widths(loaded: LoadedModel) -> LoadedModel:
    """A model of transformers that is written in the layout nemotron-nas, which has widths for each layer.

    Raises:
        typer.BadParameter: the layout cannot hold the model.
    """
    from iobs.errors import ModelError
    from iobs.exports.source import ExportSource
    from iobs.exports.to_nemotron_nas import require_nemotron_nas, write_nemotron_nas
    from iobs.models.sixteen_bits import stored_as_half

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


def _refuse_whole(settings: RunSettings, calibration: CalibrationOptions, loading: options.Loading) -> None:
    """Refuse options that need the whole model in memory."""
    from iobs.cli.vocabulary import is_vocabulary
    from iobs.core.structured import Structured

    pattern = settings.options.pattern
    reasons = {
        "--pattern structured": isinstance(pattern, Structured) and not is_vocabulary(pattern),
        "--eval-data": calibration.eval_data,
        "--allow-pickle": loading.allow_pickle,
        "--trust-remote-code": loading.trust_remote_code,
    }
    whole = [name for name, reason in reasons.items() if reason]
    if whole:
        raise typer.BadParameter(
            f"{', '.join(whole)}: not with one block in memory at a time", param_hint="--low-memory"
        )


def _prune_resident(
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
    from iobs.cli.by_blocks import plan_of, run_where_it_fits, store_of
    from iobs.cli.dry_run import show_layers, show_units
    from iobs.cli.loading import batches_of_run, checked_device, load_model
    from iobs.core.structured import Structured
    from iobs.errors import DataError
    from iobs.models import check_output, size_in_bytes
    from iobs.models.factory import is_built_by_code
    from iobs.pruning.cost.foresight import foresee
    from iobs.pruning.driver import requested, selected_for
    from iobs.pruning.runtime.ranks import current
    from iobs.pruning.store import Store

    run_options, request = settings.options, None
    output, checkpoint = place.output, place.checkpoint
    device = checked_device(loading.device)
    loaded = load_model(model, run_options.dtype, device, loading.allow_pickle, loading.trust_remote_code, moved=False)
    pattern = run_options.pattern
    if isinstance(pattern, Structured) and pattern.uniform is False and not is_built_by_code(model or ""):
        loaded = _with_unequal_widths(loaded)
    if not isinstance(pattern, Structured):  # units are found by a forward pass, and their names in the run
        depthwise, whole = settings.recipe.depthwise, Store(loaded.module)
        selection = selected_for(whole, pattern, run_options.include, run_options.ignore, depthwise)
        selection, request = requested(
            loaded.module, settings.recipe, pattern, selection, run_options.holdout, run_options.seed, checkpoint
        )
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
            foreseen = foresee(store, request, batches, within)
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
    _write_and_show(loaded, report, settings, place, as_json)
    return failure


def _write_and_show(
    loaded: LoadedModel, report: Report, settings: RunSettings, place: OutputPlace, as_json: bool
) -> None:
    """Write the output directory, packed if its size was asked for, and show what came out."""
    import torch

    from iobs.cli.running import write_results
    from iobs.core.patterns import Budget
    from iobs.models import output_directory, size_in_bytes
    from iobs.models.packed_files import pack_directory, scratch_beside

    assert place.output is not None
    packs = isinstance(settings.options.pattern, Budget)
    with output_directory(place.output, place.replaceable) as temporary, ExitStack() as stack:
        folder = stack.enter_context(scratch_beside(place.output, size_in_bytes(loaded.module))) if packs else temporary
        write_results(loaded, report, folder, model_folder=None)
        settings.write(folder)
        if packs:
            pack_directory(folder, temporary, torch.bfloat16)
    place.finish()
    _show(report, place.output, loaded.source, as_json, packed=packs)


def _scoring_data(loaded: LoadedModel, specs: list[str] | None) -> Source | None:
    """Evaluation data: those of --eval-data, for the embedded model its held-out text, otherwise none."""
    from iobs.cli.running import open_evaluation
    from iobs.models import EMBEDDED

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
    from iobs.cli.by_blocks import plan_of, show_peak, show_plan
    from iobs.cli.loading import batches_of_run
    from iobs.cli.running import prune_with_progress, score
    from iobs.errors import first_line
    from iobs.evaluate import BeforeAfter
    from iobs.pruning.cost.memory import peaks_in_memory

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


def _show(report: Report, output: Path, model: str, as_json: bool, packed: bool) -> None:
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
    if packed:
        size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
        own = not (output / "config.json").is_file()  # code of the user builds the network
        readers = "iobs.load and iobs bench" if own else "transformers, iobs run and iobs bench"
        out.print(f"Its weights are {size / 1e6:.2f} MB, packed: {readers} read them.")
    elif str(report.settings.get("pattern", "")).startswith("rate:"):
        folder = shlex.quote(str(output))
        out.print(f"These files are dense; a file of the bits of the integers: iobs pack {folder} -o {folder}-packed")
    beside = f" --beside {shlex.quote(model)}" if isinstance(report, StructuredReport) else ""
    out.print(f"Speed and memory on this machine: iobs bench {shlex.quote(str(output))}{beside}")
