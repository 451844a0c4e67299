"""Fisher information of layer outputs: the second-order cost of squared output errors to the model."""

from __future__ import annotations

import torch
from torch import nn

from iobs.pruning.calibration.importance import likelihood_gradients
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples


def output_fisher(model: nn.Module, layers: tuple[Layer, ...], part: Samples, seed: int) -> dict[Layer, float]:
    """Half the mean squared gradient of the log-likelihood with respect to a layer's output, summed over positions.

    Labels are drawn from the model's own distribution. The result is therefore the diagonal of the true Fisher
    information, averaged over the outputs of a layer. To second order it is the divergence per unit of squared output
    error. Layers whose module is not called itself (experts, projections of nn.MultiheadAttention), or returns no
    tensor, are left out.

    Args:
        model: the model, in eval mode.
        layers: the layers whose outputs are measured.
        part: samples.
        seed: of the drawn labels.
    """
    generator = torch.Generator().manual_seed(seed)
    sums = {layer.path: 0.0 for layer in layers if layer.is_called}
    for batch in part.batches:
        for path, square in _output_squares(model, set(sums), batch, generator):
            sums[path] += square
    return {layer: 0.5 * sums[layer.path] / part.samples for layer in layers if sums.get(layer.path, 0.0) > 0}


def _output_squares(
    model: nn.Module, paths: set[str], batch: Batch, generator: torch.Generator
) -> list[tuple[str, float]]:
    """Squared gradients at the outputs of modules: summed over samples and positions, averaged over channels."""
    squares = []
    for path, output, gradient in likelihood_gradients(model, paths, batch, generator):
        channels = output.shape[1] if isinstance(model.get_submodule(path), CONVOLUTIONS) else output.shape[-1]
        squares.append((path, float(gradient.double().square().sum()) / channels))
    return squares
