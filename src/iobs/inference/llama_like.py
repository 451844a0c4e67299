"""Types of the parts of a Llama-like model of transformers that `Decoder` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class Config(Protocol):
    """Settings of the model."""

    max_position_embeddings: int
    vocab_size: int
    hidden_act: str
    rms_norm_eps: float
    num_attention_heads: int
    num_key_value_heads: int
    sliding_window: int | None
    use_sliding_window: bool
    output_attentions: bool
    output_hidden_states: bool


class Weighted(Protocol):
    """A module with one weight: a norm."""

    weight: Tensor


class Table(Protocol):
    """An embedding, dense or stored."""

    num_embeddings: int

    def __call__(self, numbers: Tensor) -> Tensor:
        """The rows of some tokens."""


class Attention(Protocol):
    """Self-attention; Qwen3 has norms of queries and keys too."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: Weighted
    k_norm: Weighted
    head_dim: int
    scaling: float


class Gated(Protocol):
    """The MLP."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module


class Layer(Protocol):
    """One decoder layer."""

    self_attn: Attention
    mlp: Gated
    input_layernorm: Weighted
    post_attention_layernorm: Weighted


class Rotary(Protocol):
    """Rotary embedding: cosines and sines (1, positions, head size)."""

    def __call__(self, given: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute them for positions (1, positions)."""


class Body(Protocol):
    """The model without its head."""

    layers: Sequence[Layer]
    embed_tokens: Table
    norm: Weighted
    rotary_emb: Rotary


class CachedLayer(Protocol):
    """Keys and values of one layer: (1, key heads, positions, head size).

    A layer with a sliding window alone has `cumulative_length`, the tokens that it has read, and `sliding_window`.
    """

    keys: Tensor
    values: Tensor
    dtype: torch.dtype
    is_initialized: bool
    cumulative_length: int
    sliding_window: int


class Cache(Protocol):
    """Keys and values of all layers."""

    layers: Sequence[CachedLayer]


class Output(Protocol):
    """The result of a forward pass; logits (1, positions, vocabulary)."""

    past_key_values: Cache
    logits: Tensor


class Model(Protocol):
    """The whole model."""

    config: Config
    model: Body
    lm_head: nn.Module

    def __call__(self, *, input_ids: Tensor, use_cache: bool, logits_to_keep: int) -> Output:
        """Compute the logits of the last positions."""
