"""Published one-shot pruners on a shared Fisher information, behind one door, so that anyone can compare."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iobs.core.patterns import Unstructured
from iobs.errors import ProblemError
from iobs.prune import batches as data_batches
from iobs.prune.allocation import total_kept
from iobs.prune.audit import counted
from iobs.prune.batches import Batch
from iobs.prune.faithful import multiplied_as_they_are
from iobs.prune.fisher import METHODS, BlockFisher, gradient_rows
from iobs.prune.layers import Layer, select
from iobs.prune.memory import MemoryWatch
from iobs.prune.network import evaluating, keeping_buffers
from iobs.prune.parts import Part
from iobs.prune.record import Report, RoundRecord

_FIRST_STAGE = 0.1  # sparsity that several stages set out from


def prune_by_fisher(
    model: nn.Module,
    batches: Iterable[Batch] | Tensor | Mapping[str, Any],
    sparsity: float,
    *,
    method: str = "chita",
    stages: int = 1,
    damping: float = 1e-4,
    block: int = 500,
    include: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    depthwise: bool = False,
) -> Report:
    """Prune a network in place under one global count, with a method of the literature.

    Args:
        model: any network; its weights are as before if the run fails.
        batches: (inputs, targets), or mappings with labels: the gradients of their task loss are the curvature.
        sparsity: share of zeros over all pruned layers together.
        method: "magnitude", "woodfisher", "cbs" or "chita".
        stages: how often the gradients are taken anew on the way, while the density falls by equal factors from 0.9
            (CHITA++).
        damping: added to the Fisher's diagonal.
        block: entries of a block of the Fisher, at least: every layer is cut evenly.
        include: name patterns of layers to prune.
        skip: name patterns of layers that stay dense.
        depthwise: prune depthwise convolutions too.

    Returns:
        A report; its rounds are the stages.

    Raises:
        ProblemError: an unknown method or a setting out of range.
        CalibrationError: no data, data that the network cannot take, or, but for "magnitude", data without targets.
        LayerSelectionError: a name pattern matches no layer, or none is left.
        NonFiniteError: NaN or infinity in a weight or a gradient.
        NotPositiveDefiniteError: a block of the Fisher cannot be factorised.
    """
    if method not in METHODS:
        raise ProblemError(f"There is no method {method!r}; choose one of {', '.join(METHODS)}.")
    if stages < 1 or damping <= 0 or block < 1:
        raise ProblemError(f"stages, damping and block must be positive, got {stages}, {damping:g} and {block}.")
    Unstructured(sparsity)
    started = time.perf_counter()
    selection = select(model, include, skip, depthwise=depthwise)
    memory = MemoryWatch(selection.layers[0].tensor(model).device)
    collected = data_batches.collect(batches)
    with evaluating(model), keeping_buffers(model):
        data_batches.require_all_accepted(model, collected)
        selection = multiplied_as_they_are(model, selection, collected[0])
    part = Part.of(collected)
    dense = {layer: layer.read(model) for layer in selection.layers}
    sizes, names = tuple(layer.weights for layer in dense), tuple(layer.name for layer in dense)
    rounds: list[RoundRecord] = []
    try:
        with evaluating(model):
            for index, level in enumerate(_levels(sparsity, stages)):
                began = time.perf_counter()
                weights = torch.cat([layer.read(model).flatten() for layer in selection.layers])
                weights = weights if method == "magnitude" else weights.float()  # as the gradients
                if method == "magnitude":
                    rows = weights.new_zeros(1, len(weights))
                else:
                    rows = gradient_rows(model, selection.layers, part)
                memory.look()
                fisher = BlockFisher(rows, damping, block, sizes, names)
                _write(model, selection.layers, METHODS[method](weights, fisher, total_kept(selection.layers, level)))
                rounds.append(RoundRecord(index, level, None, None, [], seconds=time.perf_counter() - began))
    except BaseException:  # an interrupted user must get the weights back too
        for layer, matrix in dense.items():
            layer.write(model, matrix)
        raise
    return Report(
        settings={"method": method, "stages": stages, "damping": damping, "block": block, "sparsity": sparsity},
        loss_name="none",
        dense_loss=None,
        rounds=rounds,
        best_round=len(rounds) - 1,
        skipped=selection.skipped,
        # The count is global: of no layer's own is anything asked.
        audit=[counted(layer.name, layer.read(model)) for layer in selection.layers],
        seconds=time.perf_counter() - started,
        peak_memory_bytes=memory.look(),
    )


def _levels(sparsity: float, stages: int) -> list[float]:
    """Sparsities whose densities fall by the same factor from stage to stage."""
    if stages == 1:
        return [sparsity]
    first = min(_FIRST_STAGE, sparsity)
    ratio = (1 - sparsity) / (1 - first)
    return [1 - (1 - first) * ratio ** (stage / (stages - 1)) for stage in range(stages - 1)] + [sparsity]


@torch.no_grad()
def _write(model: nn.Module, layers: tuple[Layer, ...], weights: Tensor) -> None:
    for layer, values in zip(layers, torch.split(weights, [layer.weights for layer in layers]), strict=True):
        layer.write(model, values.reshape(layer.shape))
