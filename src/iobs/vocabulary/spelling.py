"""Tokens of a tokenizer.json: how the others spell a removed one, which must stay, and the file without the removed.

A class for each kind of tokenizer: byte-pair encoding, unigram, WordPiece. Removal never makes a text unreadable:

- All tokens of one symbol stay: bytes, or characters. Characters that a tokenizer can also spell in bytes may go.
- Byte-pair encoding builds a token from two others by a merge. A token stays as long as a token that is built from it.
  A kept token is then built by the same merges as before: the merge of lowest rank at each step is still there.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

from iobs.errors import ModelError

JsonObject = dict[str, Any]
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"  # stands for a space in SentencePiece; decoders put spaces in its place before they join bytes


class Spelling(ABC):
    """Tokens of the model in a tokenizer.json.

    Args:
        section: the section "model" of the file.

    Attributes:
        tokens: id of each token.
        in_bytes: characters without a token are spelled in bytes.
    """

    def __init__(self, section: JsonObject) -> None:
        self.section = section
        self.tokens = self._tokens()
        fallback = bool(section.get("byte_fallback"))
        self.in_bytes = fallback and all(f"<0x{byte:02X}>" in self.tokens for byte in range(256))

    def must_stay(self, token: str) -> bool:
        """True if some text could not be encoded without a token."""
        if token == self.unknown or (self.in_bytes and _BYTE.fullmatch(token)):
            return True
        symbols = self.symbols(token)
        if len(symbols) == 1:
            return not self.in_bytes or token.isascii() or token == _SPACE
        return not self.in_bytes and not all(symbol in self.tokens for symbol in symbols)

    @property
    def unknown(self) -> str | None:
        """The token in place of symbols without a token."""
        return self.section.get("unk_token")

    def symbols(self, token: str) -> list[str]:
        """The tokens of one symbol that spell a token; the vocabulary may lack some."""
        return [*token]

    def parts(self, token: str) -> list[str]:
        """The two tokens that a token is built from, and cannot be without; empty if it needs no others."""
        return []

    @abstractmethod
    def spelled(self, token: str, kept: Collection[str]) -> list[str]:
        """The tokens that stand in a text for a token that is removed.

        Args:
            token: the token.
            kept: tokens that may be used; `token` is not used, even if it is among them.
        """

    def reduced(self, numbers: Mapping[str, int]) -> JsonObject:
        """The section of a tokenizer with some of the tokens.

        Args:
            numbers: new id of each kept token.
        """
        kept = {token: numbers[token] for token in self.tokens if token in numbers}
        return {**self.section, "vocab": kept}

    def _tokens(self) -> dict[str, int]:
        return dict(self.section["vocab"])

    def _bytes_of(self, character: str) -> list[str]:
        return [f"<0x{byte:02X}>" for byte in character.encode()]


class BytePairs(Spelling):
    """Byte-pair encoding: a token is built by merges of two tokens, the merge of lowest rank first."""

    def __init__(self, section: JsonObject) -> None:
        super().__init__(section)
        if section.get("continuing_subword_prefix"):
            raise ModelError(
                "Byte-pair tokens with a prefix for the middle of a word cannot be removed; choose WordPiece."
            )
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in section["merges"]]
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}

    def symbols(self, token: str) -> list[str]:
        """The characters of a token; the last one with the suffix of the end of a word, if there is one."""
        suffix = self.section.get("end_of_word_suffix") or ""
        body = token.removesuffix(suffix)
        return [*token] if body == token or not body else [*body[:-1], body[-1] + suffix]

    def parts(self, token: str) -> list[str]:
        """The two tokens of the last merge; empty if merges do not end in the token."""
        pieces = self.spelled(token, ())
        return pieces if tuple(pieces) in self._ranks else []

    def spelled(self, token: str, kept: Collection[str]) -> list[str]:
        """The two tokens of the last merge; others if merges do not end in the token."""
        symbols = self.symbols(token)
        if len(symbols) == 1:
            return self._bytes_of(token) if self.in_bytes else []
        while len(symbols) > 2:
            rank, at = min((self._ranks.get(pair, math.inf), at) for at, pair in enumerate(pairwise(symbols)))
            if rank == math.inf:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return symbols

    def reduced(self, numbers: Mapping[str, int]) -> JsonObject:
        """The section with the merges of which both parts and the result are kept."""
        merges = [[*pair] for pair in self._ranks if {*pair, "".join(pair)} <= numbers.keys()]
        return {**super().reduced(numbers), "merges": merges}


class Unigram(Spelling):
    """Unigram: the spelling of a text is the one with the largest sum of the scores of its tokens."""

    @property
    def unknown(self) -> str | None:
        """The token in place of symbols without a token."""
        number = self.section.get("unk_id")
        return None if number is None else str(self.section["vocab"][number][0])

    def _tokens(self) -> dict[str, int]:
        return {token: number for number, (token, _) in enumerate(self.section["vocab"])}

    def spelled(self, token: str, kept: Collection[str]) -> list[str]:
        """The best other spelling, by dynamic programming over its ends."""
        scores = self.section["vocab"]
        best: list[tuple[float, list[str]]] = [(0.0, [])]
        for end in range(1, len(token) + 1):
            options = [(best[end - 1][0] + self._unknown_score, best[end - 1][1] + self._bytes_of(token[end - 1]))]
            for start in range(end):
                piece = token[start:end]
                if piece != token and piece in kept:
                    options.append((best[start][0] + scores[self.tokens[piece]][1], [*best[start][1], piece]))
            best.append(max(options, key=lambda option: option[0]))
        return best[-1][1]

    @cached_property
    def _unknown_score(self) -> float:
        """Score of a character without a token, spelled in bytes, as SentencePiece has it."""
        return min(score for _, score in self.section["vocab"]) - 10 if self.in_bytes else -math.inf

    def reduced(self, numbers: Mapping[str, int]) -> JsonObject:
        """The section with the kept tokens in their old order."""
        kept = [[token, score] for token, score in self.section["vocab"] if token in numbers]
        return {**self.section, "vocab": kept, "unk_id": None if self.unknown is None else numbers[self.unknown]}


class WordPiece(Spelling):
    """WordPiece: the longest token that begins the rest of a word comes next."""

    def symbols(self, token: str) -> list[str]:
        """Tokens of one character; all but that of a word's beginning with the prefix of the middle of a word."""
        prefix = self.section["continuing_subword_prefix"]
        body = token.removeprefix(prefix)
        first, rest = body[:1], body[1:]
        return [first if body == token else prefix + first, *(prefix + character for character in rest)]

    def spelled(self, token: str, kept: Collection[str]) -> list[str]:
        """The spelling of the word by the longest other tokens."""
        prefix = self.section["continuing_subword_prefix"]
        body = token.removeprefix(prefix)
        pieces: list[str] = []
        start = 0
        while start < len(body):
            marked = prefix if start or body != token else ""
            options = (marked + body[start:end] for end in range(len(body), start, -1))
            piece = next((option for option in options if option != token and option in kept), None)
            if piece is None:
                return []
            pieces.append(piece)
            start += len(piece) - len(marked)
        return pieces


