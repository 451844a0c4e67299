"""A nemotron-nas model: the Llama of transformers, each layer with widths of its own.

A nemotron-nas directory holds a copy of this file, through which transformers and vLLM read it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM


class DeciLMConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """The configuration of a Llama whose layers have widths of their own.

    Attributes:
        block_configs: `attention` and `ffn` of each layer, with attributes, as vLLM reads them.
    """

    model_type = "nemotron-nas"

    def __init__(self, block_configs: Sequence[Mapping[str, Any] | SimpleNamespace] | None = None, **values: Any):
        """Create a configuration.

        Args:
            block_configs: of each layer, as the file has them: `attention` with `n_heads_in_group`, `ffn` with
                `ffn_mult`.
            **values: of `LlamaConfig`.
        """
        super().__init__(**values)
        self.block_configs = [
            block
            if isinstance(block, SimpleNamespace)
            else SimpleNamespace(**{part: SimpleNamespace(**fields) for part, fields in block.items()})
            for block in block_configs or ()
        ]

    def of_layer(self, number: int) -> DeciLMConfig:
        """A copy with the widths of one layer.

        Raises:
            ValueError: the layer has no attention or no MLP.
        """
        block, narrow = self.block_configs[number], copy.copy(self)
        if any(vars(part).get(key) for part in vars(block).values() for key in ("no_op", "replace_with_linear")):
            raise ValueError(f"layer {number} has no attention or no MLP; --trust-remote-code runs code that knows it")
        narrow.num_key_value_heads = self.num_attention_heads // block.attention.n_heads_in_group
        narrow.intermediate_size = -(-int(2 * block.ffn.ffn_mult * self.hidden_size / 3) // 256) * 256
        return narrow

    def to_dict(self) -> dict[str, Any]:
        """The values as plain numbers, texts and lists."""
        blocks = [{part: vars(fields) for part, fields in vars(block).items()} for block in self.block_configs]
        return {**super().to_dict(), "block_configs": blocks}


class DeciLMForCausalLM(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A Llama whose layers have the widths of `block_configs`."""

    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig):
        """Build the layers from a configuration."""
        super().__init__(config)
        for number in range(config.num_hidden_layers):
            layer = LlamaDecoderLayer(config.of_layer(number), number)
            layer.self_attn.config = config  # the one in which the kind of attention is chosen
            self.model.layers[number] = layer
        self.post_init()  # type: ignore[no-untyped-call]
