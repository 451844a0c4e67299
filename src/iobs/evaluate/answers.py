"""Multiple choice as in MMLU: which letter is the likeliest after a prompt."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from iobs.data import Questions, prompt
from iobs.data.questions import LETTERS
from iobs.errors import ModelError, NonFiniteError
from iobs.evaluate.scores import Progress, no_progress, output_logits
from iobs.models import LoadedModel, Tokenizer


@torch.no_grad()
def answer(
    model: LoadedModel, questions: Questions, *, shots: int = 5, progress: Progress = no_progress
) -> tuple[dict[str, float], int]:
    """MMLU: the share of questions whose right letter is the likeliest of the four after the prompt.

    A letter of several tokens is as likely as all of them one after another.

    Args:
        model: the language model.
        questions: what to answer, and the examples.
        shots: examples before each question, of its own subject.
        progress: told (questions done, questions in all).

    Returns:
        The share by subject and, as `average`, over all questions; and how many prompts were longer than the model's
        context and lost their beginning.

    Raises:
        ModelError: the model has no tokenizer, or one whose letters do not follow a prompt as tokens of their own.
        NonFiniteError: a logit is NaN; the message names the question.
    """
    tokenizer = model.require_tokenizer()
    letters = letter_tokens(tokenizer)
    longest = math.inf if model.context is None else model.context - max(map(len, letters)) + 1
    hits: dict[str, list[bool]] = defaultdict(list)
    cut = 0
    for number, question in enumerate(questions.test, 1):
        text = prompt(question, questions.examples.get(question.subject, [])[:shots])
        tokens = tokenizer([text], verbose=False)["input_ids"][0]
        likelihoods = _likelihoods(model, tokens, letters)
        if any(map(math.isnan, likelihoods)):
            raise NonFiniteError(f"The model gives NaN on question {number}, of {question.subject}.")
        cut += len(tokens) > longest
        hits[question.subject].append(likelihoods.index(max(likelihoods)) == question.answer)
        progress(number, len(questions.test))
    table = {subject: sum(right) / len(right) for subject, right in hits.items()}
    return {**table, "average": sum(map(sum, hits.values())) / len(questions.test)}, cut


def letter_tokens(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of each letter, as they follow a prompt's last word.

    Raises:
        ModelError: they do not follow it, or do not tell the letters apart.
    """
    start, *whole = tokenizer(["Answer:", *(f"Answer: {letter}" for letter in LETTERS)], verbose=False)["input_ids"]
    letters = [tuple(tokens[len(start) :]) for tokens in whole]
    if any(tokens[: len(start)] != start for tokens in whole) or len({*letters}) < len(LETTERS):
        raise ModelError(
            'After "Answer:" the tokenizer does not go on with tokens that tell the letters A to D apart, so it cannot '
            "be used for multiple choice. If it ends every text with a token, as it does where tokenizer_config.json "
            'has "add_eos_token": true, set that to false.'
        )
    return letters


def _likelihoods(model: LoadedModel, tokens: Sequence[int], letters: Sequence[tuple[int, ...]]) -> list[float]:
    """log p of each letter after a prompt; letters that begin alike share a forward pass."""
    device = next(model.module.parameters()).device
    following: dict[tuple[int, ...], Tensor] = {}  # log-probabilities of the last positions, by what was appended
    for letter in letters:
        if letter[:-1] not in following:
            shown = torch.tensor([[*tokens, *letter[:-1]][-(model.context or 0) :]], device=device)
            logits = output_logits(model.module(input_ids=shown))[0, -len(letter) :]
            following[letter[:-1]] = logits.float().log_softmax(-1)
    return [float(sum(following[letter[:-1]][range(len(letter)), letter])) for letter in letters]
