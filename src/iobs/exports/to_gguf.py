"""GGUF: files that llama.cpp and its relatives run.

A matrix becomes F32, F16, BF16, Q8_0 or Q4_0. Q8_0 and Q4_0 have a scale of 16 bits for every 32 columns and no offset,
so that a zero stays a zero. Other types of GGUF have offsets, or are not symmetric, and are not written.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from iobs.errors import ModelError
from iobs.exports.gguf_vocabulary import write_vocabulary
from iobs.exports.record import Written
from iobs.exports.requirements import Foreign, needed
from iobs.exports.source import Source
from iobs.exports.values import Codes, codes_of, exact_codes

FILE = "model.gguf"
_BLOCK = 32
_FIRST = "model.layers.0."  # prefix of the names of the first layer's parameters
# Name of the architecture in llama.cpp, by the model_type of transformers.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
_FILE_TYPES["Q4_0"] = "MOSTLY_Q4_0"


def write_gguf(source: Source, directory: Path) -> list[Written]:
    """Write model.gguf: weights, configuration and tokenizer of a llama-like language model.

    Raises:
        ModelError: gguf is not installed, or llama.cpp has no form for this model, its positions or its tokenizer.
    """
    gguf = needed("gguf", "gguf")
    config = _checked(source)
    writer = gguf.GGUFWriter(directory / FILE, _ARCHITECTURES[config.model_type])
    _write_configuration(writer, config)
    write_vocabulary(writer, gguf, source.model.require_tokenizer(), config.vocab_size)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[_ARCHITECTURES[config.model_type].upper()], config.num_hidden_layers
    )
    written: list[Written] = []
    matrices = source.matrices()
    types: list[str] = []
    for name, weight in _parameters(source):
        layer = name in matrices
        kind, data, after = _stored(weight, source.bits if layer or source.bits == 32 else None, layer)
        if layer:
            written.append(Written.of(name, kind, weight, after))
            types.append(kind)
        data = _llama_order(name, data, config)
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise ModelError(f"llama.cpp has no place for the weight {name!r}; export to another target.")
        writer.add_tensor(own, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    most = max(sorted(set(types)), key=types.count)
    writer.add_file_type(int(gguf.LlamaFileType[_FILE_TYPES[most]]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _finish(writer)
    return written


def _finish(writer: Foreign) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _checked(source: Source) -> Foreign:
    """The configuration of a model that llama.cpp can run.

    Raises:
        ModelError: it cannot.
    """
    config = getattr(source.module, "config", None)
    kind = getattr(config, "model_type", type(source.module).__name__)
    if kind not in _ARCHITECTURES or source.model.task not in ("causal-lm", "other") or config is None:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"An export to gguf knows language models of the kinds {known}, not {kind!r}; try onnx.")
    if source.model.task == "other":
        raise ModelError("A gguf file holds the tokenizer too: give the directory, or the LoadedModel of iobs.load.")
    if config.hidden_act != "silu":
        raise ModelError(f"llama.cpp computes silu in such a model, not {config.hidden_act}; try onnx.")
    _require_equal_widths(source.module, config.num_hidden_layers, config.intermediate_size)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"Positions of the kind {rope['rope_type']!r} cannot be exported to gguf yet; try onnx.")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if sliding or (kind == "mistral" and getattr(config, "sliding_window", None)):
        raise ModelError("Attention in a sliding window cannot be exported to gguf yet; try onnx.")
    return config


def _require_equal_widths(module: nn.Module, layers: int, width: int) -> None:
    """Check that all layers have the shapes of the first, and its MLP that of the configuration: a file has one number.

    Raises:
        ModelError: they do not.
    """
    shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
    first = {name: shape for name, shape in shapes.items() if name.startswith(_FIRST)}
    alike = all(
        shapes.get(name.replace(_FIRST, f"model.layers.{number}.", 1)) == shape
        for name, shape in first.items()
        for number in range(layers)
    )
    if not alike or first[f"{_FIRST}mlp.gate_proj.weight"][0] != width:
        raise ModelError("A gguf file has one width for all layers, and these layers have several; try onnx.")


def _write_configuration(writer: Foreign, config: Foreign) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_vocab_size(config.vocab_size)


def _parameters(source: Source) -> Iterator[tuple[str, Tensor]]:
    """Parameters by name, a tied head left out: llama.cpp uses the embedding in its place."""
    for name, parameter in source.module.named_parameters():
        yield name, parameter.detach().cpu()


def _stored(weight: Tensor, bits: int | None, layer: bool) -> tuple[str, np.ndarray, Tensor]:
    """The type of a tensor in the file, its bytes as an array, and the values that a reader computes."""
    if weight.ndim < 2:
        return "F32", weight.float().numpy(), weight.float()
    found = _quantised(weight, bits) if layer else None
    if found is not None:
        kind = "Q4_0" if found.bits == 4 else "Q8_0"
        return kind, _blocks(found), found.weight
    if bits == 32:
        return "F32", weight.float().numpy(), weight.float()
    if weight.dtype == torch.bfloat16:
        return "BF16", weight.contiguous().view(torch.uint8).numpy(), weight
    half = weight.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise ModelError("A weight is too large for float16; export with 32 bits.")
    return "F16", half.numpy(), half


def _quantised(weight: Tensor, bits: int | None) -> Codes | None:
    """The codes of a matrix in blocks of 32 columns, or None where it keeps its floating point numbers."""
    if weight.shape[1] % _BLOCK:
        return None
    if bits is None:
        return exact_codes(weight, 4, _BLOCK) or exact_codes(weight, 8, _BLOCK)
    return codes_of(weight, bits, _BLOCK) if bits in (4, 8) else None


def _blocks(found: Codes) -> np.ndarray:
    """Rows of blocks as bytes: the float16 scale, then 32 codes; two codes of 4 bits plus 8 share a byte."""
    rows, columns = found.codes.shape
    codes = found.codes.numpy().reshape(rows, columns // _BLOCK, _BLOCK)
    scales = found.scales.numpy().astype(np.float16)[:, :, None].view(np.uint8)
    if found.bits == 4:
        shifted = (codes + 8).astype(np.uint8)
        data = shifted[:, :, : _BLOCK // 2] | (shifted[:, :, _BLOCK // 2 :] << 4)
    else:
        data = codes.view(np.uint8)
    return np.concatenate([scales, data], axis=2).reshape(rows, -1)


def _llama_order(name: str, data: np.ndarray, config: Foreign) -> np.ndarray:
    """The rows of queries and keys in the order of llama.cpp, which rotates neighbouring pairs instead of halves."""
    if _ARCHITECTURES[config.model_type] != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return data
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    halves = data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
