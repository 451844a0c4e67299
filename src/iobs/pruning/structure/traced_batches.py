"""Batches of a trace: short, and enough to call the layers that calibration data call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.layers import joined
from iobs.pruning.network.modes import keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import logits

TOKENS = 8  # positions of text in a traced batch: softmax needs more than one
_FIRST, _FURTHER = 2, 32  # samples of the first traced batch, and of further ones


@torch.no_grad()
def traced_batches(model: nn.Module, data: Sequence[Batch]) -> list[Batch]:
    """Short batches: the first, and one of every batch that calls a layer which no batch before it calls.

    A forward pass may branch by its data. A layer in another branch reads units too.

    Args:
        model: in eval mode.
        data: calibration data. Nothing but the first batch is run if that one calls all layers.

    Raises:
        CalibrationError: the model returns no tensor.
    """
    paths = _callable(model)
    called: set[str] = set()

    def passed(batch: Batch) -> set[str]:
        new: set[str] = set()
        with keeping_buffers(model), before_calls(model, paths, lambda path, *_: new.add(path)):
            logits(batches.forward(model, batch))
        return new

    found = [shortened(data[0])]
    called |= passed(found[0])
    for batch in data:
        for part in batches.pieces(batch):
            if called.issuperset(paths):
                return found
            if new := passed(part) - called:
                shorter = (shortened(part, samples) for samples in (_FIRST, _FURTHER))
                found.append(next((one for one in shorter if new <= passed(one)), batches.inputs(part)))
                called |= new
    return found


def _callable(model: nn.Module) -> list[str]:
    """Names of the modules with parameters that a forward pass may call as modules."""
    own = [(path, one) for path, one in model.named_modules() if not isinstance(one, torch.jit.ScriptModule)]
    # Attention of torch multiplies by the weight of its last layer itself.
    unseen = {joined(path, "out_proj") for path, one in own if isinstance(one, nn.MultiheadAttention)}
    holders = (nn.ParameterList, nn.ParameterDict)
    able = [path for path, one in own if [*one.parameters(recurse=False)] and not isinstance(one, holders)]
    return [path for path in able if path not in unseen]


def shortened(batch: Batch, samples: int = _FIRST) -> Batch:
    """At most some samples, and `TOKENS` positions of text if nothing else is in the batch.

    Text beside images or sounds is left whole: its tokens stand for their parts. Of text that is padded on the left the
    last positions are taken.
    """
    given = batches.inputs(batch)
    if not batches.is_whole(given):
        rows = torch.arange(min(samples, batches.size(given)))
        given = batches.take(given, rows)
    found = batches.tensors(given)
    if len(found) > 1 and any(tensor.is_floating_point() for tensor in found):
        return given
    texts = {tensor.shape for tensor in found if tensor.ndim == 2 and not tensor.is_floating_point()}
    if isinstance(given, Mapping) and len(texts) == 1:
        mask = given.get("attention_mask")
        left = isinstance(mask, Tensor) and mask.shape in texts and not bool(mask[:, 0].all())
        part = slice(-TOKENS, None) if left else slice(TOKENS)
        return {
            name: value[:, part] if isinstance(value, Tensor) and value.shape in texts else value
            for name, value in given.items()
        }
    whole = isinstance(given, Tensor) and given.ndim == 2 and not given.is_floating_point()
    return given[:, :TOKENS] if whole and isinstance(given, Tensor) else given
