"""The tasks of lm-eval, which is asked to run them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from iobs.errors import DataError
from iobs.models import LoadedModel


def check_tasks(tasks: Sequence[str]) -> None:
    """Find out, before any work, whether lm-eval is there and knows these tasks.

    Raises:
        DataError: it is not installed, or a task is neither one of its own nor a file.
    """
    known = set(_manager().all_tasks)
    unknown = [task for task in tasks if task not in known and not Path(task).exists()]
    if unknown:
        raise DataError(f"lm-eval has no task {', '.join(unknown)}; its own documentation lists those that it has.")


def evaluate_tasks(
    model: LoadedModel, tasks: Sequence[str], *, shots: int | None = None, limit: int | None = None
) -> dict[str, float]:
    """Scores of lm-eval tasks, as `task/metric`.

    Args:
        model: the language model.
        tasks: names of lm-eval's tasks.
        shots: examples before each question; None is what a task says.
        limit: questions of each task at most.

    Raises:
        DataError: lm-eval is not installed, does not know a task, or cannot reach its data.
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
    except Exception as error:  # unreachable data and what a task needs besides come as many classes
        raise DataError(f"lm-eval cannot run {', '.join(tasks)}: {type(error).__name__}: {error}") from error
    return {
        f"{task}/{metric.split(',')[0]}": float(value)
        for task, metrics in results["results"].items()
        for metric, value in metrics.items()
        if "," in metric and isinstance(value, int | float) and "stderr" not in metric
    }


@cache  # it reads some thousand files
def _manager() -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DataError("--tasks needs lm-eval: pip install 'iobs[eval]'.") from error
    return TaskManager()
