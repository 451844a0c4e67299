"""Windows of text joined to longer ones: steps and Gram matrices see more positions of a model's context."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from iobs.pruning.samples.batches import Batch, mapped, positions
from iobs.pruning.samples.subsets import Samples

_TEXT = {"input_ids", "attention_mask"}  # arguments of a model that can be joined


def packed(model: nn.Module, part: Samples, tokens: int) -> Samples:
    """Half of the windows of a text joined to windows of at most `tokens` tokens, beside the other half.

    Weights that are fitted on short windows only match the dense model at the positions of these windows, and lose at
    later positions. In a causal model the text that is joined behind a window changes no output of this window.

    Args:
        model: only a causal decoder with a stated context has its windows joined.
        part: samples. Windows with padding, of unequal length or with other arguments than ids and mask are unchanged.
        tokens: most tokens of a joined window; the context of the model is another limit.

    Returns:
        A batch of joined windows, and a batch of given ones; or `part` itself if nothing is joined.
    """
    if not part.batches or not all(map(_is_full_text, part.batches)) or not part.alike or not _is_causal(model):
        return part
    length = positions(part.batches[0])
    context = int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or 0)
    count = min(tokens, context) // length
    if count < 2 or part.samples < count:
        return part
    rows = torch.arange(part.samples)
    group = rows // count
    joins = (group % 2 == 0) & (group < part.samples // count)  # every second group of windows
    joined = mapped(part.pick(rows[joins]), lambda tensor: tensor.reshape(-1, count * length))
    kept = [part.pick(rows[~joins])] if not bool(joins.all()) else []
    return Samples([joined, *kept], [part.numbers[0], part.numbers[-1]][: 1 + len(kept)])


def _is_full_text(batch: Batch) -> bool:
    """Check that a batch holds ids of tokens, perhaps a mask, no padding, and nothing else."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch or not batch.keys() <= _TEXT:
        return False
    mask = batch.get("attention_mask")
    if any(not isinstance(value, Tensor) or value.ndim != 2 for value in batch.values()):
        return False
    return mask is None or (mask.shape == batch["input_ids"].shape and bool(mask.all()))


def _is_causal(model: nn.Module) -> bool:
    """Check that every attention of a model declares itself causal, as Hugging Face modules do."""
    declared = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return bool(declared) and all(declared)
