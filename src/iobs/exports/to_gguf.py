"""GGUF: files that llama.cpp and its relatives run.

A model whose layers have several widths takes the architecture "deci", which has numbers of heads and neurons for
each layer. Every other one takes the architecture of its kind.

A matrix becomes F32, F16, BF16, Q8_0 or Q4_0. Q8_0 and Q4_0 have a scale of 16 bits for every 32 columns and no offset,
so that a zero stays a zero. Other types of GGUF have offsets, or are not symmetric, and are not written.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from iobs.errors import ModelError
from iobs.exports.source import (
    Codes,
    ExportSource,
    Foreign,
    LayerWidths,
    Written,
    codes_of,
    exact_codes,
    head_width,
    needed,
    require_llama_like,
    widths_of_layers,
)
from iobs.models import Tokenizer

FILE = "model.gguf"
_BLOCK = 32
# Name of the architecture in llama.cpp, by the model_type of transformers.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "nemotron-nas": "llama"}
_UNEQUAL = "deci"  # the architecture of layers of several widths
_PAIRED = ("llama", _UNEQUAL)  # architectures that rotate neighbouring pairs of columns
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
_FILE_TYPES["Q4_0"] = "MOSTLY_Q4_0"
_BYTE = re.compile(r"^<0x[0-9A-F]{2}>$")
_NO_MERGE = -1e6  # score of a token that no merge makes
# Splits of the text before byte pairs are merged, by a part of their regular expression that no other one has.
_SPLITS = {r"\p{N}{1,3}": "llama-bpe", r"\p{N}| ?[^\s\p{L}\p{N}]+": "qwen2"}

Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | bool | None


def write_gguf(source: ExportSource, directory: Path) -> list[Written]:
    """Write model.gguf: weights, configuration and tokenizer of a llama-like language model.

    Raises:
        ModelError: gguf is not installed, or llama.cpp has no form for this model, its positions or its tokenizer.
    """
    gguf = needed("gguf", "gguf")
    config = _checked(source)
    widths = widths_of_layers(source.module, config)
    architecture = _architecture(config, widths)
    writer = gguf.GGUFWriter(directory / FILE, architecture)
    _write_configuration(writer, config, widths)
    write_vocabulary(writer, gguf, source.model.require_tokenizer(), config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    matrices = {matrix.name: matrix for matrix in source.matrices()}
    written: list[Written] = []
    for name, parameter in source.module.named_parameters():  # a tied head once: llama.cpp uses the embedding for it
        weight, matrix = parameter.detach().cpu(), matrices.get(name)
        kind, data, after = _stored(weight, source.bits if matrix or source.bits == 32 else None, matrix is not None)
        if matrix is not None:
            written.append(matrix.written(kind, after))
        llama_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if llama_name is None:
            raise ModelError(f"llama.cpp has no place for the weight {name!r}; export to another target.")
        if architecture in _PAIRED and (".q_proj." in name or ".k_proj." in name):
            data = _in_pairs(data, head_width(config))
        writer.add_tensor(llama_name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    types = [matrix.form for matrix in written]
    most = max(sorted(set(types)), key=types.count)
    writer.add_file_type(int(gguf.LlamaFileType[_FILE_TYPES[most]]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _checked(source: ExportSource) -> Foreign:
    """The configuration of a model that llama.cpp can run.

    Raises:
        ModelError: it cannot.
    """
    config = require_llama_like(source, "gguf", _ARCHITECTURES, ("default",))
    if source.model.task == "other":
        raise ModelError("A gguf file holds the tokenizer too: give the directory, or the LoadedModel of iobs.load.")
    return config


def _architecture(config: Foreign, widths: Sequence[LayerWidths]) -> str:
    """The architecture of llama.cpp that has the model's widths.

    Raises:
        ModelError: there is none.
    """
    if len(set(widths)) == 1:
        return _ARCHITECTURES[config.model_type]
    if config.model_type == "qwen3":
        raise ModelError(
            "llama.cpp has one width for all layers of a model with norms of queries and keys, and these layers have "
            "several; remove units with equal widths (uniform=True), or try onnx."
        )
    return _UNEQUAL


def _write_configuration(writer: Foreign, config: Foreign, widths: Sequence[LayerWidths]) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    width = head_width(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(_one_or_each([layer.neurons for layer in widths]))
    writer.add_head_count(_one_or_each([layer.heads for layer in widths]))
    writer.add_head_count_kv(_one_or_each([layer.kv_heads for layer in widths]))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_vocab_size(config.vocab_size)


def _one_or_each(numbers: list[int]) -> int | list[int]:
    """The number of all layers if they have the same, else one for each layer."""
    return numbers if len(set(numbers)) > 1 else numbers[0]


def _stored(weight: Tensor, bits: int | None, layer: bool) -> tuple[str, np.ndarray, Tensor]:
    """The type of a tensor in the file, its bytes as an array, and the values that a reader computes."""
    if weight.ndim < 2:
        return "F32", weight.float().numpy(), weight.float()
    codes = _quantised(weight, bits) if layer else None
    if codes is not None:
        return "Q4_0" if codes.bits == 4 else "Q8_0", _blocks(codes), codes.weight
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


def _blocks(matrix: Codes) -> np.ndarray:
    """Rows of blocks as bytes: the float16 scale, then 32 codes; two codes of 4 bits plus 8 share a byte."""
    rows, columns = matrix.codes.shape
    codes = matrix.codes.numpy().reshape(rows, columns // _BLOCK, _BLOCK)
    scales = matrix.scales.numpy().astype(np.float16)[:, :, None].view(np.uint8)
    if matrix.bits == 4:
        shifted = (codes + 8).astype(np.uint8)
        data = shifted[:, :, : _BLOCK // 2] | (shifted[:, :, _BLOCK // 2 :] << 4)
    else:
        data = codes.view(np.uint8)
    return np.concatenate([scales, data], axis=2).reshape(rows, -1)


def _in_pairs(data: np.ndarray, width: int) -> np.ndarray:
    """The rows of queries or keys in the order of llama.cpp, which rotates neighbouring pairs instead of halves."""
    halves = data.reshape(-1, 2, width // 2, *data.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))


def write_vocabulary(writer: Foreign, gguf: ModuleType, tokenizer: Tokenizer, size: int) -> None:
    """Write the tokens, their scores or merges, and the special tokens.

    Args:
        writer: the open writer of gguf.
        gguf: the package.
        tokenizer: a fast tokenizer of transformers.
        size: number of rows of the embedding; numbers without a token get placeholders.

    Raises:
        ModelError: llama.cpp does not know this kind of tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError("An export to gguf needs a tokenizer with tokenizer.json; this one has none.")
    whole = json.loads(backend.to_str())
    model = whole["model"]
    if model.get("type") != "BPE":
        raise ModelError(
            f"llama.cpp gets byte pair encodings from here, not a tokenizer of the kind {model['type']!r}."
        )
    tokens, kinds = _tokens(whole, size, gguf.TokenType)
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    if model.get("byte_fallback"):
        rank = {"".join(pair): -float(place) for place, pair in reversed([*enumerate(merges)])}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([rank.get(token, _NO_MERGE) for token in tokens])
        writer.add_add_space_prefix(_adds_space(whole))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split(whole))
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_types(kinds)
    first = tokenizer(["a"], verbose=False)["input_ids"][0][0]
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(first == getattr(tokenizer, "bos_token_id", None))
    writer.add_add_eos_token(False)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)


