"""`iobs prune`: a model in, a sparse model with proven zeros and a report out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from iobs.cli import options
from iobs.core.formats import as_seconds

if TYPE_CHECKING:
    from iobs.cli.run_file import RunSettings
    from iobs.core.patterns import Pattern
    from iobs.pruning.recipe import Changes


_SOLVERS = *options.SOLVERS, *options.VALUE_SOLVERS, *options.NETWORK_SOLVERS, *options.UNIT_SOLVERS


@dataclass(frozen=True)
class PatternOptions:
    """Options for what becomes smaller, and how much.

    Attributes:
        sparsity (SHARE): Share of zeros: 0.5 or 50% (default 50%).
        pattern (N:M|structured:SHARE): Instead: keep N of every M neighbours, as 2:4; or remove whole units, as
            structured:30%.
        bits (2..8): Values of the kept weights on a grid; alone, without --sparsity or --pattern, no zeros.
        bits_per_weight (NUMBER): Integers whose entropy code has this many bits a weight, as 3.0; alone, or with the
            zeros of --sparsity or --pattern.
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
        from iobs.core.patterns import Budget, Grid, Rate, SparseGrid, parse

        if self.pattern is not None and self.sparsity is not None:
            raise typer.BadParameter("give --sparsity or --pattern, not both", param_hint="--pattern")
        text = self.pattern if self.pattern is not None else self.sparsity
        for name in ("of", "runtime", "units"):
            value = getattr(self, name)
            if value is not None and not (text or "").startswith("structured"):
                raise typer.BadParameter("it belongs to --pattern structured:SHARE", param_hint=f"--{name}")
            text = text if value is None else f"{text},{name}={value}"
        sizes = {"--bits-per-weight": self.bits_per_weight, "--megabytes": self.megabytes}
        for option, size in sizes.items():
            if size is None:
                continue
            with_zeros = text is not None and option == "--megabytes"
            if with_zeros or self.bits is not None or None not in sizes.values():
                raise typer.BadParameter(
                    "give one of --bits, --bits-per-weight and --megabytes, and --megabytes without --sparsity or "
                    "--pattern",
                    param_hint=option,
                )
            rate = Rate(size) if option == "--bits-per-weight" else Budget(megabytes=size)
            return rate if text is None else parse(f"{text}+{rate}")
        pattern = None if text is None else parse(text)
        if self.bits is None:
            return pattern
        if isinstance(pattern, (Grid, SparseGrid, Rate, Budget)):
            raise typer.BadParameter(f"{pattern} has bits already", param_hint="--bits")
        return Grid(self.bits) if pattern is None else pattern & Grid(self.bits)


@dataclass(frozen=True)
class MethodOptions:
    """Options for the recipe, and changes of it.

    Attributes:
        recipe (NAME|FILE): fast (default), best, one-shot, paper, or a recipe.yaml.
        rounds (N): Rounds of Algorithm 2, with fine-tuning between them.
        solver (NAME): admm, sparsegpt, obc, lobs, nettrim, wanda, magnitude, exact; or chita, cbs, woodfisher,
            global-magnitude; of whole units search, greedy, osscar, flap, random; of grids and rates gptq, obr,
            rounding.
        settings (KEY=VALUE): Any field of the recipe, as damping=0.1 or finetune.steps=200; repeat.
        seed (N): Seed of every random choice (default 0).
        within (TIME): Time that the run may take, as 30min or 2h: fewer gradient steps, or what else fits.
    """

    panel: ClassVar = "Method"
    recipe: options.Recipe = None
    rounds: int | None = None
    solver: Annotated[
        str | None, typer.Option(autocompletion=options.complete(_SOLVERS), callback=options.one_of(_SOLVERS))
    ] = None
    settings: Annotated[list[str] | None, typer.Option("--set")] = None
    seed: int | None = None
    within: Annotated[str | None, typer.Option(callback=options.checked(as_seconds))] = None


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
    from iobs.cli.output_place import OutputPlace

    if output is None and not dry_run:
        raise typer.BadParameter("say where the pruned model goes", param_hint="--output / -o")
    place = OutputPlace.of(model, output, overwrite, resume)
    parsed = pattern.parse()

    from iobs.cli.by_blocks import StreamPlace, prune_low_memory, refuse_streams
    from iobs.cli.in_memory import prune_in_memory, write_and_show
    from iobs.cli.running import saying_how_to_continue
    from iobs.cli.vocabulary import is_vocabulary, prune_vocabulary, refuse_useless
    from iobs.pruning.runtime.ranks import current

    settings = _settings(
        parsed, method, {**vars(layers), **vars(calibration), "dtype": loading.dtype, "low_memory": low_memory}
    )
    _refuse_units(settings, model)
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
                write_and_show(smaller, report, settings, place, talk.as_json)
        elif settings.options.low_memory:
            prune_low_memory(model, settings, loading.device, place, dry_run, talk.as_json, streams or "auto")
        else:
            failure = prune_in_memory(
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


def _settings(pattern: Pattern | None, method: MethodOptions, others: dict[str, object]) -> RunSettings:
    """The recipe and the options of the run: the command line first, then the file given as --recipe, then defaults.

    Args:
        pattern: what becomes smaller; None: as the recipe says.
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
