"""Documents from files, from the corpora of pruning papers and from Python's help pages; windows of tokens."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TextIO

import torch
from torch import Tensor

from iobs.errors import CalibrationError, DataError
from iobs.models import Tokenizer

Part = Literal["calibration", "evaluation"]

SEPARATOR = "<|endoftext|>"
# .json is read as JSON lines too, as in C4, whose files end in .json.gz.
_LINES = (".jsonl", ".ndjson", ".json")
# Calibration cuts documents of more characters into pieces, at line ends: a file of gigabytes may be one document.
PIECE = 1 << 20

Split = Literal["train", "calibration", "heldout"]

# The split of a topic depends on a hash of its name only, so it is the same in every Python version.
_PERCENTILES: dict[Split, range] = {
    "heldout": range(0, 20),
    "calibration": range(20, 48),
    "train": range(48, 100),
}
_TITLE_RULE = re.compile(r"^\s*([*=\-^~\"])\1{3,}\s*$")
# Shorter paragraphs ("Note:", a single keyword) occur in many topics, and cannot leak held-out text.
_SHORTEST_UNIQUE_PARAGRAPH = 40

# Documents per call of the tokenizer: enough to use its threads, few enough to stop early.
_DOCUMENTS_A_CALL = 64
# Calibration draws from the first _POOL * samples windows, so that a huge text is not read whole.
_POOL = 8


def read_documents(file: Path, piece: int | None = None) -> Iterator[str]:
    """Iterate over the documents of a text file without reading the whole file at once.

    `.jsonl`, `.ndjson` and `.json` files hold one JSON object with a "text" field per line. All other files are plain
    text, with lines ``<|endoftext|>`` between documents. Both may be compressed (`.gz`).

    Args:
        file: the file.
        piece: cut longer documents into pieces of about `piece` characters; None keeps documents whole.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or holds a line that is not a JSON object with "text".
    """
    try:
        with open_text(file) as opened:
            if file.name.lower().removesuffix(".gz").endswith(_LINES):
                yield from _json_lines(opened, file)
            else:
                yield from _separated(opened, piece)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason}).") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def open_text(file: Path) -> TextIO:
    """Open a UTF-8 text file; `.gz` is decompressed, and a byte order mark is skipped."""
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return file.open(encoding="utf-8-sig")


def _separated(opened: TextIO, piece: int | None) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    while line := opened.readline(piece or -1):
        at_end = line.strip() == SEPARATOR
        if not at_end:
            lines.append(line)
            size += len(line)
        if at_end or (piece is not None and size >= piece):
            document = "".join(lines).removesuffix("\n") if at_end else "".join(lines)
            if document.strip():
                yield document
            lines, size = [], 0
    document = "".join(lines)
    if document.strip():
        yield document


def _json_lines(opened: TextIO, file: Path) -> Iterator[str]:
    for number, line in enumerate(opened, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{file}, line {number}: not a JSON object with a "text" field. One such object a line is read; '
                "a file that is one list becomes that by: jq -c '.[]'"
            ) from error
        if not isinstance(text, str):
            raise DataError(f'{file}, line {number}: "text" is not a string.')
        if text.strip():
            yield text


@dataclass(frozen=True)
class Corpus:
    """A public corpus, read through the `datasets` library.

    Attributes:
        arguments: positional arguments of `datasets.load_dataset`.
        files: data file of each part; empty if the corpus has no such option.
        splits: split of each part.
        joined: the rows are lines of one document.
    """

    arguments: tuple[str, ...]
    files: dict[Part, str]
    splits: dict[Part, str]
    joined: bool


_CORPORA = {
    # WikiText-2 is one document by convention: all lines, joined by empty lines.
    "wikitext2": Corpus(
        ("Salesforce/wikitext", "wikitext-2-raw-v1"), {}, {"calibration": "train", "evaluation": "test"}, True
    ),
    "c4": Corpus(
        ("allenai/c4",),
        {
            "calibration": "en/c4-train.00000-of-01024.json.gz",
            "evaluation": "en/c4-validation.00000-of-00008.json.gz",
        },
        {"calibration": "train", "evaluation": "train"},
        False,
    ),
    # SlimPajama, the cleaned RedPajama: the original needs a loading script, which `datasets` no longer runs.
    "redpajama": Corpus(("DKYoon/SlimPajama-6B",), {}, {"calibration": "train", "evaluation": "validation"}, False),
}
CORPORA = tuple(_CORPORA)
# Papers score C4 on its first 1,100 validation documents.
_EVALUATION_DOCUMENTS = 1100


def corpus_documents(name: str, part: Part) -> Iterator[str]:
    """Iterate over the documents of a public corpus, streamed where possible.

    Raises:
        DataError: `datasets` is not installed, or the corpus is not cached and cannot be fetched.
    """
    corpus = _CORPORA[name]
    instead = f'Give a local file instead: --data {name}.txt (or .jsonl with a "text" field).'
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name} needs the datasets library: pip install 'iobs[eval]'. {instead}") from error
    files = {"data_files": {corpus.splits[part]: corpus.files[part]}} if corpus.files else {}
    try:
        rows = datasets.load_dataset(*corpus.arguments, split=corpus.splits[part], streaming=not corpus.joined, **files)
        texts = (row["text"] for row in rows)
        if corpus.joined:
            yield "\n\n".join(texts)
        else:
            yield from texts if part == "calibration" else islice(texts, _EVALUATION_DOCUMENTS)
    except Exception as error:  # connection errors have many types, from several libraries
        raise DataError(f"{name} is neither cached nor within reach ({type(error).__name__}). {instead}") from error


# ---- the embedded text: the help topics of Python, split by topic name


def embedded_text(split: Split) -> list[str]:
    """Cleaned help topics of one split, sorted by name, one document per topic.

    The topics come from `pydoc_data.topics` of the running Python. Their wording differs slightly between Python
    versions. The split depends on the topic name only, so topics used to train the embedded model are never held out.
    Topics quote each other. A paragraph stays in the first split that contains it, in the order held-out, calibration,
    train, and is removed from the others.

    Raises:
        DataError: this Python was installed without its help topics, or `split` is not one of the three.
    """
    if split not in _PERCENTILES:
        raise DataError(f"the embedded text has no split {split!r}; choose one of {', '.join(_PERCENTILES)}")
    topics = _topics()
    used: set[str] = set()
    for owner, percentiles in _PERCENTILES.items():
        documents = [
            without_paragraphs(clean(topics[name]), used) for name in sorted(topics) if percentile(name) in percentiles
        ]
        if owner == split:
            break
    return [document for document in documents if document]


def percentile(name: str) -> int:
    """A number in 0..99 that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % 100


