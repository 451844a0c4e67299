"""Multiple-choice questions in the format of MMLU (four choices), and their prompts."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iobs.core.specs import require_questions
from iobs.data.text import open_text
from iobs.errors import DataError

LETTERS = "ABCD"


@dataclass(frozen=True)
class Question:
    """A multiple-choice question; `answer` is the index of the correct choice."""

    subject: str
    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Questions:
    """Test questions, and the few-shot examples of each subject."""

    test: list[Question]
    examples: dict[str, list[Question]]


def read_questions(file: Path, subjects: int | None = None, each: int | None = None) -> Questions:
    """Read questions from a .jsonl or .jsonl.gz file with the keys split, subject, question, choices and answer.

    Lines whose split is "dev" are the few-shot examples.

    Args:
        file: the file.
        subjects: number of subjects, the first by name; None for all.
        each: maximum number of questions per subject; None for all.

    Raises:
        DataError: the file does not exist, or a line does not have this format.
    """
    require_questions(file)
    examples: dict[str, list[Question]] = defaultdict(list)
    test: dict[str, list[Question]] = defaultdict(list)
    number = 0
    try:
        with open_text(file) as opened:
            for line in opened:
                number += 1
                if not line.strip():
                    continue
                entry = json.loads(line)
                question = _question(entry)
                (examples if entry["split"] == "dev" else test)[question.subject].append(question)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} holds no questions (line {number}: {type(error).__name__}: {error}); it takes a JSON object a "
            'line with split ("dev" or "test"), subject, question, choices (four) and answer (an index).'
        ) from error
    if not test:
        raise DataError(f"{file} holds no question to answer: every line is an example.")
    names = sorted(test)[:subjects]
    return Questions([question for name in names for question in test[name][:each]], dict(examples))


def _question(entry: Mapping[str, Any]) -> Question:
    """The question of one line.

    Raises:
        KeyError: a key is missing.
        TypeError: a value has another type.
        ValueError: not four choices, or no answer among them.
    """
    subject, question, choices, answer = entry["subject"], entry["question"], entry["choices"], int(entry["answer"])
    if not (isinstance(subject, str) and isinstance(question, str) and isinstance(choices, list)):
        raise TypeError("subject and question must be text, choices a list")
    if len(choices) != len(LETTERS) or not 0 <= answer < len(LETTERS):
        raise ValueError(f"a question has {len(choices)} choices and answer {answer}")
    return Question(subject, question, tuple(choices), answer)


def made_questions() -> Questions:
    """Addition questions in the format of MMLU, a substitute without its file. The first choice is always correct."""
    subjects = range(5)

    def question(subject: int, index: int) -> Question:
        total = subject + index
        return Question(
            f"sums with {subject}", f"What is {subject} + {index}?", tuple(str(total + i) for i in range(4)), 0
        )

    examples = {f"sums with {s}": [question(s, index) for index in range(100, 105)] for s in subjects}
    return Questions([question(s, index) for s in subjects for index in range(8)], examples)


def prompt(question: Question, examples: Sequence[Question]) -> str:
    """The usual prompt of MMLU: the examples, then the question, ending before the letter of the answer."""
    subject = question.subject.replace("_", " ")
    parts = [f"The following are multiple choice questions (with answers) about {subject}.\n"]
    parts += [f"{_stated(example)} {LETTERS[example.answer]}\n" for example in examples]
    return "\n".join([*parts, _stated(question)])


def _stated(question: Question) -> str:
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True))
    return f"{question.question.strip()}\n{choices}\nAnswer:"
