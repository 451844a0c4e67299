"""Shapes of a language model from its configuration, without weights."""

from __future__ import annotations

from pathlib import Path

import torch

from iobs.core.files import expanded
from iobs.models.huggingface import context_of
from iobs.models.skeleton import skeleton
from iobs.models.streamed import blocks_of
from iobs.pruning.calibration.halving import halved
from iobs.pruning.cost.machines import Network
from iobs.pruning.network.selection import select
from iobs.pruning.store import Names


def shapes_of(
    path: str | Path, include: Names = None, ignore: Names = None, depthwise: bool = False, halves: bool = False
) -> Network:
    """The shapes of the model that a config.json describes.

    Args:
        path: a directory with config.json.
        include: names of the layers to prune; see `iobs.prune`.
        ignore: names of the layers that stay dense.
        depthwise: also prune depthwise convolutions.
        halves: half-blocks take the place of blocks.

    Raises:
        ModelError: the configuration is not of a language model with a list of blocks.
        LayerSelectionError: a name pattern matches nothing.
        ProblemError: a block cannot be divided.
    """
    module = skeleton(expanded(Path(path)))
    blocks = blocks_of(module)
    chosen = select(module, include, ignore, depthwise=depthwise, check_finite=False).layers
    layers = [layer for layer in chosen if any(block.holds(layer.path) for block in blocks)]
    parameters = dict(module.named_parameters())
    context = context_of(module.config, None, module)  # type: ignore[arg-type]
    if halves:  # found without weights too: on the meta device a forward pass computes shapes alone
        blocks = halved(module.to("meta"), blocks, {"input_ids": torch.zeros(1, 2, dtype=torch.int64)})
    sizes = [sum(one.numel() for name, one in parameters.items() if block.holds(name)) for block in blocks]
    total = sum(parameter.numel() for parameter in parameters.values())
    vocabulary = int(getattr(module.config, "vocab_size", 0))
    dtype = next(module.parameters()).dtype
    hidden = int(getattr(module.config, "hidden_size", 0) or 0)
    outside = total - sum(sizes)
    return Network(layers, max(sizes), outside, total, vocabulary, dtype.itemsize, hidden, len(blocks), context)
