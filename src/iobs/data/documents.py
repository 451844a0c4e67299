"""Read documents from text files and from the corpora that pruning papers use."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TextIO

from iobs.errors import DataError

Part = Literal["calibration", "evaluation"]

SEPARATOR = "<|endoftext|>"
# .json is read as JSON lines too, as in C4, whose files end in .json.gz.
_LINES = (".jsonl", ".ndjson", ".json")
# Calibration cuts documents of more characters into pieces, at line ends: a file of gigabytes may be one document.
PIECE = 1 << 20


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
