"""Search for the counts of layers: move weights between two layers while the divergence of the whole network falls.

Damages of layers add up only roughly. A search needs no such assumption, and wins on networks that are shallow enough
to be run many times (EvoPress has the moves, for the levels of layers of equal size).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from iobs.pruning.calibration.losses import answered, kl_to_answers, mean_loss
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.curves import weights_written
from iobs.pruning.samples import batches
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.workspace import Workspace

_ENTRIES = 2**24  # most entries of all stored Grams; a search solves layers from stored Grams
ENOUGH_OUTPUTS = 150  # least number of outputs that can judge a search; with fewer, the best of 100 trials is noise
_LEAST_SHARE, _MOST_SHARE = 0.02, 0.2  # of the smaller of two counts that a move takes

Counts = dict[Layer, int]


def can_keep_grams(layers: tuple[Layer, ...]) -> bool:
    """True if the Grams of all layers are small enough to be kept for a search."""
    return sum(layer.groups * layer.shape[1] ** 2 for layer in layers) <= _ENTRIES


def output_count(judges: Samples) -> int:
    """Number of outputs of the model (samples times positions) on some samples."""
    return sum(batches.size(batch) * batches.positions(batch) for batch in judges.batches)


def search(
    workspace: Workspace,
    counts: Counts,
    *,
    ranges: Mapping[Layer, tuple[int, int]],
    weight_at: Callable[[Layer, int], Tensor],
    judges: Samples,
    generations: int,
) -> Counts:
    """Counts of the least divergence that some random moves find.

    Args:
        workspace: state of the run; the model is dense.
        counts: entries that each layer keeps.
        ranges: least and greatest count of each layer.
        weight_at: (layer, count) -> the weight of the layer with that many entries.
        judges: samples on which divergences are measured.
        generations: number of moves.
    """
    layers, model = tuple(ranges), workspace.store.model
    if len(layers) < 2:
        return counts
    generator = torch.Generator().manual_seed(workspace.request.seed)
    answers = answered(model, judges)

    def divergence(weights: Mapping[Layer, Tensor]) -> float:
        with weights_written(model, weights):
            return mean_loss(model, answers, kl_to_answers)

    weights = {layer: weight_at(layer, keep) for layer, keep in counts.items()}
    best = divergence(weights)
    for generation in range(1, generations + 1):
        workspace.callbacks.on_measure("moves of weights between layers", generation, generations)
        giver, taker = (layers[i] for i in torch.randperm(len(layers), generator=generator)[:2].tolist())
        share = _LEAST_SHARE + (_MOST_SHARE - _LEAST_SHARE) * float(torch.rand((), generator=generator))
        moved = round(share * min(counts[giver], counts[taker]))
        moved = min(moved, counts[giver] - ranges[giver][0], ranges[taker][1] - counts[taker])
        if moved <= 0:
            continue
        trial = {giver: counts[giver] - moved, taker: counts[taker] + moved}
        changed = {layer: weight_at(layer, keep) for layer, keep in trial.items()}
        loss = divergence({**weights, **changed})
        if loss < best:
            best, counts, weights = loss, {**counts, **trial}, {**weights, **changed}
    return counts
