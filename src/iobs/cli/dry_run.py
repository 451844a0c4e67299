"""`iobs prune --dry-run` of a model in memory: what a run would prune or remove."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from iobs.cli import console

if TYPE_CHECKING:
    from iobs.cli.run_file import RunSettings
    from iobs.core.structured import Structured
    from iobs.models import LoadedModel
    from iobs.pruning.cost.foresight import Foreseen
    from iobs.pruning.cost.memory import Plan
    from iobs.pruning.coverage import Reason
    from iobs.pruning.store import Store
    from iobs.pruning.structured_report import PlannedCost, UnitsPlan
    from iobs.pruning.workspace import Request


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
    from rich.table import Table

    from iobs.cli.by_blocks import show_peak, show_plan, show_time
    from iobs.core.grids import stored_bits
    from iobs.pruning.audit import asked_zeros

    patterns, pattern = request.patterns, request.pattern
    zeros = {layer: asked_zeros(patterns[layer], layer.shape) for layer in patterns}
    bits = {layer: stored_bits(patterns[layer], layer.shape) for layer in patterns}
    about = _about_the_division(request)
    if as_json:
        layers = [
            {"layer": layer.name, "shape": layer.shape, "zeros": count, "bits": bits[layer]}
            for layer, count in zeros.items()
        ]
        dense = {name: str(reason) for name, reason in skipped.items()}
        blocks: dict[str, object] = {} if plan is None else {"plan": asdict(plan)}
        if foreseen is not None:
            blocks |= {"seconds": foreseen.forecast.seconds, "phases": foreseen.forecast.phases}
            blocks |= {"peaks": foreseen.peaks} if foreseen.peaks else {}
            blocks |= {"form": foreseen.form} if foreseen.form else {}
        result = {"pattern": str(pattern), "layers": layers, "dense": dense, "about": about}
        console.print_json({**result, **blocks})
        return
    table = Table(title=f"{pattern}: what would be pruned", title_justify="left", header_style="bold")
    table.add_column("layer", overflow="fold")
    names = ["shape", "zeros", *(["bits a weight"] if any(bits.values()) else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
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
        show_time(foreseen.forecast.seconds, foreseen.forecast.phases, out.print)
    if about:
        console.say(about)


def _about_the_division(request: Request) -> str:
    """Sentence about the zeros that the run itself chooses; empty if it chooses none."""
    from iobs.core.patterns import Rate
    from iobs.pruning.plan.counts import under_pattern

    pattern = request.pattern
    if isinstance(pattern, Rate) and request.recipe.division.criterion != "uniform":
        size = sum(layer.weights for layer, own in request.patterns.items() if own is pattern) * pattern.bits / 8e6
        return f"The run divides the bits among these layers; together they take {size:.4g} MB."
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
    from iobs.cli.loading import batches_of_run
    from iobs.core.structured import Structured
    from iobs.pruning.runtime.ranks import current
    from iobs.pruning.structured.run import plan_structured, require_possible
    from iobs.pruning.structured_report import StructuredRequest

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
    from rich.table import Table

    from iobs.core.formats import duration

    table = Table(title=f"{pattern}: what would be removed", title_justify="left", header_style="bold")
    whole = pattern.whole
    for name in ("in" if whole else "read by", "units"):
        table.add_column(name, overflow="fold")
    for name in ("now", "left"):
        table.add_column(name, justify="right", no_wrap=True)
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
    known = "" if plan.seconds is not None else " Its time is not predicted; the run shows the time left."
    return f"{which}{known}"
