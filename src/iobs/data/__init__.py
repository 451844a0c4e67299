"""Calibration and evaluation data: text, images, arrays, or batches from a function of the user."""

from iobs.data.documents import CORPORA, Part, read_documents
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
from iobs.data.topics import embedded_text
from iobs.data.windows import calibration_windows, token_windows

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
