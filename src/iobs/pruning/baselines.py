"""Block-diagonal empirical Fisher matrix of a model's weights, and the solvers WoodFisher, CBS and CHITA on it.

All solvers minimise the same quadratic over one flat vector v, under a global count of nonzero entries. Here w are the
current weights and g_i the gradients of n samples:

    q(v) = 1/2 (v - w) F (v - w)^T,    F = damping I + 1/n sum_i g_i^T g_i,   block-diagonal

- WoodFisher (Singh and Alistarh, 2020) ranks weights one by one and adds up their updates.
- CBS (Yu et al., 2022) searches the mask by swaps, with interactions between weights, and updates jointly.
- CHITA (Benbaki et al., 2023) treats the quadratic as sparse least squares in the gradients. It takes projected
  gradient steps, then solves exactly on the support. A search for the mask takes one more step from that solution, with
  a line search through the projection, and solves again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from iobs.core import linalg
from iobs.core.grids import grid_of
from iobs.core.masks import top_mask
from iobs.core.memory import available
from iobs.core.patterns import Pattern, Unstructured
from iobs.errors import NonFiniteError, NotPositiveDefiniteError, PatternError, ProblemError
from iobs.pruning.audit import check_together, counted
from iobs.pruning.calibration.losses import task_loss
from iobs.pruning.layerwise.patterns import sparsity_of
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.counts import global_sparsity, total_kept
from iobs.pruning.recipe import CBS, CHITA, GlobalMagnitude, NetworkSolver, Rounds, WoodFisher
from iobs.pruning.report import AuditRow, RoundRecord
from iobs.pruning.runtime.memory import free_on
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch, Samples
from iobs.pruning.workspace import Workspace

_PROJECTIONS = 20  # projected gradient steps of CHITA; each step is a pass over the gradients
_SEARCH_STEPS = 12  # step lengths in a line search of CHITA; each is a pass over the gradients
_SEARCH_GROWTH = 1.5  # from one of these lengths to the next
_SWAP_PASSES = 60  # batches of swaps in CBS


@dataclass(frozen=True)
class BlockFisher:
    """The matrix F, which is never stored as a whole.

    Args:
        rows: (n, p) float32, one row per sample with its gradient.
        damping: added to the diagonal.
        block: least number of entries in a block. A layer is cut evenly into as many blocks as possible; a smaller
            layer is one block. No block crosses two layers.
        sizes: number of entries of every layer; they sum to p.
        names: of the layers, for messages.
    """

    rows: Tensor
    damping: float
    block: int
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()

    def slices(self) -> Iterator[slice]:
        """The blocks, in order.

        Layers are cut evenly, as by the authors of CHITA. With blocks of exactly 500 entries and a shorter last block,
        ResNet-20 loses 4 to 11 points of accuracy at 80 % zeros (LOG.md).
        """
        start = 0
        for size in self.sizes:
            count = max(1, size // self.block)
            starts = [start + number * (size // count) for number in range(count)]
            start += size
            yield from map(slice, starts, [*starts[1:], start])

    def matrix(self, part: slice) -> Tensor:
        """A block of F, (block, block) float64."""
        rows = self.rows[:, part].double()  # rounding errors of float32 may exceed the damping
        matrix = rows.T @ rows / len(rows)
        matrix.diagonal().add_(self.damping)
        return matrix

    def inverse(self, part: slice) -> Tensor:
        """The inverse of a block of F, (block, block) float64.

        Raises:
            NotPositiveDefiniteError: a pivot is not positive; names the layer.
        """
        with self._naming(part):
            return linalg.inverse(self.matrix(part))

    @contextmanager
    def _naming(self, part: slice) -> Iterator[None]:
        """Add the name of the layer to errors of a factorisation."""
        try:
            yield
        except NotPositiveDefiniteError as error:
            number = bisect_right([*accumulate(self.sizes)], part.start)
            name = self.names[number] if self.names else str(number)
            raise NotPositiveDefiniteError(
                f"The Fisher of layer {name!r} has no Cholesky factor with damping {self.damping:g}: raise it, or "
                "scale the loss down."
            ) from error

    def matmul(self, vector: Tensor) -> Tensor:
        """The product of F and a vector (p,), block by block."""
        product = self.damping * vector
        for part in self.slices():
            rows = self.rows[:, part]
            product[part] += rows.T @ (rows @ vector[part]) / len(rows)
        return product

    def loss(self, vector: Tensor) -> float:
        """The quadratic form of F at a vector (p,), twice the loss q of a change of the weights."""
        return float((vector * self.matmul(vector)).sum())

    def diagonal(self) -> Tensor:
        """The diagonal of F, (p,)."""
        return self.rows.square().mean(0) + self.damping

    def refit(self, weights: Tensor, mask: Tensor) -> Tensor:
        """The exact minimiser of q on a support, (p,), block by block.

        Raises:
            NotPositiveDefiniteError: a block is singular; names the layer.
        """
        result = torch.zeros_like(weights)
        for part in self.slices():
            matrix, target = self.matrix(part), weights[part].double()[None]
            with self._naming(part):
                result[part] = linalg.solve_on_support(matrix, target @ matrix, mask[part][None])[0].to(result.dtype)
        return result


def gradient_rows(model: nn.Module, layers: tuple[Layer, ...], part: Samples) -> Tensor:
    """The gradient of the task loss with respect to the layers' weights, for every sample.

    Returns:
        (samples, p) float32: layers one after another, each of them row by row.

    Raises:
        CalibrationError: the batches hold no targets.
        NonFiniteError: NaN or infinity in a gradient; names the sample and the layer.
    """
    device = next(model.parameters()).device
    parameters = [layer.stored(model) for layer in layers]
    rows = torch.empty(part.samples, sum(layer.weights for layer in layers), device=device)
    row = 0
    for batch, number in zip(part.batches, part.numbers, strict=True):
        for index in range(batches.size(batch)):
            single = batches.to_device(batches.take(batch, torch.tensor([index])), device)
            with torch.enable_grad():
                computed = torch.autograd.grad(task_loss(model, single), parameters, allow_unused=True)
            gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(parameters, computed, strict=True)
            ]
            pieces = [layer.matrix(gradient).flatten() for layer, gradient in zip(layers, gradients, strict=True)]
            rows[row] = torch.cat(pieces)
            if not bool(torch.isfinite(rows[row]).all()):  # checked in float32, which may overflow
                name = next(layer.name for layer, piece in zip(layers, pieces, strict=True) if not _is_finite(piece))
                raise NonFiniteError(
                    f"The gradient of the task loss at sample {index} of calibration batch {number} holds NaN or "
                    f"infinity in layer {name!r}; leave that sample out, or look for a division or a root of zero in "
                    "the model."
                )
            row += 1
    return rows


def _is_finite(piece: Tensor) -> bool:
    return bool(torch.isfinite(piece.float()).all())


def keep_largest(scores: Tensor, keep: int) -> Tensor:
    """Mask (p,) bool of the `keep` highest scores."""
    return top_mask(scores[None], Unstructured(keep=keep))[0]


def magnitude(weights: Tensor, fisher: BlockFisher, keep: int) -> Tensor:
    """Keep the largest weights of the model unchanged."""
    return weights * keep_largest(weights.abs(), keep)


def woodfisher(weights: Tensor, fisher: BlockFisher, keep: int) -> Tensor:
    """Rank weights by w_i^2 / (2 [F^-1]_ii); every removed weight adds its update -w_i [F^-1]_i / [F^-1]_ii."""
    mask = keep_largest(_saliency(weights, fisher), keep)
    result = weights.clone()
    for part in fisher.slices():
        inverse = fisher.inverse(part)
        removed = torch.where(mask[part], 0.0, weights[part]).double()
        result[part] -= ((removed / inverse.diagonal()) @ inverse).to(result.dtype)
    return result * mask


def cbs(weights: Tensor, fisher: BlockFisher, keep: int) -> Tensor:
    """Swap kept and removed weights while the joint cost of the removal falls, then update jointly.

    Swaps are made in batches, the best ones first; a batch that does not lower the cost is halved.
    """
    mask = keep_largest(_saliency(weights, fisher), keep)
    diagonal = fisher.diagonal()
    removed = torch.where(mask, 0.0, weights)
    product = fisher.matmul(removed)
    cost = float((removed * product).sum())
    count = max(1, len(weights) // 100)
    for _ in range(_SWAP_PASSES):
        to_remove = torch.where(mask, weights * product + 0.5 * weights.square() * diagonal, torch.inf)
        to_keep = torch.where(mask, torch.inf, -weights * product + 0.5 * weights.square() * diagonal)
        count = min(count, keep, len(weights) - keep)
        leaving, entering = (scores.topk(count, largest=False).indices for scores in (to_remove, to_keep))
        trial = mask.clone()
        trial[leaving], trial[entering] = False, True
        trial_removed = torch.where(trial, 0.0, weights)
        trial_product = fisher.matmul(trial_removed)
        trial_cost = float((trial_removed * trial_product).sum())
        if trial_cost < cost:
            mask, product, cost = trial, trial_product, trial_cost
        elif count == 1:
            break
        else:
            count = (count + 1) // 2
    return fisher.refit(weights, mask)


def chita(weights: Tensor, fisher: BlockFisher, keep: int, searches: int = 0) -> Tensor:
    """Take projected gradient steps with the exact step length on the support, then solve exactly on the support.

    These steps move the weights little, since the largest eigenvalue of F sets their length; on large networks the
    mask stays that of magnitude. `searches` searches for a better mask follow, until one does not lower the loss.
    """
    best = current = magnitude(weights, fisher, keep)
    gradient = fisher.matmul(current - weights)
    least = float(((current - weights) * gradient).sum())
    for _ in range(_PROJECTIONS):
        direction = torch.where(current != 0, gradient, 0.0)
        curvature = float((direction * fisher.matmul(direction)).sum())
        if curvature <= 0:
            break
        step = float(direction.square().sum()) / curvature
        moved = current - step * gradient
        current = moved * keep_largest(moved.abs(), keep)
        gradient = fisher.matmul(current - weights)
        value = float(((current - weights) * gradient).sum())
        if value >= least:
            break
        best, least = current, value
    refitted = fisher.refit(weights, best != 0)
    for _ in range(searches):
        trial = fisher.refit(weights, _searched(weights, fisher, keep, refitted) != 0)
        if fisher.loss(trial - weights) >= fisher.loss(refitted - weights):
            break
        refitted = trial
    return refitted


def _searched(weights: Tensor, fisher: BlockFisher, keep: int, start: Tensor) -> Tensor:
    """Weights (p,) after the best projected step from the exact solution on a mask.

    Shorter steps than the first one tried leave the mask unchanged, and so the weights too.
    """
    gradient, kept = fisher.matmul(start - weights), start != 0
    best, least = start, fisher.loss(start - weights)
    steepest = float(torch.where(kept, 0.0, gradient.abs()).max())
    if steepest == 0 or not bool(kept.any()):
        return start
    first = float(start[kept].abs().min()) / steepest
    for number in range(_SEARCH_STEPS):
        moved = start - first * _SEARCH_GROWTH ** (number + 1) * gradient
        moved = moved * keep_largest(moved.abs(), keep)
        value = fisher.loss(moved - weights)
        if value < least:
            best, least = moved, value
    return best


def _saliency(weights: Tensor, fisher: BlockFisher) -> Tensor:
    """The scores w_i^2 / (2 [F^-1]_ii), (p,)."""
    scores = torch.empty_like(weights)
    for part in fisher.slices():
        inverse = fisher.inverse(part)
        scores[part] = (weights[part].double().square() / (2 * inverse.diagonal())).to(scores.dtype)
    return scores


Method = Callable[[Tensor, BlockFisher, int], Tensor]
METHODS: dict[type[NetworkSolver], Method] = {
    GlobalMagnitude: magnitude,
    WoodFisher: woodfisher,
    CBS: cbs,
    CHITA: chita,
}


def method_of(solver: NetworkSolver) -> Method:
    """The function of a solver of the whole network."""
    return partial(chita, searches=solver.searches) if isinstance(solver, CHITA) else METHODS[type(solver)]


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
    pruned = method_of(solver)(weights, fisher, keep)
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
