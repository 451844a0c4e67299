"""Forecast of a run before it, for a dry run of a model in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from iobs.core.patterns import Pattern
from iobs.pruning.cost.inputs import with_affordable_epochs, with_affordable_steps
from iobs.pruning.cost.prices import measure
from iobs.pruning.cost.work import forecast
from iobs.pruning.decisions.rounds import one_kind_of_steps
from iobs.pruning.descent.sampled_text import copies_to_sample
from iobs.pruning.forecast import Forecast
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import evaluating, seeded
from iobs.pruning.recipe import Recipe
from iobs.pruning.samples.batches import Batch, positions
from iobs.pruning.samples.subsets import Samples, split
from iobs.pruning.store import Store
from iobs.pruning.workspace import Decisions


def foresee(
    store: Store,
    recipe: Recipe,
    patterns: Mapping[Layer, Pattern],
    pattern: Pattern,
    data: Sequence[Batch],
    *,
    holdout: float,
    seed: int,
) -> Forecast:
    """Forecast the work of a run and its time on this machine; the model is unchanged.

    Decisions of the run that rest on its results, such as further rounds, are as `iobs.prune` expects them.

    Args:
        store: of the model, which is in memory.
        recipe: how to prune.
        patterns: of the layers to prune.
        pattern: of the run.
        data: calibration samples.
        holdout: share of the samples that is held out.
        seed: of the run.
    """
    with torch.no_grad(), store.prepared(), evaluating(store.model), seeded(store.model, seed):
        model, layers = store.model, tuple(patterns)
        recipe = with_affordable_epochs(recipe, layers, data, store.device)
        chain = store.chain(data, layers)
        fit, heldout = split(Samples.of(list(data)), holdout, seed)
        tuned = recipe.finetune is not None and recipe.finetune.lr == "auto"
        decided = one_kind_of_steps(
            Decisions(recipe.rounds, recipe.finetune, tuned, recipe.blocks), bool(chain), positions(data[0]) > 1
        )
        decided = with_affordable_steps(decided, model, layers, fit)
        sampled = decided.blocks.sampled if decided.blocks is not None else 0
        copies = copies_to_sample(model, fit) if sampled == "auto" else sampled
        every = Samples.of(fit.batches * (1 + copies) + heldout.batches)
        workload, prices = measure(store, recipe, patterns, chain, every, heldout.samples / every.samples, fit)
        return forecast(workload, prices, recipe, decided, pattern, copies * fit.samples)
