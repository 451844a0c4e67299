"""Calibration and evaluation data: text, images, arrays, or batches from a function of the user."""

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
    "read_questions",
    "token_windows",
]