KINDS: dict[str, type[Spelling]] = {"BPE": BytePairs, "Unigram": Unigram, "WordPiece": WordPiece}


def spelling_of(document: JsonObject) -> Spelling:
    """The tokens of a tokenizer.json.

    Raises:
        ModelError: its kind of tokenizer is not supported.
    """
    kind = document["model"]["type"]
    if kind not in KINDS:
        raise ModelError(f"Tokens of a {kind} tokenizer cannot be removed, only of {', '.join(KINDS)}.")
    return KINDS[kind](document["model"])


def reduced(document: JsonObject, spelling: Spelling, numbers: Mapping[str, int]) -> JsonObject:
    """The tokenizer.json with some of the tokens.

    Args:
        document: the file; its added tokens are all kept.
        spelling: its tokens.
        numbers: new id of each kept token, added tokens included.
    """
    added = [{**token, "id": numbers[token["content"]]} for token in document["added_tokens"]]
    padding = document.get("padding")
    return {
        **document,
        "added_tokens": added,
        "model": spelling.reduced(numbers),
        "post_processor": _renumbered(document["post_processor"], numbers),
        "padding": padding and {**padding, "pad_id": numbers[padding["pad_token"]]},
    }


def _renumbered(part: Any, numbers: Mapping[str, int]) -> Any:
    """A part of a post-processor: lists [token, id], and mappings with lists of tokens and of ids, get new ids."""
    if isinstance(part, dict):
        renewed = {name: _renumbered(value, numbers) for name, value in part.items()}
        if "tokens" in part and "ids" in part:
            renewed["ids"] = [numbers[token] for token in part["tokens"]]
        return renewed
    if isinstance(part, list):
        if len(part) == 2 and isinstance(part[0], str) and type(part[1]) is int:
            return [part[0], numbers[part[0]]]
        return [_renumbered(value, numbers) for value in part]
    return part
