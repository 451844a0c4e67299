"""Generation with a Llama-like network: the prompt by its modules, each new token by one call of compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from iobs.errors import ProblemError
from iobs.inference import cpu
from iobs.inference.decodable import CODES, LONGEST, CausalModel, most_tokens, undecodable
from iobs.inference.decode_step import FIELDS, DecoderWeights, StepBuffers, step
from iobs.inference.formats import BLOCK, FormatName
from iobs.inference.modules import StoredLinear, stored
from iobs.inference.product import addresses_of

Reals = NDArray[np.float32]
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
            `iobs.accelerate`. It computes the prompt.
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
        place = 0 if bias is None else bias.data_ptr()
        return [*addresses, matrix.rows, matrix.columns, CODES[matrix.format], place]

    def _memory(self) -> StepBuffers:
        """Memory for the vectors of a step."""
        matrices = self._network.matrices
        rows, widest = matrices[:, FIELDS.index("rows")], BLOCK * int(matrices[:, FIELDS.index("blocks")].max())

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
