"""The empirical Fisher information of a network's weights, in blocks, and the solvers of WoodFisher, CBS and CHITA.

All of them minimise the same second-order model over one flat vector of weights w, with gradients g_i of n samples:

    q(v) = 1/2 (v - w) F (v - w)^T,    F = damping I + 1/n sum_i g_i^T g_i,   block-diagonal

under a global count. WoodFisher (Singh & Alistarh 2020) ranks weights one by one and adds up their updates; CBS (Yu et
al. 2022) searches the mask by swaps, interactions included, and updates jointly; CHITA (Benbaki et al. 2023) sees a
sparse least-squares problem in the gradients and takes projected gradient steps and an exact solve on the support.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from iobs.core import linalg
from iobs.core.patterns import Unstructured, top_mask
from iobs.errors import NonFiniteError, NotPositiveDefiniteError
from iobs.prune import batches
from iobs.prune.layers import Layer
from iobs.prune.losses import task_loss
from iobs.prune.parts import Part

_PROJECTIONS = 20  # gradient steps of CHITA; each is a pass over the gradients
_SWAP_PASSES = 60  # batches of swaps of CBS


@dataclass(frozen=True)
class BlockFisher:
    """F above, never stored whole.

    Args:
        rows: (n, p) float32, one sample's gradient a row.
        damping: added to the diagonal.
        block: entries of a block, at least: a layer is cut evenly into as many as fit, or is one block itself. No
            block crosses from one layer to the next.
        sizes: entries of every layer, which sum to p.
        names: of the layers, for messages.
    """

    rows: Tensor
    damping: float
    block: int
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()

    def slices(self) -> Iterator[slice]:
        """Every block.

        CHITA's authors cut like this too; with blocks of exactly 500 and what is left at the end of each
        layer ResNet-20 loses four to eleven points at 80 % zeros (LOG.md).
        """
        start = 0
        for size in self.sizes:
            count = max(1, size // self.block)
            starts = [start + number * (size // count) for number in range(count)]
            start += size
            yield from map(slice, starts, [*starts[1:], start])

    def matrix(self, part: slice) -> Tensor:
        """One block, (block, block) float64."""
        rows = self.rows[:, part].double()  # rounded to float32 it may lose more than the damping
        matrix = rows.T @ rows / len(rows)
        matrix.diagonal().add_(self.damping)
        return matrix

    def inverse(self, part: slice) -> Tensor:
        """Inverse of one block, (block, block) float64.

        Raises:
            NotPositiveDefiniteError: a pivot is not positive; names the layer.
        """
        with self._naming(part):
            return linalg.inverse(self.matrix(part))

    @contextmanager
    def _naming(self, part: slice) -> Iterator[None]:
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
        """F times a vector (p,), block by block."""
        product = self.damping * vector
        for part in self.slices():
            rows = self.rows[:, part]
            product[part] += rows.T @ (rows @ vector[part]) / len(rows)
        return product

    def diagonal(self) -> Tensor:
        """(p,)."""
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


def gradient_rows(model: nn.Module, layers: tuple[Layer, ...], part: Part) -> Tensor:
    """Every sample's gradient of the task loss with respect to the layers' weights.

    Returns:
        (samples, p) float32, layers one after another, each row by row.

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
                found = torch.autograd.grad(task_loss(model, single), parameters, allow_unused=True)
            gradients = [
                torch.zeros_like(parameter) if gradient is None else gradient
                for parameter, gradient in zip(parameters, found, strict=True)
            ]
            pieces = [layer.matrix(gradient).flatten() for layer, gradient in zip(layers, gradients, strict=True)]
            rows[row] = torch.cat(pieces)
            if not bool(torch.isfinite(rows[row]).all()):  # after rounding to float32, which may overflow
                name = next(one.name for one, piece in zip(layers, pieces, strict=True) if not _is_finite(piece))
                raise NonFiniteError(
                    f"The gradient of the task loss at sample {index} of calibration batch {number} holds NaN or "
                    f"infinity in layer {name!r}; leave that sample out, or look for a division or a root of zero in "
                    "the network."
                )
            row += 1
    return rows


def _is_finite(piece: Tensor) -> bool:
    return bool(torch.isfinite(piece.float()).all())


def keep_largest(scores: Tensor, keep: int) -> Tensor:
    """Boolean (p,), True at the `keep` highest scores."""
    return top_mask(scores[None], Unstructured(keep=keep))[0]


def magnitude(weights: Tensor, fisher: BlockFisher, keep: int) -> Tensor:
    """Keep the largest weights of the network as they are."""
    return weights * keep_largest(weights.abs(), keep)


def woodfisher(weights: Tensor, fisher: BlockFisher, keep: int) -> Tensor:
    """Saliency w_i^2 / (2 [F^-1]_ii); every removed weight adds its own update -w_i [F^-1]_i / [F^-1]_ii."""
    mask = keep_largest(_saliency(weights, fisher), keep)
    result = weights.clone()
    for part in fisher.slices():
        inverse = fisher.inverse(part)
        removed = torch.where(mask[part], 0.0, weights[part]).double()
        result[part] -= ((removed / inverse.diagonal()) @ inverse).to(result.dtype)
    return result * mask


def cbs(weights: Tensor, fisher: BlockFisher, keep: int) -> Tensor:
    """Swaps between kept and removed weights that lower the cost of the removal as a whole, then the joint update.

    The best swaps are made in batches; a batch that does not pay is halved.
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


def chita(weights: Tensor, fisher: BlockFisher, keep: int) -> Tensor:
    """Projected gradient steps with the exact step length on the support, then the exact solve on the final support."""
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
    return fisher.refit(weights, best != 0)


METHODS: dict[str, Callable[[Tensor, BlockFisher, int], Tensor]] = {
    "magnitude": magnitude,
    "woodfisher": woodfisher,
    "cbs": cbs,
    "chita": chita,
}


def _saliency(weights: Tensor, fisher: BlockFisher) -> Tensor:
    scores = torch.empty_like(weights)
    for part in fisher.slices():
        inverse = fisher.inverse(part)
        scores[part] = (weights[part].double().square() / (2 * inverse.diagonal())).to(scores.dtype)
    return scores
