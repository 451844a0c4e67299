"""Importance of a layer's rows to the model's outputs: the joint curvature of layer error and Fisher information.

To second order, errors e_t of a layer's output at tokens t cost the model 1/2 sum_t e_t^T F_t e_t in divergence.
F_t = E[g g^T] is the Fisher information of the gradients g of the log-likelihood at that output. The joint curvature
takes one weight w_i for each row i: the mean of 1 and of its relative squared gradient. So the quadratic of the layer
is sum_i w_i (v_i - c_i) H (v_i - c_i)^T. All rows still share the Gram matrix H, and layers with the same input too.
MOONSHOT has both terms in one objective. Weights of rows alone are this library's choice (LOG.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError
from iobs.pruning.network.calls import Args, Kwargs, after_calls
from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import attended, class_axis, logits, unpadded
from iobs.pruning.samples.subsets import Samples

SHARE = 0.5  # of the Fisher term in a weight; the rest is the layer's own error
PROBE, PROBE_TOKENS = 128, 1 << 15  # samples and tokens that are measured


def row_importance(model: nn.Module, layers: Sequence[Layer], part: Samples, seed: int) -> dict[Layer, Tensor]:
    """Weights of the rows of layers, (rows,) float64 with mean 1, from one forward and backward pass of some samples.

    Labels are drawn from the model's own distribution: the weights are those of the true Fisher information. Layers
    whose module is not called itself (experts, projections of nn.MultiheadAttention), or returns no tensor, have none.

    Args:
        model: the model, in eval mode; its parameters need not ask for gradients.
        layers: the layers to prune.
        part: calibration samples; at most `PROBE` samples and `PROBE_TOKENS` tokens are used.
        seed: of the drawn labels.
    """
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, Tensor] = {}
    paths = {layer.path for layer in layers if layer.is_called}
    for batch in part.first(PROBE, PROBE_TOKENS).batches:
        for path, output, gradient in likelihood_gradients(model, paths, batch, generator):
            module, axis = model.get_submodule(path), output.ndim - 1
            if isinstance(module, CONVOLUTIONS):
                axis -= len(module.kernel_size)
            squares = gradient.double().square().movedim(axis, -1).flatten(0, -2).sum(0)
            sums[path] = sums[path] + squares if path in sums else squares
    usable = {path: total for path, total in sums.items() if bool(torch.isfinite(total).all()) and bool(total.any())}
    return {
        layer: 1 - SHARE + SHARE * usable[layer.path] / usable[layer.path].mean()
        for layer in layers
        if layer.is_called and layer.path in usable
    }


def likelihood_gradients(
    model: nn.Module, paths: set[str], batch: Batch, generator: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Gradients of the log-likelihood of drawn labels at outputs of modules: path, output and gradient of each call.

    Labels are drawn from the model's distribution; for outputs that are numbers, from normal errors of unit variance.
    Large batches of text are run in parts, in the order of their samples: a part's labels follow those before it.

    Raises:
        ProblemError: the outputs of the model have no gradient.
    """
    for part in batches.pieces(batch):
        yield from _gradients(model, paths, part, generator)


def _gradients(
    model: nn.Module, paths: set[str], batch: Batch, generator: torch.Generator
) -> list[tuple[str, Tensor, Tensor]]:
    """The gradients of `likelihood_gradients` on one part of a batch."""
    outputs: list[tuple[str, Tensor]] = []
    with _recorded(model, paths, outputs), torch.enable_grad():
        scores = logits(batches.forward(model, batch)).float()
        if not outputs:  # this batch reaches none of the modules
            return []
        axis = class_axis(scores, batch)
        if axis is None:  # regression with normal errors of unit variance
            errors = torch.randn(scores.shape, generator=generator).to(scores.device)
            likelihood = (scores * errors).sum()
        else:
            scores = scores.movedim(axis, -1)
            logs = scores.reshape(-1, scores.shape[-1]).log_softmax(-1)
            chances = logs.detach().exp().cpu()
            chances = chances.masked_fill_(~chances.isfinite(), 1.0)  # padding; otherwise the sweep names the layer
            drawn = torch.multinomial(chances, 1, generator=generator).to(logs.device)
            drawn_logs = logs.gather(1, drawn).reshape(*scores.shape[:-1], 1)
            likelihood = unpadded(drawn_logs, attended(model, batch)).sum()
        if not likelihood.requires_grad:
            raise ProblemError(
                "The model's outputs have no gradient: it computes under torch.no_grad, or detaches them. Take "
                'curvature="layer", and another allocation than "fisher".'
            )
        gradients = torch.autograd.grad(likelihood, [output for _, output in outputs], allow_unused=True)
    pairs = zip(outputs, gradients, strict=True)
    return [(path, output, gradient) for (path, output), gradient in pairs if gradient is not None]


@contextmanager
def _recorded(model: nn.Module, paths: set[str], outputs: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Append the outputs of modules in forward passes, with their path, as tensors that ask for gradients."""

    def record(path: str, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> object:
        if not isinstance(output, Tensor) or output.is_inference() or not output.is_floating_point():
            return output
        if not output.requires_grad:  # nothing before it asks for gradients, such as the parameters of a copy
            output = output.detach().requires_grad_()
        outputs.append((path, output))
        return output.clone()  # later operations may change it in place

    with after_calls(model, paths, record):
        yield
