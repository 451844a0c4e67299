"""Bytes of the tensors that a model holds in memory while it runs, dense or stored."""

from __future__ import annotations

from torch import nn

from iobs.inference.modules import StoredEmbedding, StoredLayer


def bytes_held(model: nn.Module) -> dict[str, int]:
    """Bytes in memory of all parameters and buffers, in their present form; a tensor with two names counts once.

    Returns:
        The bytes of embeddings (with an output head of the same weight), of other matrices, and of all other tensors:
        biases, norms and buffers.
    """
    found = {"embeddings": 0, "matrices": 0, "others": 0}
    seen: set[tuple[int, int]] = set()
    for one in model.modules():
        table = isinstance(one, nn.Embedding | StoredEmbedding)
        for tensor in (*one.parameters(recurse=False), *one.buffers(recurse=False)):
            place = tensor.data_ptr(), tensor.nbytes
            if place not in seen:
                seen.add(place)
                stored = isinstance(one, StoredLayer) and tensor is not one.bias
                weight = stored or (isinstance(tensor, nn.Parameter) and tensor.ndim > 1)
                found["embeddings" if weight and table else "matrices" if weight else "others"] += tensor.nbytes
    return found
