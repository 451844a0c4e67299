"""What squared errors at a layer's output cost the network, to second order: the Fisher information of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from iobs.prune import batches
from iobs.prune.batches import Batch
from iobs.prune.layers import CONVOLUTIONS, Layer
from iobs.prune.parts import Part


def output_fisher(model: nn.Module, layers: tuple[Layer, ...], part: Part, seed: int) -> dict[Layer, float]:
    """Half the mean squared gradient of the log-likelihood with respect to a layer's output, summed over positions.

    Targets are drawn from the model's own distribution, so that this is the diagonal of the true Fisher information,
    averaged over a layer's outputs: a unit of squared output error then costs that much divergence, to second order.
    Layers whose module is not called itself (experts, projections of nn.MultiheadAttention), or returns no tensor, are
    left out.

    Args:
        model: the network, in eval mode.
        layers: whose outputs.
        part: samples.
        seed: of the drawn targets.
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
    """Squared gradients at the outputs of some modules: summed over samples and positions, averaged over channels."""
    outputs: list[tuple[str, Tensor]] = []

    def keep(path: str) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor) and output.requires_grad:
                outputs.append((path, output))
                return output.clone()  # what follows may work in place
            return output

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    try:
        with torch.enable_grad():
            scores = batches.logits(batches.forward(model, batch)).float()
            axis = batches.class_axis(scores, batch)
            if axis is None:  # numbers with normal errors of unit variance
                errors = torch.randn(scores.shape, generator=generator).to(scores.device)
                likelihood = (scores * errors).sum()
            else:
                scores = scores.movedim(axis, -1)
                logs = scores.reshape(-1, scores.shape[-1]).log_softmax(-1)
                drawn = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator).to(logs.device)
                drawn_logs = logs.gather(1, drawn).reshape(*scores.shape[:-1], 1)
                likelihood = batches.unpadded(drawn_logs, batches.attended(model, batch)).sum()
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
