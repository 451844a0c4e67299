"""One projection of all layers together: published one-shot pruners on a shared Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from iobs.core.grids import grid_of
from iobs.core.memory import available
from iobs.core.patterns import Pattern, Unstructured
from iobs.errors import NonFiniteError, PatternError, ProblemError
from iobs.pruning.audit import check_together, counted
from iobs.pruning.baselines.block_fisher import BlockFisher, cbs, chita, gradient_rows, magnitude, woodfisher
from iobs.pruning.layerwise.patterns import sparsity_of
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.counts import global_sparsity, total_kept
from iobs.pruning.recipe import CBS, CHITA, GlobalMagnitude, NetworkSolver, Rounds, WoodFisher
from iobs.pruning.report import AuditRow, RoundRecord
from iobs.pruning.runtime.memory import free_on
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.workspace import Workspace

Method = Callable[[Tensor, BlockFisher, int], Tensor]
METHODS: dict[type[NetworkSolver], Method] = {
    GlobalMagnitude: magnitude,
    WoodFisher: woodfisher,
    CBS: cbs,
    CHITA: chita,
}
_FIRST_STAGE = 0.1  # sparsity of the first of several stages


def require_global(pattern: Pattern) -> None:
    """Raise for patterns that a solver of the whole network cannot produce.

    Raises:
        PatternError: the pattern is not one sparsity for all layers together.
    """
    if global_sparsity(pattern) is None or grid_of(pattern) is not None:
        raise PatternError(
            f"A solver of the whole network prunes to one count over all layers, which "
            f"{pattern} is not; give a sparsity."
        )


def require_memory(
    solver: NetworkSolver | None,
    layers: Sequence[Layer],
    rounds: Rounds,
    data: Sequence[Batch],
    holdout: float,
    device: torch.device,
) -> None:
    """Raise unless the gradients of a solver of the whole network fit into the free memory of a device.

    Args:
        solver: of the run; None, or one without gradients: nothing is checked.
        layers: the layers to prune.
        rounds: of the run.
        data: all samples of the run.
        holdout: share of the samples that is held out, in [0, 1).
        device: of the model.

    Raises:
        ProblemError: they do not fit; names the bytes.
    """
    if solver is None or isinstance(solver, GlobalMagnitude):
        return
    total, weights = sum(map(batches.size, data)), sum(layer.weights for layer in layers)
    samples = total - min(round(total * holdout), total - 1)
    if rounds.data == "fresh" and rounds.schedule != "auto":
        samples = -(-samples // rounds.count)  # each round has samples of its own
    needed, free = 4 * samples * weights, _free(device)
    if free and needed > free:
        raise ProblemError(
            f"{type(solver).__name__} keeps one gradient for each sample: {samples} samples x {weights:,} weights x "
            f"4 bytes are {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free. Give fewer samples, name fewer "
            "layers (include=), or take a solver of single layers, such as SparseGPT."
        )


def _free(device: torch.device) -> int:
    """Memory of a device that new tensors can take, in bytes; 0 where the system does not say."""
    if device.type == "cuda":
        return free_on(device)
    return available() // current().size


@torch.no_grad()
def project_network(
    workspace: Workspace, patterns: dict[Layer, Pattern], solver: NetworkSolver, index: int
) -> RoundRecord:
    """Prune all layers together under one global count, in the solver's stages.

    Raises:
        CalibrationError: the batches hold no labels (all solvers but `GlobalMagnitude`).
        NonFiniteError: NaN or infinity in a gradient.
        NotPositiveDefiniteError: a block of the Fisher matrix cannot be factorised.
    """
    layers, sparsity = tuple(patterns), global_sparsity(workspace.request.pattern)
    assert sparsity is not None
    if any(pattern is not workspace.request.pattern for pattern in patterns.values()):
        sparsity = sparsity_of(patterns)  # a round of the cubic schedule
    samples = workspace.portion(index)
    key = f"round {index} network"
    if key in workspace.checkpoint:
        tensors, _ = workspace.checkpoint.get(key)
        for layer in layers:
            workspace.store.put(layer, tensors[layer.name])
    else:
        for number, level in enumerate(stages(sparsity, solver.stages), 1):
            _prune_once(workspace, layers, solver, total_kept(layers, level), samples)
            workspace.callbacks.on_measure("stages of the whole network", number, solver.stages)
        workspace.checkpoint.put(key, {layer.name: layer.tensor(workspace.store.model) for layer in layers}, {})
    return RoundRecord(index, sparsity_of(patterns))  # of no layers: they share one quadratic, and have no errors


def _prune_once(
    workspace: Workspace, layers: tuple[Layer, ...], solver: NetworkSolver, keep: int, samples: Samples
) -> None:
    """Solve the quadratic of the current weights for `keep` entries, and write the result into the model."""
    model = workspace.store.model
    weights = torch.cat([layer.read(model).flatten() for layer in layers])
    if isinstance(solver, GlobalMagnitude):
        rows = weights.new_zeros(1, len(weights))
    else:
        weights, rows = weights.float(), gradient_rows(model, layers, samples)
    workspace.memory.look()
    sizes = [layer.weights for layer in layers]
    fisher = BlockFisher(rows, solver.damping, solver.block, tuple(sizes), tuple(layer.name for layer in layers))
    method = METHODS[type(solver)]
    if isinstance(solver, CHITA):
        method = partial(chita, searches=solver.searches)
    pruned = method(weights, fisher, keep)
    for layer, values in zip(layers, torch.split(pruned, sizes), strict=True):
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteError(f"The pruned weight of layer {layer.name!r} holds NaN or infinity; raise the damping.")
        workspace.store.write(layer, values.reshape(layer.shape))


def audit_network(workspace: Workspace, layers: Sequence[Layer]) -> list[AuditRow]:
    """Count the zeros of all layers, which must be as many in all as the pattern asks for.

    Raises:
        AuditError: there are fewer.
    """
    rows = [counted(layer.name, layer.read(workspace.store.model)) for layer in layers]
    assert isinstance(workspace.request.pattern, Unstructured)
    check_together(rows, workspace.request.pattern)
    return rows


def stages(sparsity: float, count: int) -> Sequence[float]:
    """Sparsities of `count` stages, whose densities fall by equal factors from 0.9 to 1 - sparsity."""
    if count == 1:
        return [sparsity]
    first = min(_FIRST_STAGE, sparsity)
    ratio = (1 - sparsity) / (1 - first)
    return [1 - (1 - first) * ratio ** (stage / (count - 1)) for stage in range(count - 1)] + [sparsity]
