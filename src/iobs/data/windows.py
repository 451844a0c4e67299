"""Cut text into token windows, by the usual convention for perplexity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from iobs.errors import CalibrationError, DataError
from iobs.models import Tokenizer

# Documents per call of the tokenizer: enough to use its threads, few enough to stop early.
_DOCUMENTS_A_CALL = 64
# Calibration draws from the first _POOL * samples windows, so that a huge text is not read whole.
_POOL = 8


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
