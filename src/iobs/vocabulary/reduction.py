"""`iobs.reduce_vocabulary`: a language model and its tokenizer without the tokens that a corpus hardly uses."""

from __future__ import annotations

import json
import re
import tempfile
import time
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from iobs.core.files import expanded
from iobs.core.patterns import keep_count
from iobs.data import Batch, read_documents
from iobs.errors import AuditError, DataError, ModelError, PatternError, is_a, shown
from iobs.evaluate import Progress, bits_per_byte, no_progress
from iobs.models import LoadedModel, Tokenizer, load, parameter_count, size_in_bytes
from iobs.models.huggingface import is_tokenizer_file, load_tokenizer
from iobs.models.sixteen_bits import store_alike
from iobs.pruning.coverage import Coverage
from iobs.pruning.report import ComparisonLoss, RoundRecord
from iobs.pruning.runtime.memory import MemoryWatch
from iobs.pruning.samples import batches
from iobs.pruning.structure.expected import outputs_of, require_rebuilt
from iobs.pruning.structured_report import (
    CostRecord,
    PlannedCost,
    PlannedUnits,
    StructuredReport,
    UnitsPlan,
    WidthRecord,
)
from iobs.vocabulary.rows import embedding_of, named_ids, with_rows, write_rows
from iobs.vocabulary.spelling import JsonObject, Spelling, reduced, spelling_of

Corpus: TypeAlias = str | Path | Iterable[str] | Iterable[Batch]  # a file, texts, or batches with token ids

_PIECES = re.compile(r".{1,2000}(?=\s|$)|.{1,2000}", re.DOTALL)  # of a text, cut before a space where one is
_HELD_OUT = 10  # every tenth piece of the corpus is not counted, but scored
_TIMED = 8_000  # characters of held-out text whose score is timed for a dry run
_MOST_HELD_OUT = 100_000  # characters: about a minute of a model with 100 million weights
_FEW = 20  # tokens of a corpus for each token of the vocabulary; with fewer the rare tokens are chosen by chance
_PIECES_A_CALL = 64
_SIGNS = "\x00\x7f\t\r\n  a\u00e9 \u00df\u0416\u4e2d\u0e01 \U0001f600\u200d\u2581"  # of one to four bytes
_PROBED = 32  # tokens on which the outputs of the smaller model are compared with those of the model


def reduce_vocabulary(
    model: LoadedModel | str | Path,
    corpus: Corpus,
    keep: int | float,
    *,
    heldout: Corpus | None = None,
    length: int = 2048,
    progress: Progress = no_progress,
) -> tuple[LoadedModel, StructuredReport]:
    """Remove the tokens of a language model that a corpus uses least, from the tokenizer and from the model.

    Texts are encoded by the tokens that are left: every text still decodes to what it did. Rows of the embedding and of
    the output head are removed, no weight changes. The scores of kept tokens are those of the model for the same
    tokens. Special and added tokens stay, and single bytes; without tokens for bytes, single characters.

    Args:
        model: the model, its directory or its name; `model` itself is unchanged, and shares its other weights with the
            result. A model of `iobs.vocabulary.open_without_weights` is never in memory, and not measured.
        corpus: the path of a text file, texts, or calibration batches with `input_ids`.
        keep: number of tokens that stay, or their share, below 1.
        heldout: the same, on which bits per byte are measured; None: parts of the corpus that are not counted.
        length: tokens in a window of the measurement, at most the context of the model.
        progress: called with (windows done, total) of each of the two measurements.

    Returns:
        The smaller model, whose `save` writes the new tokenizer too, and the report. Perplexities of two vocabularies
        cannot be compared; the report has bits per byte.

    Raises:
        ModelError: the model has no tokenizer or no embedding, or is of a kind that is not supported.
        DataError: the corpus is empty, or cannot be read.
        PatternError: `keep` is all tokens or more, or fewer than must stay.
        AuditError: the smaller tokenizer or model gives something else; never seen.
    """
    loaded = model if isinstance(model, LoadedModel) else load(model)
    return VocabularyRemoval(loaded, corpus, keep, heldout).remove(length, progress)


