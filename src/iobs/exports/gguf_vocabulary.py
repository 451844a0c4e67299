"""Tokenizers in GGUF files, for the two kinds of byte pair encoding that llama.cpp runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import ModuleType

from iobs.errors import ModelError
from iobs.exports.requirements import Foreign
from iobs.models import Tokenizer

_BYTE = re.compile(r"^<0x[0-9A-F]{2}>$")
_NO_MERGE = -1e6  # score of a token that no merge makes
# Splits of the text before byte pairs are merged, by a part of their regular expression that no other one has.
_SPLITS = {r"\p{N}{1,3}": "llama-bpe", r"\p{N}| ?[^\s\p{L}\p{N}]+": "qwen2"}

Json = Mapping[str, "Json"] | Sequence["Json"] | str | int | bool | None


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
    """Check that the tokenizer puts a space before the text."""
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
