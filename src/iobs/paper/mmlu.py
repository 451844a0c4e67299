"""MMLU with five examples in the prompt, answered by the likeliest of four letters."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iobs.errors import DataError

if TYPE_CHECKING:
    from iobs.models import LoadedModel

LETTERS = "ABCD"


@dataclass(frozen=True)
class Question:
    """One question; `answer` is the index of the right choice."""

    subject: str
    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Questions:
    """Questions to answer, and by subject the examples that come before them."""

    test: list[Question]
    examples: dict[str, list[Question]]


def read(file: Path, subjects: int | None = None, each: int | None = None) -> Questions:
    """Questions from a .jsonl or .jsonl.gz with the keys split, subject, question, choices and answer.

    Args:
        file: the file.
        subjects: the first so many subjects by name, or all.
        each: questions a subject at most, or all.

    Raises:
        DataError: the file is not there or not of this kind.
    """
    examples: dict[str, list[Question]] = defaultdict(list)
    test: dict[str, list[Question]] = defaultdict(list)
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf8") as opened:
            for line in opened:
                entry = json.loads(line)
                question = Question(entry["subject"], entry["question"], tuple(entry["choices"]), int(entry["answer"]))
                (examples if entry["split"] == "dev" else test)[question.subject].append(question)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{file} holds no MMLU questions ({error}).") from error
    names = sorted(test)[:subjects]
    return Questions([question for name in names for question in test[name][:each]], dict(examples))


def made(subjects: int = 5, each: int = 8) -> Questions:
    """Sums in the shape of MMLU, for where its questions are not at hand."""

    def question(subject: int, index: int) -> Question:
        total = subject + index
        return Question(
            f"sums with {subject}", f"What is {subject} + {index}?", tuple(str(total + i) for i in range(4)), 0
        )

    examples = {f"sums with {s}": [question(s, index) for index in range(100, 105)] for s in range(subjects)}
    return Questions([question(s, index) for s in range(subjects) for index in range(each)], examples)


def prompt(question: Question, examples: Sequence[Question]) -> str:
    """The usual five-shot prompt; it ends where the answer's letter comes."""
    subject = question.subject.replace("_", " ")
    parts = [f"The following are multiple choice questions (with answers) about {subject}.\n"]
    parts += [f"{_stated(example)} {LETTERS[example.answer]}\n" for example in examples[:5]]
    return "\n".join([*parts, _stated(question)])


def _stated(question: Question) -> str:
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True))
    return f"{question.question.strip()}\n{choices}\nAnswer:"


def score(loaded: LoadedModel, questions: Questions) -> tuple[dict[str, float], int]:
    """Accuracy by subject, with `average` over all questions, and how many prompts were cut on the left.

    Raises:
        ModelError: the model has no tokenizer.
    """
    import torch

    tokenizer: Any = loaded.require_tokenizer()
    letters = [tokenizer([f" {letter}"], verbose=False)["input_ids"][0][-1] for letter in LETTERS]
    device = next(loaded.module.parameters()).device
    hits: dict[str, list[bool]] = defaultdict(list)
    cut = 0
    for question in questions.test:
        text = prompt(question, questions.examples.get(question.subject, []))
        tokens = tokenizer([text], verbose=False)["input_ids"][0]
        if loaded.context is not None and len(tokens) > loaded.context:
            tokens, cut = tokens[-loaded.context :], cut + 1
        with torch.no_grad():
            logits = loaded.module(input_ids=torch.tensor([tokens], device=device)).logits[0, -1, letters]
        hits[question.subject].append(int(logits.argmax()) == question.answer)
    table = {subject: sum(right) / len(right) for subject, right in hits.items()}
    return {**table, "average": sum(map(sum, hits.values())) / len(questions.test)}, cut
