"""A nemotron-nas model: the Llama of transformers, each layer with its own widths."""

from __future__ import annotations

from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

from .configuration_decilm import DeciLMConfig


class DeciLMForCausalLM(LlamaForCausalLM):
    """A Llama whose layers have the widths of `block_configs`."""

    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig):
        """Build the layers from a configuration."""
        super().__init__(config)
        for number in range(config.num_hidden_layers):
            layer = LlamaDecoderLayer(config.of_layer(number), number)
            layer.self_attn.config = config  # the one in which the kind of attention is chosen
            self.model.layers[number] = layer
        self.post_init()