class VocabularyRemoval:
    """The removal of tokens from a model: counts of a corpus, and the tokens that stay.

    Args: those of `reduce_vocabulary`.

    Attributes:
        rows: (tokens,) int64, old ids of the kept tokens; their new ids are their places.
        split: share of the corpus's tokens that are removed, so that others spell them.
        notes: sentences for the report.

    Raises: as `reduce_vocabulary`.
    """

    def __init__(
        self,
        model: LoadedModel,
        corpus: Corpus,
        keep: int | float,
        heldout: Corpus | None = None,
    ) -> None:
        self._began, self._memory = time.monotonic(), MemoryWatch(torch.device("cpu"))
        self.model, self.notes = model, list[str]()
        embedding_of(model.module)
        self._document = _document_of(model.require_tokenizer(), model.source)
        self._spelling = spelling_of(self._document)
        self._plain = _plain(self._document)
        self._ids = self._plain.get_vocab(with_added_tokens=True)
        count = _kept_count(keep, len(self._ids))
        pieces = _pieces(_texts(corpus, model.require_tokenizer()))
        texts_of_heldout = () if heldout is None else heldout
        self.heldout = [text for text in _texts(texts_of_heldout, model.require_tokenizer()) if text]
        counts = self._counted(pieces, divided=heldout is None)
        kept = self._chosen(counts, count)
        self.rows = torch.tensor(sorted(self._ids[token] for token in kept))
        self.tokens = int(counts.sum())
        self.split = 1 - int(counts[self.rows.numpy()].sum()) / self.tokens
        self._warn_of_few_tokens()

    def _counted(self, pieces: Iterator[str], divided: bool) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of times that the corpus has each token; if it is divided, every tenth piece is held out instead."""
        counts = np.zeros(max(self._ids.values()) + 1, np.int64)
        characters = number = 0

        def counted() -> Iterator[str]:
            nonlocal characters, number
            for number, piece in enumerate(pieces, 1):
                if divided and number % _HELD_OUT == 0 and characters < _MOST_HELD_OUT:
                    self.heldout.append(piece)
                    characters += len(piece)
                else:
                    yield piece

        stream = counted()
        while some := list(islice(stream, _PIECES_A_CALL)):
            encoded = self._plain.encode_batch_fast(some, add_special_tokens=False)
            ids = np.fromiter(chain.from_iterable(each.ids for each in encoded), np.int64)
            counts += np.bincount(ids, minlength=len(counts))
        if not counts.any():
            raise DataError(
                "The corpus of the vocabulary has no text; give texts of the kind that the model will read."
            )
        return counts

    def _chosen(self, counts: np.ndarray[Any, np.dtype[np.int64]], keep: int) -> set[str]:
        """The tokens that stay, added tokens included."""
        outside = self._ids.keys() - self._spelling.tokens.keys()
        used = {token: int(counts[number]) for token, number in self._spelling.tokens.items() if counts[number]}
        return choose(self._spelling, used, self._fixed(), keep - len(outside)).union(outside)

    def _fixed(self) -> set[str]:
        """Added tokens, and special tokens of the tokenizer and of the model."""
        named = named_ids(self.model.module) | {*getattr(self.model.tokenizer, "all_special_ids", ())}
        added = {token["content"] for token in self._document["added_tokens"]}
        return added | {token for token, number in self._ids.items() if number in named}

    def _warn_of_few_tokens(self) -> None:
        total = len(self._ids)
        if self.tokens < _FEW * total:
            self.notes.append(
                f"The corpus has {self.tokens:,} tokens, {self.tokens / total:.1f} for each of the {total:,} in the "
                f"vocabulary: which rare tokens stay is chance. {_FEW * total:,} tokens of text would be enough."
            )
            warnings.warn(self.notes[-1], stacklevel=4)

    def plan(self, length: int) -> UnitsPlan:
        """The removal and its time with windows of `length` tokens, as `iobs prune --dry-run` shows it."""
        name, total = self._name(), len(self._ids)
        least = self._least()
        before, after = parameter_count(self.model.module), parameter_count(with_rows(self.model.module, self.rows))
        return UnitsPlan(
            (PlannedUnits(name, "tokens", (name,), total, len(self.rows), least),),
            (PlannedCost("parameters", before, after, "of the whole network"),),
            (self.about_the_split(), *self.notes),
            seconds=self._seconds_of_scores(length),
        )

    def _seconds_of_scores(self, length: int) -> float | None:
        """Time of the scores before and after, from that of the first texts; None if none are measured."""
        if not self._scores_bits() or not self.heldout:
            return None
        sizes = list(accumulate(map(len, self.heldout)))
        few = 1 + bisect_left(sizes[:-1], _TIMED)
        began = time.perf_counter()
        bits_per_byte(self.model, self.heldout[:few], self.model.window_length(length))
        return 2 * (time.perf_counter() - began) * sizes[-1] / sizes[few - 1]

    def _scores_bits(self) -> bool:
        """True if the model can be scored: a causal language model in memory."""
        return self.model.task == "causal-lm" and not _is_empty(self.model)

    def _least(self) -> int:
        """The number of tokens that must stay."""
        fixed = self._fixed()
        return sum(token in fixed or self._spelling.must_stay(token) for token in self._ids)

    def remove(self, length: int, progress: Progress) -> tuple[LoadedModel, StructuredReport]:
        """The smaller model and the report; arguments and errors are those of `reduce_vocabulary`."""
        model, tokenizer = self.model, self._smaller_tokenizer()
        smaller = replace(
            model,
            module=with_rows(model.module, self.rows),
            tokenizer=tokenizer,
            writer=_writing_both(model, self.rows),
        )
        store_alike(smaller.module, model.module)
        self._require_equal(smaller)
        scores = [self._score(each, length, progress) for each in (model, smaller)]
        self._memory.look()
        return smaller, self._report(smaller, scores)

    def _smaller_tokenizer(self) -> Tokenizer:
        """The tokenizer of the kept tokens.

        Raises:
            AuditError: it has other ids, or a text decodes to another one.
        """
        numbers = self._numbers()
        document = reduced(self._document, self._spelling, numbers)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _save(self.model.require_tokenizer(), folder)
            (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf8")
            _renumber_config(folder / "tokenizer_config.json", numbers)
            tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        plain = _plain(_document_of(tokenizer, self.model.source))
        if plain.get_vocab(with_added_tokens=True) != numbers:
            raise AuditError(
                f"The tokenizer of {self.model.source} gives other ids when it is built from fewer tokens."
            )
        for text in (_SIGNS, *self.heldout):
            if _read_back(plain, text) != _read_back(self._plain, text):
                raise AuditError(f"With fewer tokens another text would be read in place of {shown(text)}.")
        return tokenizer

    def _numbers(self) -> dict[str, int]:
        """New ids of the kept tokens."""
        new = {int(row): number for number, row in enumerate(self.rows)}
        return {token: new[number] for token, number in self._ids.items() if number in new}

    def _require_equal(self, smaller: LoadedModel) -> None:
        """Raise unless the smaller model gives the outputs of the model, and its class can be built anew.

        Raises:
            AuditError, ModelError: it does not.
        """
        if _is_empty(smaller):
            return
        probe = torch.linspace(0, len(self.rows) - 1, min(_PROBED, len(self.rows)), dtype=torch.long)
        outputs = outputs_of(smaller.module, {"input_ids": probe[None]})
        expected = outputs_of(self.model.module, {"input_ids": self.rows[probe][None]})
        if expected.shape[-1] == len(embedding_of(self.model.module).weight):
            expected = expected[..., self.rows.to(expected.device)]
        if expected.shape != outputs.shape or not torch.allclose(outputs, expected, atol=1e-3, rtol=1e-2):
            raise AuditError(
                f"{type(smaller.module).__name__} gives other outputs with fewer rows: it uses ids of tokens in a way "
                "that its configuration does not say."
            )
        require_rebuilt(smaller.module, {"input_ids": probe[None]}, self.notes.append)

    def _score(self, model: LoadedModel, length: int, progress: Progress) -> dict[str, float]:
        """Bits per byte, and bytes per token, of the held-out texts."""
        if not self.heldout:
            return {}
        size = sum(len(text.encode("utf8", "replace")) for text in self.heldout)
        encoded = _plain(_document_of(model.require_tokenizer(), model.source)).encode_batch_fast(
            self.heldout, add_special_tokens=False
        )
        scores = {"bytes per token": size / sum(len(each.ids) for each in encoded)}
        if self._scores_bits():
            window = model.window_length(length)
            scores["bits per byte"] = bits_per_byte(model, self.heldout, window, progress=progress)
        return scores

    def _report(self, smaller: LoadedModel, scores: list[dict[str, float]]) -> StructuredReport:
        module, name = smaller.module, self._name()
        loss, after = (each.get("bits per byte") for each in scores)
        if loss is None:
            self.notes.append(
                "Bits per byte were not measured: that takes a causal language model in memory, and text."
            )
        entries = sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)
        costs = [
            CostRecord(kind, measure(self.model.module), measure(module), "of the whole network")
            for kind, measure in (("parameters", parameter_count), ("megabytes", lambda net: size_in_bytes(net) / 1e6))
        ]
        return StructuredReport(
            settings={"model": self.model.source, "pattern": f"{len(self.rows)} tokens", "corpus tokens": self.tokens},
            loss=ComparisonLoss("not measured" if loss is None else "bits per byte", loss),
            rounds=[RoundRecord(0, 0.0, loss_heldout=after)],
            best_round=0,
            coverage=Coverage(parameter_count(module), entries, 0, 0),
            audit=[],
            seconds=time.monotonic() - self._began,
            peak_memory_bytes=self._memory.look(),
            scores=dict(zip(("dense", "pruned"), scores, strict=True)) if scores[0] else {},
            notes=[self.about_the_split(), *self.notes],
            widths=[WidthRecord(name, "tokens", name, len(self._ids), len(self.rows), 0.0)],
            costs=costs,
        )

    def about_the_split(self) -> str:
        """A sentence on the tokens of the corpus that are removed."""
        return f"{self.split:.2%} of the corpus's {self.tokens:,} tokens are removed; several tokens spell them now."

    def _name(self) -> str:
        """The path of the embedding."""
        embedding = embedding_of(self.model.module)
        return str(next(path for path, module in self.model.module.named_modules() if module is embedding))


def _kept_count(keep: int | float, total: int) -> int:
    """The number of tokens that stay.

    Raises:
        PatternError: it is no number or share, or not below the number of all tokens.
    """
    if is_a(Integral, keep):
        count = int(keep)
    elif is_a(Real, keep) and 0 < keep < 1:
        count = keep_count(total, 1 - keep)
    else:
        raise PatternError(f"keep is a number of tokens or a share in (0, 1), got {shown(keep)}.")
    if count >= total:
        raise PatternError(f"{count:,} tokens are not fewer than the {total:,} of the tokenizer; keep fewer.")
    return count


def _document_of(tokenizer: Any, source: str) -> JsonObject:
    """The tokenizer.json of a tokenizer.

    Raises:
        ModelError: it has none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"The tokenizer of {source} is {type(tokenizer).__name__}, which has no tokenizer.json to remove "
            "tokens from."
        )
    document: JsonObject = json.loads(backend.to_str())
    return document


