"""nemotron-nas: a model directory whose configuration has widths for each layer, in `block_configs`.

All layers have hidden_size / (width of a head) query heads there, in groups of `n_heads_in_group` around one head of
keys and values. The width of an MLP is 2/3 hidden_size `ffn_mult`, rounded up to a multiple of 256. Narrower layers are
filled up with heads and neurons of zeros, which add exactly nothing to the outputs.

Format: https://huggingface.co/nvidia/Llama-3_3-Nemotron-Super-49B-v1. The directory holds a copy of
models/modeling_decilm.py, through which transformers and vLLM read the configuration; mlx-lm needs none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from iobs.core.slices import is_exact
from iobs.errors import ModelError
from iobs.exports.source import (
    ExportSource,
    Foreign,
    LayerWidths,
    Written,
    head_width,
    require_llama_like,
    widths_of_layers,
)

_KINDS = ("llama", "mistral", "qwen2", "nemotron-nas")
_CODE = Path(__file__).parents[1] / "models" / "modeling_decilm.py"
_NEURONS = 256  # widths of MLPs are multiples of it
_ATTENTION = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}  # axis of the heads, by name of the layer
_MLP = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}  # axis of the neurons
_NORMS = ("input_layernorm", "post_attention_layernorm")
_COPIED = (
    *("attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "initializer_range"),
    *("max_position_embeddings", "num_hidden_layers", "pad_token_id", "rms_norm_eps", "tie_word_embeddings"),
    *("use_cache", "vocab_size"),
)


@dataclass(frozen=True)
class _LayerForm:
    """One layer in the layout.

    Attributes:
        before: the widths of the model.
        heads: query heads of the layout, the same number in all layers.
        group: query heads of one head of keys and values.
        neurons: width of the MLP, a multiple of 256.
        width: columns of one head.
    """

    before: LayerWidths
    heads: int
    group: int
    neurons: int
    width: int

    def config(self, hidden: int) -> dict[str, dict[str, object]]:
        """The entry of `block_configs`; every field of the layout, since some readers ask for each."""
        same = {"no_op": False, "replace_with_linear": False, "sparsify": None}
        sinks = {"window_length": None, "num_sink_tokens": None, "unshifted_sink": False}
        sinks["use_prefill_window_in_sink_attention"] = False
        return {
            "attention": {**same, "n_heads_in_group": self.group, **sinks},
            "ffn": {**same, "ffn_mult": round(3 * self.neurons / (2 * hidden), 6)},  # readers round it so too
        }

    def filled(self, layer: str, value: Tensor, is_bias: bool) -> Tensor:
        """A weight or bias of a linear layer in the shape of the layout, with zeros in the new places."""
        axis = {**_ATTENTION, **_MLP}[layer]
        if is_bias and axis:
            return value  # of the outputs, whose number stays
        if layer in _MLP:
            return _longer(value, axis, self.neurons)
        if layer in ("k_proj", "v_proj"):
            return _longer(value, axis, self.heads // self.group * self.width)
        groups = value.tensor_split(self.before.kv_heads, axis)  # each stays with its keys
        wider = torch.cat([_longer(group, axis, self.group * self.width) for group in groups], axis)
        return _longer(wider, axis, self.heads * self.width)


def write_nemotron_nas(source: ExportSource, directory: Path) -> list[Written]:
    """Write the weights, a config.json with `block_configs`, the code that reads it, and the tokenizer.

    Raises:
        ModelError: the layout has no form for this model.
    """
    from huggingface_hub import save_torch_state_dict

    config, blocks = require_nemotron_nas(source)
    state = {name: value.detach().cpu() for name, value in source.module.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    dtype = _dtype(state, source.bits)
    filled = {name: _filled(name, value.to(dtype), blocks) for name, value in state.items()}
    biases = _with_missing_biases(filled)
    save_torch_state_dict(filled, directory, metadata={"format": "pt"})
    _write_configuration(directory, config, blocks, biases, dtype)
    shutil.copyfile(_CODE, directory / _CODE.name)
    source.copy_files(directory)
    form = str(dtype).removeprefix("torch.")
    written = []
    for matrix in source.matrices():
        record = matrix.written(form, matrix.weight.to(dtype))
        written.append(replace(record, added=filled[matrix.name].numel() - record.entries))
    return written


def require_nemotron_nas(source: ExportSource) -> tuple[Foreign, list[_LayerForm]]:
    """The configuration of a model, and its layers in the layout.

    Raises:
        ModelError: the layout has no form for this model.
    """
    config = require_llama_like(source, "nemotron-nas", _KINDS, ("default", "llama3"))
    blocks = _blocks(config, widths_of_layers(source.module, config))
    for name in source.module.state_dict():
        _require_place(name)
    return config, blocks


def _blocks(config: Foreign, widths: Sequence[LayerWidths]) -> list[_LayerForm]:
    """All layers in the layout.

    Raises:
        ModelError: it has no form for them.
    """
    width = head_width(config)
    heads, rest = divmod(config.hidden_size, width)
    if rest or any(layer.heads > heads for layer in widths):
        raise ModelError(
            f"nemotron-nas has hidden_size / {width} query heads in all layers, hidden_size is {config.hidden_size}, "
            f"and this model has {max(layer.heads for layer in widths)}; try gguf or onnx."
        )
    return [
        _LayerForm(layer, heads, _group(number, layer, heads), -(-layer.neurons // _NEURONS) * _NEURONS, width)
        for number, layer in enumerate(widths)
    ]


def _group(number: int, layer: LayerWidths, heads: int) -> int:
    """The most query heads of one head of keys and values with which the layout holds a layer: the fewest keys.

    Raises:
        ModelError: there is no such number.
    """
    least = layer.heads // layer.kv_heads
    for group in range(heads // layer.kv_heads, least - 1, -1):
        if heads % group == 0:
            return group
    raise ModelError(
        f"nemotron-nas cannot hold layer {number}: its {layer.heads} query heads and {layer.kv_heads} heads of keys do "
        f"not fit into equal groups of {heads} query heads; try gguf or onnx."
    )


def _require_place(name: str) -> None:
    """Raise unless the layout has a place for a weight.

    Raises:
        ModelError: it has none.
    """
    *path, layer, kind = name.split(".")
    inside = path[:2] == ["model", "layers"] and (
        (layer in _ATTENTION and path[3:] == ["self_attn"])
        or (layer in _MLP and path[3:] == ["mlp"])
        or (layer in _NORMS and kind == "weight")
    )
    if not inside and name not in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        raise ModelError(f"nemotron-nas has no place for the weight {name!r}; try onnx.")


def _dtype(state: Mapping[str, Tensor], bits: int | None) -> torch.dtype:
    """The dtype of all weights: 16 bits if matrices have them, if they hold all exactly, or if that is asked."""
    stored = state["model.embed_tokens.weight"].dtype
    if bits is None and stored.itemsize == 2:
        return stored
    for dtype in (torch.bfloat16, torch.float16) if bits != 32 else ():
        if all(is_exact(value, dtype) for value in state.values()):
            return dtype
    return torch.bfloat16 if bits == 16 else torch.float32


def _filled(name: str, value: Tensor, blocks: Sequence[_LayerForm]) -> Tensor:
    """A weight or bias in the shape of the layout."""
    *path, layer, kind = name.split(".")
    if layer not in {**_ATTENTION, **_MLP}:
        return value
    return blocks[int(path[2])].filled(layer, value, kind == "bias").contiguous()


def _with_missing_biases(state: dict[str, Tensor]) -> dict[str, bool]:
    """Add biases of zeros where other layers of attentions or MLPs have one; True for those that have, by field."""
    biased = {}
    for key, layers in (("attention_bias", _ATTENTION), ("mlp_bias", _MLP)):
        weights = [name for name in state if name.split(".")[-2] in layers and name.endswith(".weight")]
        names = {name: name.removesuffix("weight") + "bias" for name in weights}
        biased[key] = any(bias in state for bias in names.values())
        for name, bias in names.items() if biased[key] else ():
            state.setdefault(bias, state[name].new_zeros(state[name].shape[0]))
    return biased


def _write_configuration(
    directory: Path, config: Foreign, blocks: Sequence[_LayerForm], biases: Mapping[str, bool], dtype: torch.dtype
) -> None:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta, name = rope.pop("rope_theta", 10000.0), str(dtype).removeprefix("torch.")
    values = {
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_decilm.DeciLMConfig",
            "AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM",
        },
        "model_type": "nemotron-nas",
        **{key: getattr(config, key, None) for key in _COPIED},
        **biases,
        "o_proj_bias": biases["attention_bias"],  # some releases of NVIDIA's code tell it apart
        "num_attention_heads": blocks[0].heads,
        "head_dim": blocks[0].width,
        # The largest, for readers that estimate memory; each layer has its own below.
        "num_key_value_heads": max(block.heads // block.group for block in blocks),
        "intermediate_size": max(block.neurons for block in blocks),
        "rope_theta": theta,
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        "dtype": name,
        "torch_dtype": name,
        "block_configs": [block.config(config.hidden_size) for block in blocks],
    }
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf8")


def _longer(value: Tensor, axis: int, size: int) -> Tensor:
    """A tensor with zeros behind its entries along an axis."""
    shape = list(value.shape)
    shape[axis] = size
    longer = value.new_zeros(shape)
    longer.narrow(axis, 0, value.shape[axis]).copy_(value)
    return longer
