"""Evaluate a model on lm-eval tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from iobs.core.modes import full_precision
from iobs.errors import DataError
from iobs.models import LoadedModel

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


def check_tasks(tasks: Sequence[str]) -> None:
    """Check, before any work, that lm-eval is installed and knows these tasks.

    Raises:
        DataError: lm-eval is not installed, or a task is neither a known name nor a file.
    """
    known = set(_manager().all_tasks)
    unknown = [task for task in tasks if task not in known and not Path(task).exists()]
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
    found = [
        (name.partition(","), float(value))
        for name, value in values.items()
        if "," in name and isinstance(value, int | float) and "stderr" not in name
    ]
    filters = Counter(metric for (metric, _, _), _ in found)
    return {metric if filters[metric] == 1 else f"{metric}, {kept}": value for (metric, _, kept), value in found}


@cache  # it reads several thousand files
def _manager() -> TaskManager:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DataError("--tasks needs lm-eval: pip install 'iobs[eval]'.") from error
    return TaskManager()
