"""Fisher information of layer outputs: the second-order cost of squared output errors to the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import attended, class_axis, logits, unpadded
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
    outputs: list[tuple[str, Tensor]] = []

    def keep(path: str) -> Callable[[nn.Module, object, object], object]:
        def hook(module: nn.Module, args: object, output: object) -> object:
            if isinstance(output, Tensor) and output.requires_grad:
                outputs.append((path, output))
                return output.clone()  # later operations may change it in place
            return output

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    try:
        with torch.enable_grad():
            scores = logits(batches.forward(model, batch)).float()
            axis = class_axis(scores, batch)
            if axis is None:  # regression with normal errors of unit variance
                errors = torch.randn(scores.shape, generator=generator).to(scores.device)
                likelihood = (scores * errors).sum()
            else:
                scores = scores.movedim(axis, -1)
                logs = scores.reshape(-1, scores.shape[-1]).log_softmax(-1)
                drawn = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator).to(logs.device)
                drawn_logs = logs.gather(1, drawn).reshape(*scores.shape[:-1], 1)
                likelihood = unpadded(drawn_logs, attended(model, batch)).sum()
            gradients = torch.autograd.grad(likelihood, [output for _, output in outputs], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    squares = []
    for (path, output), gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            channels = output.shape[1] if isinstance(model.get_submodule(path), CONVOLUTIONS) else output.shape[-1]
            squares.append((path, float(gradient.double().square().sum()) / channels))
    return squares
