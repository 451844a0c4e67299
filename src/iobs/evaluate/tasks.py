"""Questions for language models: multiple choice as in MMLU, and tasks of lm-eval."""

from __future__ import annotations

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from iobs.core.modes import full_precision
from iobs.data import Questions, prompt
from iobs.data.questions import LETTERS
from iobs.errors import DataError, ModelError, NonFiniteError
from iobs.evaluate.scores import Progress, no_progress, output_logits
from iobs.models import LoadedModel, Tokenizer
from iobs.pruning.network.modes import without_cache

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@torch.no_grad()
@full_precision()
def answer(
    model: LoadedModel, questions: Questions, *, shots: int = 5, progress: Progress = no_progress
) -> tuple[dict[str, float], int]:
    """Multiple-choice accuracy (MMLU): share of questions whose correct letter is the most likely of the four.

    The log-probability of a letter of several tokens is the sum over its tokens.

    Args:
        model: the language model.
        questions: test questions and examples.
        shots: number of examples before each question, from the same subject.
        progress: called with (questions done, total).

    Returns:
        The accuracy (0 to 1) by subject and, as `average`, over all questions. The second value is the number of
        prompts longer than the model's context. Their beginning was cut off.

    Raises:
        ModelError: the model has no tokenizer, or its tokenizer does not encode the letters as separate tokens.
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
    """The tokens of each letter after "Answer:", the last word of a prompt.

    Raises:
        ModelError: the tokens of "Answer:" change when a letter follows, or two letters have the same tokens.
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


def last_positions(module: nn.Module, count: int) -> dict[str, int]:
    """The argument by which a model computes the scores of its last `count` positions alone; empty without one."""
    takes = "logits_to_keep" in inspect.signature(module.forward).parameters
    return {"logits_to_keep": count} if takes else {}


def _likelihoods(model: LoadedModel, tokens: Sequence[int], letters: Sequence[tuple[int, ...]]) -> list[float]:
    """Log-probability of each letter after a prompt; letters that share all but the last token share a pass."""
    device = next(model.module.parameters()).device
    following: dict[tuple[int, ...], Tensor] = {}  # log-probabilities of the last positions, by the appended tokens
    for letter in letters:
        if letter[:-1] not in following:
            shown = torch.tensor([[*tokens, *letter[:-1]][-(model.context or 0) :]], device=device)
            with without_cache(model.module):
                output = model.module(input_ids=shown, **last_positions(model.module, len(letter)))
            logits = output_logits(output)[0, -len(letter) :]
            following[letter[:-1]] = logits.float().log_softmax(-1)
    return [float(sum(following[letter[:-1]][range(len(letter)), letter])) for letter in letters]


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise, before any work, unless lm-eval is installed and knows these tasks.

    Raises:
        DataError: lm-eval is not installed, or a task is neither a known name nor a file.
    """
    names = set(_manager().all_tasks)
    unknown = [task for task in tasks if task not in names and not Path(task).exists()]
    if unknown:
        raise DataError(f"lm-eval has no task {', '.join(unknown)}; its documentation lists its tasks.")


@full_precision()
def evaluate_tasks(
    model: LoadedModel, tasks: Sequence[str], *, shots: int | None = None, limit: int | None = None
) -> dict[str, float]:
    """Metrics of lm-eval tasks, by the name `task/metric`.

    The name of a metric that a task computes with several filters of the answers, as gsm8k does, ends with the filter.

    Args:
        model: the language model.
        tasks: names of lm-eval tasks.
        shots: examples before each question; None for the default of each task.
        limit: maximum number of questions per task; None for all.

    Raises:
        DataError: lm-eval is not installed, does not know a task, or cannot fetch its data.
        ModelError: the model has no tokenizer.
    """
    tokenizer = model.require_tokenizer()
    check_tasks(tasks)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    try:
        results = simple_evaluate(
            HFLM(pretrained=model.module, tokenizer=tokenizer),
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            bootstrap_iters=0,
            task_manager=_manager(),
        )
    except Exception as error:  # data that cannot be fetched and missing packages raise many types
        raise DataError(f"lm-eval cannot run {', '.join(tasks)}: {type(error).__name__}: {error}") from error
    return {
        f"{task}/{name}": value
        for task, metrics in results["results"].items()
        for name, value in _by_metric(metrics).items()
    }


def _by_metric(values: Mapping[str, object]) -> dict[str, float]:
    """The metrics of a task by their names; lm-eval names each "metric,filter"."""
    split = [
        (name.partition(","), float(value))
        for name, value in values.items()
        if "," in name and isinstance(value, int | float) and "stderr" not in name
    ]
    filters = Counter(metric for (metric, _, _), _ in split)
    return {metric if filters[metric] == 1 else f"{metric}, {name}": value for (metric, _, name), value in split}


@cache  # it reads several thousand files
def _manager() -> TaskManager:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DataError("--tasks needs lm-eval: pip install 'iobs[eval]'.") from error
    return TaskManager()