def _plain(document: JsonObject) -> Any:
    """The tokenizer of a tokenizer.json, without padding and truncation."""
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps({**document, "padding": None, "truncation": None}))


def _read_back(tokenizer: Any, text: str) -> str:
    """A text, encoded and decoded."""
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False))


def _texts(corpus: Any, tokenizer: Any) -> Iterator[str]:
    """The texts of a corpus: the path of a file, texts, or batches of token ids.

    Raises:
        DataError: it is none of these.
    """
    if isinstance(corpus, (str, Path)):
        file = expanded(corpus)
        if not file.is_file():
            raise DataError(f"{shown(corpus)} is no file; give the path of a text file, or texts in a list.")
        yield from read_documents(file)
        return
    if isinstance(corpus, (Tensor, Mapping)):
        corpus = [corpus]
    if not isinstance(corpus, Iterable):
        raise DataError(f"The corpus is a file, texts or batches of token ids, got {shown(corpus)}.")
    for entry in corpus:
        if isinstance(entry, str):
            yield entry
            continue
        inputs = batches.inputs(entry)
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            raise DataError(f"The corpus holds {type(entry).__name__}; it takes texts, or batches with input_ids.")
        yield from tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from _PIECES.findall(text)


def _is_empty(model: LoadedModel) -> bool:
    """True if a model has no weights in memory."""
    return any(parameter.is_meta for parameter in model.module.parameters())


