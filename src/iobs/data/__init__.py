"""Calibration and evaluation data: text, images, arrays, or batches from a function of the user.

Names are imported on first use: reading a table loads neither torch nor models.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from iobs.data.pairs import PairSource, read_pairs
    from iobs.data.questions import Question, Questions, made_questions, prompt, read_questions
    from iobs.data.sources import (
        ArraySource,
        Batch,
        BatchSource,
        Source,
        TextSource,
        array_batches,
        calibration_batches,
        open_source,
    )
    from iobs.data.text import CORPORA, Part, calibration_windows, embedded_text, read_documents, token_windows

__all__ = [
    "CORPORA",
    "ArraySource",
    "Batch",
    "BatchSource",
    "PairSource",
    "Part",
    "Question",
    "Questions",
    "Source",
    "TextSource",
    "array_batches",
    "calibration_batches",
    "calibration_windows",
    "embedded_text",
    "made_questions",
    "open_source",
    "prompt",
    "read_documents",
    "read_pairs",
    "read_questions",
    "token_windows",
]

_HOMES = {
    "iobs.data.pairs": ("PairSource", "read_pairs"),
    "iobs.data.questions": ("Question", "Questions", "made_questions", "prompt", "read_questions"),
    "iobs.data.text": ("CORPORA", "Part", "calibration_windows", "embedded_text", "read_documents", "token_windows"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'iobs.data' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "iobs.data.sources")
    return getattr(_import_module(home), name)