def _tokens(whole: Mapping[str, Json], size: int, kind: Foreign) -> tuple[list[str], list[int]]:
    """All tokens in the order of their numbers, and the kind of each; `kind` is the enumeration of gguf."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [int(kind.UNUSED)] * size
    model, added = whole["model"], whole.get("added_tokens")
    assert isinstance(model, Mapping)
    assert isinstance(added, Sequence)
    vocabulary = model["vocab"]
    assert isinstance(vocabulary, Mapping)
    for piece, place in vocabulary.items():
        assert isinstance(place, int)
        _require(place, size)
        byte = bool(_BYTE.match(piece)) and bool(model.get("byte_fallback"))
        tokens[place], kinds[place] = piece, int(kind.BYTE if byte else kind.NORMAL)
    for entry in added:
        assert isinstance(entry, Mapping)
        number, content = entry["id"], entry["content"]
        assert isinstance(number, int)
        assert isinstance(content, str)
        _require(number, size)
        unknown = content == model.get("unk_token")
        special = kind.UNKNOWN if unknown else kind.CONTROL if entry.get("special") else kind.USER_DEFINED
        tokens[number], kinds[number] = content, int(special)
    return tokens, kinds


def _require(number: int, size: int) -> None:
    if number >= size:
        raise ModelError(f"The tokenizer has a token of number {number}, and the embedding has {size} rows.")


def _adds_space(whole: Mapping[str, Json]) -> bool:
    """True if the tokenizer puts a space before the text."""
    parts = json.dumps([whole.get("normalizer"), whole.get("pre_tokenizer")])
    return '"Prepend"' in parts or '"prepend_scheme": "always"' in parts or '"prepend_scheme": "first"' in parts


def _split(whole: Mapping[str, Json]) -> str:
    """The name in llama.cpp of the split of the text before bytes are merged.

    Raises:
        ModelError: the split is unknown.
    """
    parts = whole.get("pre_tokenizer")
    text = json.dumps(parts, ensure_ascii=False).replace("\\\\", "\\")
    for mark, name in _SPLITS.items():
        if mark in text:
            return name
    if isinstance(parts, Mapping) and parts.get("type") == "ByteLevel":
        return "gpt-2"
    raise ModelError("llama.cpp does not know how this tokenizer splits a text; export to another target.")
