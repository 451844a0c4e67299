"""Batches of a trace: short, and enough to call the layers that calibration data call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from iobs.errors import is_out_of_memory
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.layers import joined
from iobs.pruning.network.modes import evaluating, keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import logits

TOKENS = 8  # positions of text in a traced batch: softmax needs more than one
_FIRST, _FURTHER = 2, 32  # samples of the first traced batch, and of further ones


@torch.no_grad()
def traced_batches(model: nn.Module, data: Sequence[Batch]) -> list[Batch]:
    """Short batches: the first, and one of every batch that calls a layer which no batch before it calls.

    A forward pass may branch by its data. A layer in another branch reads units too. A model that takes no fewer
    positions, such as one with an embedding for each column of a table, gets all of them.

    Args:
        model: in eval mode.
        data: calibration data. Nothing but the first batch is run if that one calls all layers.

    Raises:
        CalibrationError: the model returns no tensor.
    """
    paths = callable_modules(model)

    def shorter(batch: Batch, samples: int = _FIRST) -> tuple[Batch, set[str]]:
        """A shorter batch that the model takes, and the modules that it calls."""
        short = shortened(batch, samples)
        try:
            return short, called_modules(model, [short], paths)
        except batches.REFUSALS as error:
            if is_out_of_memory(error):
                raise
        few = _fewer(batch, samples)
        return few, called_modules(model, [few], paths)

    first, called = shorter(data[0])
    traced = [first]
    for batch in data:
        for part in batches.pieces(batch):
            if called.issuperset(paths):
                return traced
            if new := called_modules(model, [part], paths) - called:
                candidates = (shorter(part, samples) for samples in (_FIRST, _FURTHER))
                traced.append(next((short for short, calls in candidates if new <= calls), batches.inputs(part)))
                called |= new
    return traced


@torch.no_grad()
def called_modules(model: nn.Module, data: Sequence[Batch], paths: Sequence[str]) -> set[str]:
    """The modules among those at some paths that a model calls on some batches, in eval mode.

    Raises:
        CalibrationError: the model returns no tensor.
    """
    called: set[str] = set()
    with evaluating(model), keeping_buffers(model), before_calls(model, paths, lambda path, *_: called.add(path)):
        for batch in data:
            logits(batches.forward(model, batch))
    return called


def callable_modules(model: nn.Module) -> list[str]:
    """Names of the modules with parameters that a forward pass may call as modules."""
    visible = {path: each for path, each in model.named_modules() if not isinstance(each, torch.jit.ScriptModule)}
    # Attention of torch multiplies by the weight of its last layer itself.
    unseen = {joined(path, "out_proj") for path, each in visible.items() if isinstance(each, nn.MultiheadAttention)}
    holders = (nn.ParameterList, nn.ParameterDict)
    able = [path for path, each in visible.items() if any(value is not None for value in each._parameters.values())]
    return [path for path in able if path not in unseen and not isinstance(visible[path], holders)]


def shortened(batch: Batch, samples: int = _FIRST) -> Batch:
    """At most some samples, and `TOKENS` positions of text if nothing else is in the batch.

    Text beside images or sounds is left whole: its tokens stand for their parts. Of text that is padded on the left the
    last positions are taken.
    """
    short = _fewer(batch, samples)
    tensors = batches.tensors(short)
    if len(tensors) > 1 and any(tensor.is_floating_point() for tensor in tensors):
        return short
    texts = {tensor.shape for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()}
    if isinstance(short, Mapping) and len(texts) == 1:
        mask = short.get("attention_mask")
        padded = isinstance(mask, Tensor) and mask.shape in texts and not bool(mask[:, 0].all())
        part = slice(-TOKENS, None) if padded else slice(TOKENS)
        return {
            name: value[:, part] if isinstance(value, Tensor) and value.shape in texts else value
            for name, value in short.items()
        }
    return short[:, :TOKENS] if isinstance(short, Tensor) and short.shape in texts else short


def _fewer(batch: Batch, samples: int) -> Batch:
    """The inputs of at most some samples."""
    inputs = batches.inputs(batch)
    return batches.take(inputs, torch.arange(min(samples, batches.size(inputs))))
