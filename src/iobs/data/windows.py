"""Text to token windows, by the convention in which perplexities are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from iobs.errors import CalibrationError, DataError
from iobs.models import Tokenizer

# Documents tokenised in one call: enough to keep the tokenizer's threads busy, few enough to stop early.
_DOCUMENTS_A_CALL = 64
# Calibration windows are drawn from this many times as many as asked, so that a huge text is not read whole.
_POOL = 8


def token_windows(tokenizer: Tokenizer, documents: Iterable[str], length: int, limit: int | None = None) -> Tensor:
    """Cut documents into non-overlapping windows of tokens.

    Each document gets the tokenizer's own special tokens, the documents are concatenated, and the remainder after the
    last whole window is dropped.

    Args:
        tokenizer: a Hugging Face tokenizer.
        documents: texts, read only as far as needed.
        length: tokens in a window.
        limit: stop after so many windows.

    Returns:
        (windows, length), int64.

    Raises:
        DataError: a window would have fewer than two tokens, or the text is shorter than one window.
    """
    if length < 2:
        raise DataError(f"A window of {length} tokens predicts nothing; ask for at least 2.")
    wanted = None if limit is None else limit * length
    tokens: list[int] = []
    for encoded in _encoded(tokenizer, documents):
        tokens.extend(encoded)
        if wanted is not None and len(tokens) >= wanted:
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
    """Draw windows at random, without repetition, from the beginning of a text.

    The draw is among the first `8 * samples` windows, so a text of gigabytes is neither read nor tokenised whole. A
    text with fewer windows than asked gives all that it has.

    Args:
        tokenizer: a Hugging Face tokenizer.
        documents: texts.
        samples: windows to draw.
        length: tokens in a window.
        seed: of the draw.
        batch: windows in a batch.
        labels: give the tokens as labels too, so that a language model returns its loss.

    Returns:
        Batches, mappings of int64 tensors (up to `batch`, length).

    Raises:
        CalibrationError: no sample was asked for, or the text is shorter than one window.
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
    """Token numbers of each document. `verbose=False`: a document longer than the context is expected here."""
    stream = iter(documents)
    while texts := list(islice(stream, _DOCUMENTS_A_CALL)):
        yield from tokenizer(texts, verbose=False)["input_ids"]
