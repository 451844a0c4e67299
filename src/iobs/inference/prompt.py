"""A whole prompt through a Llama-like network, layer by layer, without the modules of transformers.

Vectors are changed in place where that is possible: fresh memory costs more than the arithmetic on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from iobs.inference.decode_step import MATRICES, Network, normalise, rotate
from iobs.inference.modules import StoredLinear, outputs_of
from iobs.inference.vectors import Value

Reals = NDArray[np.float32]
_QUERIES = 128  # tokens whose attention is computed at a time: bounds the memory of the scores


@njit(cache=True, nogil=True)
def _normalise_rows(given: Value, scales: Value, epsilon: Value, found: Value) -> None:
    """Norm of each row of (rows, columns)."""
    for row in range(given.shape[0]):
        normalise(given[row], scales, epsilon, found[row])


@njit(cache=True, nogil=True)
def _rotate_tokens(vectors: Value, cosines: Value, sines: Value) -> None:
    """Rotary position embedding of (tokens, heads, head size), in place."""
    for token in range(vectors.shape[0]):
        rotate(vectors[token], cosines[token], sines[token])


@torch.no_grad()
def read_prompt(
    network: Network,
    modules: Sequence[StoredLinear],
    hidden: Reals,
    keys: Reals,
    values: Reals,
    rotation: tuple[Reals, Reals],
) -> Reals:
    """Logits (vocabulary) after the last token of a prompt.

    Args:
        network: sizes and norms of the network.
        modules: its matrices, in the order of `network.matrices`.
        hidden: (tokens, hidden), embeddings of the prompt; overwritten.
        keys: (layers, key heads, longest text, head size), float32; the places of the prompt are written.
        values: of the same shape.
        rotation: cosines and sines, (tokens, head size) each.
    """
    layers, heads, _, size = keys.shape
    count, normed = len(hidden), np.empty_like(hidden)
    stream, given = torch.from_numpy(hidden), torch.from_numpy(normed)
    for layer in range(layers):
        query, key, value, output, gate, up, down = modules[len(MATRICES) * layer :][: len(MATRICES)]
        _normalise_rows(hidden, network.norms[2 * layer], network.epsilon, normed)
        queries, new_keys, new_values = (one.numpy() for one in outputs_of((query, key, value), given))
        if len(network.head_norms):
            for number, vectors in enumerate((queries, new_keys)):
                flat = vectors.reshape(-1, size)
                _normalise_rows(flat, network.head_norms[2 * layer + number], network.epsilon, flat)
        for vectors in (queries, new_keys):
            _rotate_tokens(vectors.reshape(count, -1, size), *rotation)
        keys[layer, :, :count] = new_keys.reshape(count, heads, size).swapaxes(0, 1)
        values[layer, :, :count] = new_values.reshape(count, heads, size).swapaxes(0, 1)
        past = torch.from_numpy(keys[layer, :, :count]), torch.from_numpy(values[layer, :, :count])
        stream += output(_attend(torch.from_numpy(queries), past, network.scaling))
        _normalise_rows(hidden, network.norms[2 * layer + 1], network.epsilon, normed)
        gates, ups = outputs_of((gate, up), given)
        stream += down(torch.nn.functional.silu(gates, inplace=True).mul_(ups))
    _normalise_rows(hidden[-1:], network.norms[2 * layers], network.epsilon, normed[-1:])
    logits: Reals = modules[-1](given[-1:])[0].numpy()
    return logits


def _attend(queries: Tensor, past: tuple[Tensor, Tensor], scaling: float) -> Tensor:
    """Causal attention of all tokens: (tokens, query heads * head size).

    Args:
        queries: (tokens, query heads * head size).
        past: keys and values, (key heads, tokens, head size) each.
        scaling: factor of the scores.
    """
    keys, values = past
    heads, count, size = keys.shape
    found = torch.empty_like(queries)
    grouped = queries.view(count, heads, -1, size)
    for first in range(0, count, _QUERIES):
        last = min(first + _QUERIES, count)
        some = grouped[first:last].permute(1, 2, 0, 3)  # (key heads, queries of one key head, tokens, head size)
        flat = some.reshape(heads, -1, size)
        scores = torch.bmm(flat, keys[:, :last].transpose(1, 2)).mul_(scaling)
        later = torch.ones(last - first, last, dtype=torch.bool).triu_(first + 1)
        scores.view(heads, -1, last - first, last).masked_fill_(later, -torch.inf)
        shares = torch.softmax(scores, 2, out=scores)
        mixed = torch.bmm(shares, values[:, :last]).view(some.shape)
        found.view(count, heads, -1, size)[first:last] = mixed.permute(2, 0, 1, 3)
    return found