def _save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files of a tokenizer in place of those that a directory has."""
    for file in [*directory.iterdir()]:
        if is_tokenizer_file(file):
            file.unlink()
    tokenizer.save_pretrained(directory)


def _renumber_config(file: Path, numbers: Mapping[str, int]) -> None:
    """Give the added tokens in a tokenizer_config.json their new ids."""
    config = json.loads(file.read_text(encoding="utf8"))
    added = config.get("added_tokens_decoder")
    if added is not None:
        config["added_tokens_decoder"] = {str(numbers[token["content"]]): token for token in added.values()}
        file.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf8")


def _writing_both(model: LoadedModel, rows: Tensor) -> Callable[[LoadedModel, Path], None]:
    """The writer of a smaller model: that of the model, then the files in which ids of tokens changed."""

    def write(smaller: LoadedModel, directory: Path) -> None:
        if _is_empty(model):
            write_rows(model, smaller, rows, directory)
        else:
            model.writer(smaller, directory)
        _save(smaller.require_tokenizer(), directory)
        generation = getattr(smaller.module, "generation_config", None)
        if generation is not None and (directory / "generation_config.json").is_file():
            generation.save_pretrained(directory)

    return write


# ---- the tokens that stay: those that a corpus uses most, counted with the tokens that they spell
def choose(spelling: Spelling, counts: Mapping[str, int], fixed: Collection[str], keep: int) -> set[str]:
    """Choose the tokens of a vocabulary that stay.

    The rarest token is removed first, and its count goes to the tokens that spell it from then on. A removal lengthens
    the corpus by the count of the token. With byte-pair encoding every token is at least as frequent as those built
    from it, so no other choice lengthens the corpus less. Of equally rare tokens the one of largest id goes first: ids
    mostly are in the order of frequency in the corpus of the tokenizer.

    Args:
        spelling: the tokens.
        counts: number of times that the corpus has each token; 0 for those that are missing.
        fixed: tokens that stay for other reasons than `Spelling.must_stay`.
        keep: number of tokens that stay, `fixed` included.

    Raises:
        PatternError: more tokens than `keep` must stay.
    """
    kept, counted = set(spelling.tokens), Counter(counts)
    free = [token for token in spelling.tokens if token not in fixed and not spelling.must_stay(token)]
    parts = {token: spelling.parts(token) for token in spelling.tokens}
    uses = Counter(part for of_token in parts.values() for part in set(of_token))
    heap = [(counted[token], -spelling.tokens[token], token) for token in free if not uses[token]]
    heapify(heap)
    removable = set(free)
    while len(kept) > keep:
        if not heap:
            raise PatternError(
                f"{keep:,} tokens are fewer than the {len(kept):,} that must stay: special tokens, and single bytes or "
                "characters. Keep more."
            )
        count, order, token = heappop(heap)
        if count != counted[token]:  # it spells a token that was removed meanwhile
            heappush(heap, (counted[token], order, token))
            continue
        kept.remove(token)
        for part in parts[token] or spelling.spelled(token, kept):
            counted[part] += count
        for part in set(parts[token]):
            uses[part] -= 1
            if not uses[part] and part in removable:
                heappush(heap, (counted[part], -spelling.tokens[part], part))
    return kept
