"""Language models of llama's form, which several targets hold: what they require, and the widths of the layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from iobs.errors import ModelError
from iobs.exports.source import ExportSource, Foreign


@dataclass(frozen=True)
class LayerWidths:
    """The widths of one layer, as its weights have them; the configuration may have other ones.

    Attributes:
        heads: number of query heads.
        kv_heads: number of heads of keys and values.
        neurons: width of the MLP.
    """

    heads: int
    kv_heads: int
    neurons: int


def require_llama_like(
    source: ExportSource, target: str, kinds: Collection[str], positions: Collection[str]
) -> Foreign:
    """The configuration of a model of llama's form.

    Args:
        source: the model.
        target: name of the target, for the messages.
        kinds: the `model_type` that the target holds.
        positions: the kinds of rotary positions that the target holds.

    Raises:
        ModelError: it is another model, or one that the target cannot hold.
    """
    config = getattr(source.module, "config", None)
    kind = getattr(config, "model_type", type(source.module).__name__)
    if kind not in kinds or source.model.task not in ("causal-lm", "other") or config is None:
        known = ", ".join(kinds)
        raise ModelError(f"An export to {target} knows language models of the kinds {known}, not {kind!r}; try onnx.")
    if config.hidden_act != "silu":
        raise ModelError(f"Readers of {target} compute silu in such a model, not {config.hidden_act}; try onnx.")
    position = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if position not in positions:
        raise ModelError(f"Positions of the kind {position!r} cannot be exported to {target} yet; try onnx.")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if sliding or (kind == "mistral" and getattr(config, "sliding_window", None)):
        raise ModelError(f"Attention in a sliding window cannot be exported to {target} yet; try onnx.")
    return config


def head_width(config: Foreign) -> int:
    """Columns of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def widths_of_layers(module: nn.Module, config: Foreign) -> list[LayerWidths]:
    """The widths of all layers, from the shapes of their weights.

    Raises:
        ModelError: a layer has no attention or MLP of llama's form.
    """
    each = head_width(config)
    widths = []
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        try:
            attention = [module.get_parameter(f"{layer}.self_attn.{name}_proj.weight") for name in "qk"]
            neurons = module.get_parameter(f"{layer}.mlp.gate_proj.weight").shape[0]
        except AttributeError as error:
            raise ModelError(f"{layer} is no layer of llama's form ({error}); try onnx.") from error
        heads, kv_heads = (weight.shape[0] // each for weight in attention)
        widths.append(LayerWidths(heads, kv_heads, neurons))
    return widths
