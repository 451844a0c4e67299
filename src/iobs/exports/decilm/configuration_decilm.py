"""The configuration of a nemotron-nas model: widths of attention and MLP for each layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):
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
        """A copy with the widths of one layer."""
        block, own = self.block_configs[number], copy.copy(self)
        own.num_key_value_heads = self.num_attention_heads // block.attention.n_heads_in_group
        own.intermediate_size = -(-int(2 * block.ffn.ffn_mult * self.hidden_size / 3) // 256) * 256
        return own

    def to_dict(self) -> dict[str, Any]:
        """The values as plain numbers, texts and lists."""
        blocks = [{part: vars(fields) for part, fields in vars(block).items()} for block in self.block_configs]
        return {**super().to_dict(), "block_configs": blocks}
