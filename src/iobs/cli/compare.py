"""`iobs compare`: several methods on one model."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobs.cli import console, options
from iobs.core.files import replaced
from iobs.core.outputs import make_folder
from iobs.errors import UnusableOutputError

if TYPE_CHECKING:
    from torch import nn

    from iobs.core.patterns import Pattern
    from iobs.models import LoadedModel
    from iobs.pruning.recipe import Recipe
    from iobs.report.comparisons import MethodTrial

RESULTS = "comparison.json"
PRESETS = ("best", "fast", "one-shot", "paper")
SOLVERS = ("admm", "sparsegpt", "obc", "wanda", "magnitude")
# Methods of the literature, under one global count.
PEERS = ("global-magnitude", "woodfisher", "cbs", "chita", "chita++")
METHODS = (*PRESETS, *SOLVERS, *PEERS)


@dataclass(frozen=True)
class SamplingOptions(options.DataOptions):
    """Options for calibration and evaluation data.

    Attributes:
        eval_data: Evaluation data, as --data; needed with --data.
        samples: Number of calibration samples.
        batch_size: Samples per forward pass.
        seed: Seed of every random choice.
    """

    eval_data: options.EvaluationData = None
    samples: options.Positive = 128
    seq_len: options.SequenceLength = 2048
    batch_size: options.Positive = 8
    seed: int = 0


@options.command
def compare(
    model: options.Model = None,
    *,
    methods: Annotated[str, options.completed(METHODS)] = "fast,sparsegpt,magnitude",
    patterns: Annotated[str, options.completed([*options.SHARES, *options.PATTERNS])] = "50%,60%,70%",
    output: options.Output = None,
    sampling: SamplingOptions,
    ignore: list[str] | None = None,
    loading: options.Loading,
    overwrite: options.Overwrite = False,
    talk: options.Talk,
) -> None:
    """Prune MODEL with several methods at several sparsities, and show score and seconds side by side.

    Args:
        methods: With commas between: best, fast, one-shot, paper, admm, sparsegpt, obc, wanda, magnitude,
            global-magnitude, woodfisher, cbs, chita, chita++.
        patterns: Sparsities or N:M, with commas between, as 50%,2:4.
        output: Folder for comparison.json and comparison.svg.
        ignore: Leave these layers dense.

    Examples:
        iobs compare MODEL --methods fast,sparsegpt --patterns 50%,2:4 -o RESULTS
        iobs compare net.py:model --data net.py:train --eval-data net.py:test --json  # the table for a program
    """
    if sampling.data and not sampling.eval_data:
        raise typer.BadParameter(
            "give evaluation data: on the calibration data, methods that overfit would win",
            param_hint="--eval-data",
        )
    chosen = options.unique_names(methods)
    unknown = [name for name in chosen if name not in METHODS]
    if unknown or not chosen:
        raise typer.BadParameter(
            f"{', '.join(unknown) or 'no method'}: choose among {', '.join(METHODS)}", param_hint="--methods"
        )
    if output is not None and (output / RESULTS).exists() and not overwrite:
        raise UnusableOutputError(
            f"{output / RESULTS} exists; add --overwrite to replace it, or choose another output directory."
        )

    from iobs.core.patterns import parse

    parsed = {text.strip(): parse(text.strip()) for text in patterns.split(",")}

    from iobs.cli.loading import draw_batches, load_model
    from iobs.cli.running import open_evaluation, score
    from iobs.data import open_source
    from iobs.errors import IOBSError, first_line, is_out_of_memory
    from iobs.pruning.driver import require_seed
    from iobs.pruning.layerwise.patterns import require_fit
    from iobs.pruning.network.selection import select
    from iobs.report.comparisons import MethodTrial

    require_seed(sampling.seed)
    pairs = [(text, name) for text in parsed for name in chosen if name not in PEERS or ":" not in text]
    if len(pairs) < len(parsed) * len(chosen):
        console.say(f"{', '.join(PEERS)} prune to one global count, which N:M is not: left out there.")
    if not pairs:
        raise typer.BadParameter("none of these methods takes N:M; give sparsities", param_hint="--patterns")
    if output is not None:
        make_folder(output)
    loaded = load_model(model, loading)
    selection = select(loaded.module, None, ignore)
    for pattern in parsed.values():
        require_fit(selection.layers, pattern)
    scoring = open_evaluation(loaded, sampling.eval_data or [])
    source = open_source(sampling.data or [], "calibration", loaded)
    batches = draw_batches(
        source, loaded, samples=sampling.samples, length=sampling.seq_len, seed=sampling.seed, batch=sampling.batch_size
    )
    _require_targets(loaded, batches, chosen)
    dense = score(loaded, scoring, sampling.seq_len, "scoring the dense model")
    metric = next(iter(dense))
    original = _copied(loaded.module)
    trials: list[MethodTrial] = []
    for text, name in pairs:
        loaded.module.load_state_dict(original)
        try:
            seconds, sparsity = _prune(loaded, batches, name, parsed[text], ignore, sampling.seed)
            scores = score(loaded, scoring, sampling.seq_len, f"scoring {name} at {text}")
        except (IOBSError, MemoryError, RuntimeError) as error:  # the others go on; what took hours is not lost
            expected = isinstance(error, IOBSError)
            if not expected and not is_out_of_memory(error):
                raise
            reason = str(error) if expected else f"The memory is not enough ({first_line(error)})"
            console.warn(f"{name} at {text} failed: {reason}")
            continue
        except KeyboardInterrupt:
            if trials and output is not None:
                console.warn(f"{len(trials)} of {len(pairs)} results are in {output / RESULTS}.")
            raise
        trials.append(MethodTrial(name, text, sparsity, metric, scores[metric], seconds))
        _keep(trials, dense[metric], output)
    loaded.module.load_state_dict(original)
    if not trials:
        raise typer.Exit(1)
    _show(trials, dense[metric], output, talk.as_json)
    if len(trials) < len(pairs):  # a script must not take a table with gaps for a whole one
        raise typer.Exit(1)


def _copied(module: nn.Module) -> dict[str, object]:
    """The state of a module in main memory, so that a GPU holds no copy beside those of a run."""
    from torch import Tensor

    state = module.state_dict().items()
    return {name: value.to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value) for name, value in state}


def _require_targets(loaded: LoadedModel, batches: list[Any], chosen: list[str]) -> None:
    """Before any work: methods that follow the task loss need data that has one."""
    from iobs.pruning.calibration.losses import mean_loss, task_loss
    from iobs.pruning.network.modes import evaluating
    from iobs.pruning.samples.batches import Samples

    labelled = {*PEERS, "paper"} - {"global-magnitude"}
    if labelled.intersection(chosen):
        with evaluating(loaded.module):
            mean_loss(loaded.module, Samples.of(batches).first(1), task_loss)


def _prune(
    loaded: LoadedModel, batches: list[Any], name: str, pattern: Pattern, ignore: list[str] | None, seed: int
) -> tuple[float, float]:
    """Prune the module.

    Returns:
        Seconds and the real sparsity.
    """
    from iobs.cli.console import ConsoleSteps
    from iobs.cli.running import Watch
    from iobs.pruning import prune

    started = time.perf_counter()
    holdout = 0.0 if name in PEERS else 0.1  # the methods of the literature use every sample
    with ConsoleSteps(name) as steps:
        watch = Watch(steps, prefix=f"{name}, ", quiet=True)
        report = prune(
            loaded.module,
            batches,
            pattern,
            recipe_of(name),
            ignore=ignore,
            seed=seed,
            holdout=holdout,
            callbacks=[watch],
        )
    return time.perf_counter() - started, report.sparsity


def recipe_of(name: str) -> Recipe:
    """The recipe of a method."""
    from iobs.pruning.recipe import CHITA, Recipe

    if name in PRESETS:
        return Recipe.preset(name)
    return Recipe(solver=CHITA(stages=15) if name == "chita++" else name)


def _keep(trials: list[MethodTrial], dense: float, output: Path | None) -> None:
    """Write the results so far; where that fails, the work goes on, and the table is still shown."""
    from iobs.core.formats import to_json

    if output is None:
        return
    try:
        with replaced(output / RESULTS) as file:
            file.write_text(to_json(_values(trials, dense)) + "\n", encoding="utf8")
    except OSError as error:
        console.warn(f"Warning: {output / RESULTS} cannot be written: {error.strerror}.")


def _values(trials: list[MethodTrial], dense: float) -> dict[str, Any]:
    return {"dense": dense, "trials": [asdict(trial) for trial in trials]}


def _show(trials: list[MethodTrial], dense: float, output: Path | None, as_json: bool) -> None:
    from iobs.report.comparisons import trials_figure, trials_table

    if as_json:
        console.print_json(_values(trials, dense))
    else:
        console.output_console().print(trials_table(trials, dense))
    if output is not None:
        (output / "comparison.svg").write_text(trials_figure(trials, dense), encoding="utf8")