def clean(text: str) -> str:
    """Remove title underlines and trailing spaces; separate paragraphs by one empty line."""
    lines = [line.rstrip() for line in text.expandtabs().splitlines() if not _TITLE_RULE.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def without_paragraphs(text: str, used: set[str]) -> str:
    """Remove the paragraphs of a text that are in `used`, and add the remaining paragraphs to `used`."""
    kept = []
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) >= _SHORTEST_UNIQUE_PARAGRAPH:
            if key in used:
                continue
            used.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise DataError(
            "this Python was installed without pydoc_data, which holds the embedded text; give a text file instead"
        ) from error
    return dict(topics.topics)


# ---- token windows, by the usual convention for perplexity


def token_windows(tokenizer: Tokenizer, documents: Iterable[str], length: int, limit: int | None = None) -> Tensor:
    """Cut documents into non-overlapping windows of tokens.

    Each document gets the special tokens of the tokenizer. The documents are concatenated, and the remainder after the
    last whole window is dropped.

    Args:
        tokenizer: a Hugging Face tokenizer.
        documents: texts, read only as far as needed.
        length: tokens per window.
        limit: maximum number of windows; None for all.

    Returns:
        Tokens (windows, length), int64.

    Raises:
        DataError: `length` is less than 2, or the text is shorter than one window.
    """
    if length < 2:
        raise DataError(f"A window of {length} tokens predicts nothing; ask for at least 2.")
    enough = None if limit is None else limit * length
    tokens: list[int] = []
    for encoded in _encoded(tokenizer, documents):
        tokens.extend(encoded)
        if enough is not None and len(tokens) >= enough:
            break
    count = len(tokens) // length
    if limit is not None:
        count = min(count, limit)
    if count == 0:
        raise DataError(
            f"The text has {len(tokens)} tokens, less than one window of {length}; "
            "give more text or a smaller --seq-len."
        )
    return torch.tensor(tokens[: count * length]).view(count, length)


def calibration_windows(
    tokenizer: Tokenizer,
    documents: Iterable[str],
    samples: int,
    length: int,
    seed: int,
    *,
    batch: int = 8,
    labels: bool = True,
) -> list[dict[str, Tensor]]:
    """Draw windows at random, without replacement, from the beginning of a text.

    The windows are drawn from the first `8 * samples` windows, so a text of gigabytes is not read or tokenised whole. A
    text with fewer than `samples` windows gives all of them.

    Args:
        tokenizer: a Hugging Face tokenizer.
        documents: texts.
        samples: number of windows.
        length: tokens per window.
        seed: seed of the draw.
        batch: windows per batch.
        labels: also return the tokens as labels, so that a language model returns its loss.

    Returns:
        Batches: mappings of int64 tensors (up to `batch`, length).

    Raises:
        CalibrationError: `samples` is less than 1, or the text is shorter than one window.
    """
    if samples < 1:
        raise CalibrationError(f"{samples} calibration samples were asked for; at least 1 is needed.")
    try:
        windows = token_windows(tokenizer, documents, length, limit=_POOL * samples)
    except DataError as error:
        raise CalibrationError(f"Calibration: {error}") from error
    generator = torch.Generator().manual_seed(seed)
    drawn = windows[torch.randperm(len(windows), generator=generator)[:samples]]
    return [
        {"input_ids": part, "labels": part} if labels else {"input_ids": part} for part in torch.split(drawn, batch)
    ]


def _encoded(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[list[int]]:
    """Token numbers of each document. With `verbose=False` the tokenizer does not warn about long documents."""
    stream = iter(documents)
    while texts := list(islice(stream, _DOCUMENTS_A_CALL)):
        yield from tokenizer(texts, verbose=False)["input_ids"]
