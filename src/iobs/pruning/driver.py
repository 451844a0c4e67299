"""`iobs.prune`: check what was asked, open a workspace, run Algorithm 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Unpack

import torch
from torch import nn

from iobs.core.files import expanded
from iobs.core.formats import as_seconds
from iobs.core.patterns import Budget, Pattern, Rate, as_pattern
from iobs.core.structured import Structured
from iobs.errors import LayerSelectionError, PatternError, ProblemError, is_a, shown
from iobs.openmp import ensure_sleep
from iobs.pruning.algorithm import run
from iobs.pruning.baselines import require_global, require_memory
from iobs.pruning.callbacks import Callback, Callbacks, LoggingCallback, ProgressBar
from iobs.pruning.cost.affordable import form_of, require_forms, with_affordable_epochs
from iobs.pruning.cost.foresight import Foresight
from iobs.pruning.keep_sparse import live_on
from iobs.pruning.layerwise.patterns import patterns_of, require_coded, require_exact, require_solvable
from iobs.pruning.network.folding import normed_weights
from iobs.pruning.network.layers import found_by_use, overlapping
from iobs.pruning.network.modes import evaluating, seeded
from iobs.pruning.network.selection import Selection, may_be_found, require_merged, require_usable
from iobs.pruning.plan.counts import require_room, under_pattern
from iobs.pruning.plan.rates import rate_of, require_rates
from iobs.pruning.recipe import Changes, Recipe, as_recipe, as_structured_recipe
from iobs.pruning.report import JsonObject, Report
from iobs.pruning.runtime.checkpoint import RUN, Checkpoint
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Batch, Samples, split
from iobs.pruning.store import Store
from iobs.pruning.structured import prune_structured, require_possible
from iobs.pruning.structured_report import StructuredRequest
from iobs.pruning.workspace import Request, Workspace, checkpoint_of


def prune(
    model: nn.Module | Store,
    data: Iterable[Batch],
    pattern: Pattern | float | str,
    recipe: Recipe | str | Path = "fast",
    *,
    include: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    holdout: float = 0.1,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    checkpoint: str | Path | None = None,
    within: float | str | None = None,
    **changes: Unpack[Changes],
) -> Report:
    """Prune a model in place (Algorithm 2).

    Args:
        model: any `nn.Module` on any device, or a `Store` of a model whose weights are not all in memory. If the run
            fails or is interrupted the weights are as before.
        data: calibration data, an iterable of batches (a list, a DataLoader): tensors, tuples (inputs, labels), or
            mappings as Hugging Face models take. A tensor or a mapping is one batch.
        pattern: `Unstructured`, `NM`, a sparsity such as 0.5, or text such as "2:4" or "50%". With an allocation
            (recipes "one-shot", "fast" and "best") the sparsity is that of all pruned layers together. Layers left
            dense do not count. `Grid(4)` or `pattern & Grid(4)` puts the kept weights on a grid, too. `Rate(3.0)` makes
            weights integers with an entropy code; `Budget(megabytes=60)` does so within the bytes of the whole file,
            embeddings and heads included. `Structured(0.3)` or "structured:30%" removes whole channels,
            neurons and heads: the model becomes narrower.
        recipe: "fast": the best single projection. "best": rounds of fine-tuning towards the dense model. "one-shot":
            every layer once, no gradient steps. "paper": Algorithm 2 to the letter. Or a `Recipe`, or the path of a
            YAML file.
        include: names of the layers to prune, shell style ("*.mlp.*") or "re:...". Default: all layers but output
            heads, weights tied to an embedding, and depthwise convolutions.
        ignore: names of layers that stay dense.
        holdout: share of the samples that is held out, in [0, 1). These samples choose the best round, damp the
            correction of drift and judge the allocation.
        seed: of every random choice.
        callbacks: called as the run gets on.
        progress: show a progress bar with the time left; plain lines where there is no terminal.
        checkpoint: directory for intermediate results. A killed run that is started again with the same arguments goes
            on from there and ends in the same bits, on a GPU if its kernels are deterministic. The directory is not
            deleted afterwards.
        within: time that the run may take on this machine, in seconds or as "30min": the recipe then takes fewer
            gradient steps, or leaves out what else it must, and the report's notes say what. None: as the recipe says.
        **changes: fields of the recipe, such as `solver="sparsegpt"`, `rounds=6` or `damping=0.1`.

    Returns:
        The report: what was asked and decided, every round with every layer, the final audit.

    Raises:
        ProblemError: a setting is outside its range, a loss has no gradient, or no form of the recipe ends in time.
        CalibrationError: there is no data, or it does not fit the model.
        LayerSelectionError: a name pattern or a rule matches nothing.
        ModelError: the model is no module that can be pruned (such as of torch.jit, in inference mode, on the meta
            device), gives two outputs for one batch, or cannot be copied.
        PatternError: the pattern does not fit a layer, or the allocation does not fit the pattern.
        NonFiniteError: NaN or infinity in weights, inputs or gradients.
        NotPositiveDefiniteError: a layer's Hessian cannot be factorised.
        AuditError: fewer zeros than asked.
        CheckpointError: the checkpoint belongs to another run (the message names the difference), or cannot be written.
        DistributedError: there are fewer batches than ranks, or a rank is gone.

    Example:
        A network with half of its weights zero, with a report::

            batches = [(pictures, labels) for pictures, labels in loader][:10]
            report = iobs.prune(network, batches, 0.5, progress=True)
            print(report)
            rows = iobs.audit(network)  # the zeros of every layer, counted again

        Other patterns and recipes: ``iobs.prune(network, batches, "2:4", "one-shot")``,
        ``iobs.prune(network, batches, iobs.Structured(0.3, of="latency"), "best", within="30min")``.
    """
    ensure_sleep()
    _require_callbacks(callbacks)
    seconds = None if within is None else as_seconds(within)
    store = model if isinstance(model, Store) else Store(model)
    parsed = as_pattern(pattern)
    first = current().first
    listeners = [LoggingCallback(), *callbacks] if first else []
    if isinstance(parsed, Structured):
        units = as_structured_recipe(recipe).but(**changes)
        if within is not None:
            require_forms(units, parsed)
        request_of_units = StructuredRequest(parsed, units, include, ignore, holdout, seed, checkpoint)
        require_numbers(holdout, seed)
        require_possible(store, request_of_units)
        with torch.inference_mode(False), ProgressBar.shown(progress and first) as bar:
            return prune_structured(store, store.collect_batches(data), request_of_units, Callbacks([*listeners, *bar]))
    chosen = as_recipe(recipe).but(**changes)
    if within is not None:
        require_forms(chosen, parsed)
    require_usable(store.model, in_memory=store.in_memory)
    store.require_possible(chosen)

    def select() -> tuple[Selection, Request]:
        layers = selected_for(store, parsed, include, ignore, chosen.depthwise)
        return requested(store.model, chosen, parsed, layers, holdout, seed, checkpoint)

    normed = normed_weights(store.model)
    with torch.inference_mode(False), store.prepared():
        collected, selection, request = select_on(store, data, select, seed)
        require_exact(request.patterns, normed)
        with ProgressBar.shown(progress and first) as bar:
            every_callback = Callbacks([*listeners, *bar])
            if isinstance(parsed, Budget) and isinstance(request.pattern, Rate):
                weights = sum(layer.weights for layer in request.sharing)
                every_callback.on_note(f"{parsed}: {request.pattern.bits:.3f} bits for each of {weights:,} weights.")
            # The dense copy is made inside: with a key-value cache it would grow each time one of its blocks is run.
            with evaluating(store.model) as frozen, seeded(store.model, seed):
                selection, request = _checked(store, collected, selection, request)
                require_memory(chosen.network_solver, selection.layers, chosen.rounds, collected, holdout, store.device)
                request = replace(request, within=seconds)
                # Weights in files have no mark of their own. Of shared memory only the pruned parameter takes steps.
                frozen = frozen | overlapping(store.model).keys() if store.in_memory else frozenset()
                opened = None
                if seconds is not None:
                    opened, form, note = _in_time(store, request, selection, collected, frozen, seconds)
                    request = replace(request, recipe=form)
                    store.require_possible(form)
                    every_callback.on_note(note)
                store.place(request, collected)  # of the form that runs
                store.require_space(checkpoint)
                affordable = with_affordable_epochs(request.recipe, selection.layers, collected, store.device)
                request = replace(request, recipe=affordable)
                report = run(Workspace(store, request, selection, collected, every_callback, frozen, opened))
    for training in live_on(store.model):
        training.mask()
    return report


def _in_time(
    store: Store,
    request: Request,
    selection: Selection,
    batches: list[Batch],
    frozen: frozenset[str],
    seconds: float,
) -> tuple[Checkpoint, Recipe, str]:
    """The open checkpoint, the form of the recipe that ends in time, and a note on it; a resumed run keeps its form.

    Raises:
        ProblemError: no form ends in time.
        CheckpointError: as `prune`.
    """

    def choose() -> JsonObject:
        number, note = Foresight.of(store, request, batches).within(seconds)
        return {"form": number, "note": note, "seconds": seconds}

    # A new checkpoint is made after the choice: where nothing ends in time, none is left behind.
    place = request.checkpoint
    resumed = place is not None and (expanded(place) / RUN).is_file()
    choice = None if resumed else choose()
    fit, heldout = split(Samples.of(batches), request.holdout, request.seed)
    opened = checkpoint_of(store, request, selection, fit, heldout, frozen)
    chosen = opened.remembered("form of the recipe", lambda: choice or choose())
    note = chosen["note"]
    if chosen["seconds"] != seconds:
        note += " That time was given first: a resumed run keeps its form of the recipe."
    return opened, form_of(request.recipe, request.pattern, chosen["form"]), note


def examined(
    store: Store, data: Iterable[Batch], select: Callable[[], tuple[Selection, Request]], seed: int
) -> tuple[list[Batch], Selection, Request]:
    """The batches, the layers and the request as a run has them after its checks of the data.

    Args:
        store: of the model, which is in memory and is not changed.
        data: calibration data.
        select: chooses among the layers that are known, and says what is asked of them.
        seed: of the run.

    Raises:
        IOBSError: as `prune`.
    """
    with torch.inference_mode(False), store.prepared():
        collected, selection, request = select_on(store, data, select, seed)
        with evaluating(store.model), seeded(store.model, seed):
            return collected, *_checked(store, collected, selection, request)


def select_on(
    store: Store, data: Iterable[Batch], select: Callable[[], tuple[Selection, Request]], seed: int
) -> tuple[list[Batch], Selection, Request]:
    """Collect the data, and choose among the layers that classes or a forward pass show; arguments as `examined`.

    The choice comes before any data are read where it can, so that wrong arguments are reported first.
    """
    selected = before_observation(store, select)
    collected = store.collect_batches(data)
    if store.observe(collected, seed) or selected is None:
        selected = select()
    return collected, *selected


def _checked(store: Store, batches: list[Batch], selection: Selection, request: Request) -> tuple[Selection, Request]:
    """Check the batches on the model; the selection and the request without layers that it changes beforehand."""
    selection = store.check(batches, selection, request.holdout)
    return selection, replace(request, patterns={layer: request.patterns[layer] for layer in selection.layers})


def before_observation(
    store: Store, select: Callable[[], tuple[Selection, Request]]
) -> tuple[Selection, Request] | None:
    """The selection among layers that classes show; None if it may be another with layers that an observation shows.

    Names and rules may be of such layers, and a budget of bytes may be enough once they are coded.

    Raises:
        PatternError, LayerSelectionError, ProblemError: as `prune`.
    """
    found_by_use(store.model, ())  # of an earlier run
    try:
        return select()
    except (LayerSelectionError, PatternError):
        if not (store.whole and may_be_found(store.model)):
            raise
        return None


def selected_for(
    store: Store,
    pattern: Pattern,
    include: str | Sequence[str] | None,
    ignore: str | Sequence[str] | None,
    depthwise: bool,
) -> Selection:
    """The layers to prune: embeddings too if integers are coded, and all matrices if the bytes of a file are given.

    Zeros besides the integers are those of products: embeddings then stay dense.

    Raises:
        ModelError, LayerSelectionError, NonFiniteError: as in `network.selection.select`.
    """
    if isinstance(pattern, Budget) and include is None:
        require_merged(store.model)
        include = "*"
    coded = isinstance(pattern, Budget) or (isinstance(pattern, Rate) and pattern.zeros is None)
    return store.select(include, ignore, depthwise, coded)


def requested(
    model: nn.Module,
    recipe: Recipe,
    pattern: Pattern,
    selection: Selection,
    holdout: float,
    seed: int,
    checkpoint: str | Path | None,
) -> tuple[Selection, Request]:
    """The layers to prune and what is asked of each, checked before any work; a budget becomes a rate.

    Raises:
        PatternError, LayerSelectionError, ProblemError: as `prune`.
    """
    require_numbers(holdout, seed)
    budget = pattern if isinstance(pattern, Budget) else None
    if budget is not None:
        pattern, selection = rate_of(budget, model, selection, recipe.rules)
    selection, patterns = patterns_of(selection, pattern, recipe.rules)
    if recipe.network_solver is not None:
        require_global(pattern)
    require_coded(model, patterns)
    require_solvable(recipe.for_layers(patterns), patterns)
    allocation = under_pattern(recipe.division, pattern)
    require_rates(patterns, None if recipe.division.criterion == "uniform" else pattern)
    request = Request(recipe, patterns, pattern, holdout, seed, checkpoint)
    require_room(allocation, pattern, list(request.sharing))
    return selection, request if budget is None else replace(request, in_file=request.sharing)


def require_numbers(holdout: object, seed: object) -> None:
    """Raise unless the share of held-out samples and the seed are numbers in their ranges.

    Raises:
        ProblemError: one of them is no number, or outside its range.
    """
    if not is_a(Real, holdout):
        raise ProblemError(f"holdout must be a number, got {shown(holdout)}.")
    if not 0 <= holdout < 1:  # type: ignore[operator]
        raise ProblemError(f"holdout must lie in [0, 1), got {holdout}; 0.1 keeps a tenth of the samples aside.")
    require_seed(seed)


def require_seed(seed: object) -> None:
    """Raise unless the seed is a whole number that torch takes.

    Raises:
        ProblemError: it is no whole number, or outside the range of torch.
    """
    if not is_a(Integral, seed):
        raise ProblemError(f"seed must be a whole number, got {shown(seed)}.")
    if not -(2**63) <= seed < 2**64:  # type: ignore[operator]
        raise ProblemError(f"seed must lie between -2^63 and 2^64 - 1, which torch takes; got {seed}.")


def _require_callbacks(callbacks: object) -> None:
    if not isinstance(callbacks, Sequence) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise ProblemError(f"callbacks must be a list of iobs.Callback objects, got {shown(callbacks)}.")
