"""Generation with a Llama-like network: the prompt layer by layer, each new token by one call of compiled code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from iobs.errors import ProblemError
from iobs.inference import cpu
from iobs.inference.decodable import LONGEST, CausalModel, most_tokens, undecodable
from iobs.inference.decode_step import MATRICES, DecoderWeights, StepBuffers, normalise, rotate, step
from iobs.inference.formats import FormatName
from iobs.inference.kernels_avx512 import CODES
from iobs.inference.modules import StoredLinear, outputs_of, stored
from iobs.inference.product import addresses_of
from iobs.inference.vectors import Value

# ---- A whole prompt through a Llama-like network, layer by layer, without the modules of transformers
# Vectors are changed in place where that is possible: fresh memory costs more than the arithmetic on it.

Reals = NDArray[np.float32]
_QUERIES = 128  # tokens whose attention is computed at a time: bounds the memory of the scores


@njit(cache=True, nogil=True)
def _normalise_rows(vectors: Value, scales: Value, epsilon: Value, result: Value) -> None:
    """Norm of each row of (rows, columns)."""
    for row in range(vectors.shape[0]):
        normalise(vectors[row], scales, epsilon, result[row])


@njit(cache=True, nogil=True)
def _rotate_tokens(vectors: Value, cosines: Value, sines: Value) -> None:
    """Rotary position embedding of (tokens, heads, head size), in place."""
    for token in range(vectors.shape[0]):
        rotate(vectors[token], cosines[token], sines[token])


@torch.no_grad()
def read_prompt(
    network: DecoderWeights,
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
    stream, inputs = torch.from_numpy(hidden), torch.from_numpy(normed)
    for layer in range(layers):
        query, key, value, output, gate, up, down = modules[len(MATRICES) * layer :][: len(MATRICES)]
        _normalise_rows(hidden, network.norms[2 * layer], network.epsilon, normed)
        queries, new_keys, new_values = (product.numpy() for product in outputs_of((query, key, value), inputs))
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
        gates, ups = outputs_of((gate, up), inputs)
        stream += down(torch.nn.functional.silu(gates, inplace=True).mul_(ups))
    _normalise_rows(hidden[-1:], network.norms[2 * layers], network.epsilon, normed[-1:])
    logits: Reals = modules[-1](inputs[-1:])[0].numpy()
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
    result = torch.empty_like(queries)
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
        result.view(count, heads, -1, size)[first:last] = mixed.permute(2, 0, 1, 3)
    return result


# ---- The decoder: its memory, and its loop over new tokens

Bytes = NDArray[np.uint8]


def require_prompt(prompt: Tensor) -> None:
    """Raise unless a prompt has the shape (1, length).

    Raises:
        ProblemError: it is empty, or of another shape.
    """
    if prompt.ndim != 2 or prompt.shape[0] != 1 or not prompt.shape[1]:
        raise ProblemError(f"The prompt must be ids of shape (1, length), got {tuple(prompt.shape)}.")


class Decoder:
    """Generates text with a Llama-like model whose weights are stored matrices.

    Layers that `iobs.accelerate` left dense are stored in `form`. One thread computes the new tokens.

    Args:
        model: a `transformers` causal model of the types llama, mistral, qwen2 or qwen3, usually after
            `iobs.accelerate`. Without AMX it computes the prompt.
        longest: number of tokens of prompt and answer together. None: the limit of the model, at most 2,048.
        form: format of layers that are dense modules.
        compiled: compile the step now, by a first call, so that no token waits for it.

    Raises:
        ProblemError: the model has another architecture, or the CPU lacks the instructions.
    """

    def __init__(
        self, model: nn.Module, longest: int | None = None, form: FormatName = "bf16", compiled: bool = True
    ) -> None:
        reason = undecodable(model)
        if reason is not None:
            raise ProblemError(f"This model cannot be decoded: {reason}. Use model.generate.")
        self.model = cast(CausalModel, model)
        config = self.model.config
        most = most_tokens(model)
        self.longest = min(most, LONGEST) if longest is None else longest
        if self.longest > most:
            raise ProblemError(f"longest is {self.longest}, but this model attends to at most {most} tokens.")
        self._kept: list[Tensor | Bytes] = []  # the memory that the compiled step reads by its addresses
        self._stored: list[StoredLinear] = []  # the matrices of the network
        with torch.no_grad():
            self._network = self._read(form)
            self._scratch, self._logits = self._memory(), np.empty(config.vocab_size, np.float32)
            places = torch.arange(self.longest)[None]
            cosines, sines = self.model.model.rotary_emb(torch.zeros(1, 1, 1), places)
            self._cosines, self._sines = cosines[0].float().numpy(), sines[0].float().numpy()
            if compiled:
                self._compile()

    def _compile(self) -> None:
        """Compile the step by a first call."""
        config, layers = self.model.config, self.model.model.layers
        none = np.zeros((len(layers), config.num_key_value_heads, 1, layers[0].self_attn.head_dim), np.float32)
        self.step(0, 0, none, none.copy())

    @property
    def own_bytes(self) -> int:
        """Bytes that it keeps beside the tensors of the model, each memory once.

        They are layers that were dense, biases in float32, tables of kernels, norms, rotations and scratch.
        """
        arrays = [value for value in (*self._network, *self._scratch) if isinstance(value, np.ndarray)]
        sizes = {array.ctypes.data: array.nbytes for array in (*arrays, self._cosines, self._sines, self._logits)}
        for kept in self._kept:
            place = kept.data_ptr() if isinstance(kept, Tensor) else kept.ctypes.data
            sizes[place] = kept.nbytes
        of_model = {tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers())}
        return sum(size for place, size in sizes.items() if place not in of_model)

    def generate(self, prompt: Tensor, tokens: int, stop: tuple[int, ...] = ()) -> Iterator[int]:
        """Yield the most likely next tokens, one at a time.

        Args:
            prompt: token ids, (1, length).
            tokens: greatest number of new tokens.
            stop: ids that end the text; they are yielded too.

        Raises:
            ProblemError: the prompt is empty, of another shape, or too long.
        """
        require_prompt(prompt)
        length = prompt.shape[1]
        if length + tokens > self.longest:
            raise ProblemError(f"Prompt ({length}) and answer ({tokens}) exceed {self.longest} tokens; raise longest.")
        keys, values, logits = self._prefill(prompt)
        for position in range(length, length + tokens):
            token = int(logits.argmax())
            yield token
            if token in stop or position == length + tokens - 1:
                return
            logits = self.step(token, position, keys, values)

    def step(self, token: int, position: int, keys: Reals, values: Reals) -> Reals:
        """Logits (vocabulary) after one more token.

        Args:
            token: its id.
            position: its place in the text, below `longest`.
            keys: (layers, key heads, positions, head size), contiguous; those of the token are written at `position`.
            values: the same.

        Raises:
            ProblemError: the token is none of the vocabulary, or the position lies outside of keys and values.
        """
        room = min(keys.shape[2], values.shape[2], self.longest)
        if not 0 <= position < room or not 0 <= token < self.model.model.embed_tokens.num_embeddings:
            raise ProblemError(
                f"Token {token} at position {position} is outside of the vocabulary or of {room} places."
            )
        embedding = self.model.model.embed_tokens(torch.tensor([token])).detach()
        self._scratch.hidden[:] = embedding[0].float().numpy()
        cosines, sines = self._cosines[position], self._sines[position]
        step(self._network, self._scratch, keys, values, position, cosines, sines, self._logits)
        return self._logits

    @torch.no_grad()
    def _prefill(self, prompt: Tensor) -> tuple[Reals, Reals, Reals]:
        """Keys and values of the prompt, with room for the answer, and the logits after it."""
        layers, config, count = self.model.model.layers, self.model.config, prompt.shape[1]
        shape = (len(layers), config.num_key_value_heads, self.longest, layers[0].self_attn.head_dim)
        keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        if cpu.has_amx():
            hidden = self.model.model.embed_tokens(prompt[0]).float().contiguous().numpy()
            rotation = self._cosines[:count], self._sines[:count]
            return keys, values, read_prompt(self._network, self._stored, hidden, keys, values, rotation)
        output = self.model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        for number, layer in enumerate(output.past_key_values.layers):
            keys[number, :, :count] = layer.keys[0].float().numpy()
            values[number, :, :count] = layer.values[0].float().numpy()
        return keys, values, output.logits[0, -1].float().numpy()

    def _read(self, form: FormatName) -> DecoderWeights:
        """The weights of the model, as the compiled step reads them."""
        config, body = self.model.config, self.model.model
        matrices: list[list[int]] = []
        norms: list[Tensor] = []
        head_norms: list[Tensor] = []
        for layer in body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            matrices += [self._fields(part, form) for part in (*parts, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
            norms += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
            if hasattr(attention, "q_norm"):
                head_norms += [attention.q_norm.weight, attention.k_norm.weight]
        matrices.append(self._fields(self.model.lm_head, form))
        none = np.zeros((0, attention.head_dim), np.float32)
        return DecoderWeights(
            np.array(matrices, np.int64),
            torch.stack([*norms, body.norm.weight]).float().numpy(),
            torch.stack(head_norms).float().numpy() if head_norms else none,
            float(config.rms_norm_eps),
            int(config.num_attention_heads),
            float(attention.scaling),
        )

    def _fields(self, layer: nn.Module, form: FormatName) -> list[int]:
        """The fields of one matrix for the compiled step."""
        module = layer if isinstance(layer, StoredLinear) else stored(layer, form)
        matrix = module.matrix
        addresses, kept = addresses_of(matrix, cpu.level())
        bias = None if module.bias is None else module.bias.detach().float().contiguous()
        self._kept += kept if bias is None else [*kept, bias]
        self._stored.append(module)
        place = 0 if bias is None else bias.data_ptr()
        return [*addresses, matrix.rows, matrix.columns, CODES[matrix.format], place]

    def _memory(self) -> StepBuffers:
        """Memory for the vectors of a step."""
        matrices = self._network.matrices
        rows, widest = matrices[:, 8], 64 * int(matrices[:, 7].max())

        def vector(size: int) -> Reals:
            return np.zeros(int(size), np.float32)

        hidden = self._network.norms.shape[1]
        queries, keys, values, gate, up = (vector(rows[part]) for part in (0, 1, 2, 4, 5))
        reals, narrow = np.zeros((1, widest), np.float32), np.zeros((1, widest), np.uint8)
        vectors = (vector(hidden), vector(hidden), queries, keys, values, gate, up)
        return StepBuffers(*vectors, reals, narrow, vector(1), vector(self.longest))


# ---- Greedy generation, by the fastest way that a model allows


def generated(
    model: nn.Module, prompt: Tensor, tokens: int, stop: tuple[int, ...] = (), form: FormatName | None = None
) -> Iterator[int]:
    """Yield the most likely next tokens of a causal model of transformers.

    Args:
        model: the model, dense or after `iobs.accelerate`.
        prompt: token ids, (1, length).
        tokens: greatest number of new tokens.
        stop: ids that end the text; they are yielded too.
        form: format of the layers that stayed dense. Each token is one compiled call, if the model allows it (see
            `decodable.undecodable`) and attends to the whole text. None: the model computes each token itself.

    Raises:
        ProblemError: the prompt is empty, or of another shape.
    """
    require_prompt(prompt)
    length = prompt.shape[1] + tokens
    if form is not None and undecodable(model) is None and length <= most_tokens(model):
        decoder = Decoder(model, length, form)
        yield from decoder.generate(prompt, tokens, stop)
        return
    yield from _by_modules(model, prompt, tokens, stop)


def _by_modules(model: nn.Module, prompt: Tensor, tokens: int, stop: tuple[int, ...]) -> Iterator[int]:
    """Tokens computed by the modules of the model."""
    ids, past = prompt, None
    for _ in range(tokens):
        with torch.no_grad():
            output = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        token, past = int(output.logits[0, -1].argmax()), output.past_key_values
        yield token
        if token in stop:
            return
        ids = torch.tensor([[token]], device=prompt.device)
