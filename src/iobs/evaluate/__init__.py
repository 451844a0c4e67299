"""Metrics of a model: perplexity, accuracy, rank correlation of embeddings, multiple choice, and lm-eval tasks."""

from iobs.evaluate.before_after import BeforeAfter
from iobs.evaluate.scores import (
    Progress,
    accuracy,
    bits_per_byte,
    evaluate,
    no_progress,
    output_logits,
    perplexity,
    rank_correlation,
    squared_error,
)
from iobs.evaluate.tasks import answer, check_tasks, evaluate_tasks
from iobs.pruning.calibration.losses import IGNORED

__all__ = [
    "IGNORED",
    "BeforeAfter",
    "Progress",
    "accuracy",
    "answer",
    "bits_per_byte",
    "check_tasks",
    "evaluate",
    "evaluate_tasks",
    "no_progress",
    "output_logits",
    "perplexity",
    "rank_correlation",
    "squared_error",
]
