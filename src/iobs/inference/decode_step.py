"""One token through a whole Llama-like network, in one call of compiled code (AVX-512 or AVX2)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from iobs.inference import cpu
from iobs.inference.activations import even_then_odd, filled, rounded
from iobs.inference.decodable import CODES
from iobs.inference.product import Addresses
from iobs.inference.vectors import Value, read_real

if cpu.level() == "avx2":  # compiled code sees one instruction set; numba keeps the code of each apart
    from iobs.inference.kernels_avx2 import bf16, bitmask_bf16, bitmask_int4, bitmask_int8, index_bf16, int8

    _order_of_bitmask, _OFFSET = filled, 0
else:
    from iobs.inference.kernels_avx512 import bf16, bitmask_bf16, bitmask_int4, bitmask_int8, index_bf16, int8

    _order_of_bitmask, _OFFSET = even_then_odd, 128

Reals = NDArray[np.float32]
_BF16, _INDEX_BF16 = CODES["bf16"], CODES["index-bf16"]
_INT8, _BITMASK_INT8, _BITMASK_INT4 = CODES["int8"], CODES["bitmask-int8"], CODES["bitmask-int4"]
FIELDS = (*Addresses._fields, "rows", "columns", "code", "bias")  # of a matrix, int64 each


class DecoderWeights(NamedTuple):
    """Weights and sizes of a network.

    Args:
        matrices: (7 * layers + 1, 12), the `FIELDS` of every matrix. Those of a layer are q, k, v, o, gate, up and
            down; the output head is last.
        norms: (2 * layers + 1, hidden), scales of the norms before attention and before the MLP, and of the last norm.
        head_norms: (2 * layers, head size), scales of the norms of queries and keys; no rows: there are none.
        epsilon: of the norms.
        heads: number of query heads.
        scaling: factor of the attention scores.
    """

    matrices: NDArray[np.int64]
    norms: Reals
    head_norms: Reals
    epsilon: float
    heads: int
    scaling: float


class StepBuffers(NamedTuple):
    """Memory for the vectors of a step.

    Args:
        hidden: (hidden).
        normed: (hidden).
        queries: (query heads * head size); it also holds the output of attention.
        keys: (key heads * head size).
        values: (key heads * head size).
        gate: (MLP size).
        up: (MLP size).
        reals: (1, widest filled row), activations in float32.
        bytes: (1, widest filled row), activations in 8 bits.
        scale: (1), of these.
        scores: (longest text).
    """

    hidden: Reals
    normed: Reals
    queries: Reals
    keys: Reals
    values: Reals
    gate: Reals
    up: Reals
    reals: Reals
    bytes: NDArray[np.uint8]
    scale: Reals
    scores: Reals


@njit(cache=True, nogil=True, error_model="numpy")
def _multiply(fields: Value, inputs: Value, result: Value, scratch: Value) -> None:
    """Write one matrix times a vector, plus the bias, to `result`; `fields` has the order of `FIELDS`."""
    matrix = Addresses(fields[0], fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], fields[7])
    wide, rows, code, bias = 64 * fields[7], fields[8], fields[10], fields[11]
    output = result.ctypes.data
    vector = inputs.reshape(1, inputs.size)
    if code in (_INT8, _BITMASK_INT8, _BITMASK_INT4):
        layout = scratch.bytes[:, :wide]
        rounded(vector, layout, scratch.scale, _OFFSET)
        tokens = (layout.ctypes.data,)
        if code == _INT8:
            int8(matrix, tokens, output, 0, 0, rows)
        elif code == _BITMASK_INT8:
            bitmask_int8(matrix, tokens, output, 0, 0, rows)
        else:
            bitmask_int4(matrix, tokens, output, 0, 0, rows)
        for row in range(rows):
            correction = read_real(matrix.corrections + 4 * row) if _OFFSET else np.float32(0)
            result[row] = scratch.scale[0] * (result[row] - correction)
    else:
        copy = scratch.reals[:, :wide]
        tokens = (copy.ctypes.data,)
        if code == _INDEX_BF16:
            filled(vector, copy)
            index_bf16(matrix, tokens, output, 0, 0, rows)
        elif code == _BF16:
            even_then_odd(vector, copy)
            bf16(matrix, tokens, output, 0, 0, rows)
        else:
            _order_of_bitmask(vector, copy)
            bitmask_bf16(matrix, tokens, output, 0, 0, rows)
    if bias != 0:
        for row in range(rows):
            result[row] += read_real(bias + 4 * row)


@njit(cache=True, nogil=True, fastmath=True)
def normalise(vector: Value, scales: Value, epsilon: Value, result: Value) -> None:
    """Write vector / sqrt(mean(vector^2) + epsilon) * scales to `result`."""
    total = np.float32(0)
    for column in range(vector.size):
        total += vector[column] * vector[column]
    factor = np.float32(1 / np.sqrt(total / vector.size + epsilon))
    for column in range(vector.size):
        result[column] = vector[column] * factor * scales[column]


@njit(cache=True, nogil=True)
def rotate(vectors: Value, cosines: Value, sines: Value) -> None:
    """Rotary position embedding of heads (heads, head size), in place."""
    half = vectors.shape[1] // 2
    for head in range(vectors.shape[0]):
        for column in range(half):
            low, high = vectors[head, column], vectors[head, half + column]
            vectors[head, column] = low * cosines[column] - high * sines[column]
            vectors[head, half + column] = high * cosines[half + column] + low * sines[half + column]


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz", "arcp"})
def _attend(queries: Value, keys: Value, values: Value, length: Value, scaling: Value, scores: Value) -> None:
    """Replace each query (heads, head size) by its attention over `length` keys and values."""
    size, group = queries.shape[1], queries.shape[0] // keys.shape[0]
    for head in range(queries.shape[0]):
        query, key, value = queries[head], keys[head // group], values[head // group]
        largest = np.float32(-np.inf)
        for place in range(length):
            score = np.float32(0)
            for column in range(size):
                score += query[column] * key[place, column]
            scores[place] = score * np.float32(scaling)
            largest = max(largest, scores[place])
        total = np.float32(0)
        for place in range(length):
            scores[place] = np.exp(scores[place] - largest)
            total += scores[place]
        query[:] = 0
        for place in range(length):
            share = scores[place] / total
            for column in range(size):
                query[column] += share * value[place, column]


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz", "arcp"})
def _gated(gate: Value, up: Value) -> None:
    """Replace the gate by silu(gate) * up."""
    for column in range(gate.size):
        gate[column] = gate[column] / (np.float32(1) + np.exp(-gate[column])) * up[column]


@njit(cache=True, nogil=True)
def step(
    network: Value,
    scratch: Value,
    keys: Value,
    values: Value,
    position: Value,
    cosines: Value,
    sines: Value,
    logits: Value,
) -> None:
    """Pass the token whose embedding is in `scratch.hidden` through the network.

    Args:
        network: a `DecoderWeights`.
        scratch: a `StepBuffers`.
        keys: (layers, key heads, longest text, head size), float32; position `position` is written.
        values: of the same shape.
        position: of the token.
        cosines: (head size), of this position.
        sines: (head size), of this position.
        logits: (vocabulary), float32, written.
    """
    layers, heads, size = keys.shape[0], keys.shape[1], keys.shape[3]
    hidden, normed = scratch.hidden, scratch.normed
    for layer in range(layers):
        at = 7 * layer
        normalise(hidden, network.norms[2 * layer], network.epsilon, normed)
        _multiply(network.matrices[at], normed, scratch.queries, scratch)
        _multiply(network.matrices[at + 1], normed, scratch.keys, scratch)
        _multiply(network.matrices[at + 2], normed, scratch.values, scratch)
        queries = scratch.queries.reshape(network.heads, size)
        new_keys, new_values = scratch.keys.reshape(heads, size), scratch.values.reshape(heads, size)
        if network.head_norms.shape[0] > 0:
            for head in range(network.heads):
                normalise(queries[head], network.head_norms[2 * layer], network.epsilon, queries[head])
            for head in range(heads):
                normalise(new_keys[head], network.head_norms[2 * layer + 1], network.epsilon, new_keys[head])
        rotate(queries, cosines, sines)
        rotate(new_keys, cosines, sines)
        for head in range(heads):
            keys[layer, head, position] = new_keys[head]
            values[layer, head, position] = new_values[head]
        _attend(queries, keys[layer], values[layer], position + 1, network.scaling, scratch.scores)
        _multiply(network.matrices[at + 3], scratch.queries, normed, scratch)
        hidden += normed
        normalise(hidden, network.norms[2 * layer + 1], network.epsilon, normed)
        _multiply(network.matrices[at + 4], normed, scratch.gate, scratch)
        _multiply(network.matrices[at + 5], normed, scratch.up, scratch)
        _gated(scratch.gate, scratch.up)
        _multiply(network.matrices[at + 6], scratch.gate, normed, scratch)
        hidden += normed
    normalise(hidden, network.norms[2 * layers], network.epsilon, normed)
    _multiply(network.matrices[7 * layers], normed, logits, scratch)
