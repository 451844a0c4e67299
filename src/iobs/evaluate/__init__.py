"""Metrics of a model: perplexity, accuracy, rank correlation of embeddings, multiple choice, and lm-eval tasks."""

from iobs.evaluate.before_after import BeforeAfter as BeforeAfter
from iobs.evaluate.scores import Progress as Progress
from iobs.evaluate.scores import accuracy as accuracy
from iobs.evaluate.scores import bits_per_byte as bits_per_byte
from iobs.evaluate.scores import evaluate as evaluate
from iobs.evaluate.scores import no_progress as no_progress
from iobs.evaluate.scores import output_logits as output_logits
from iobs.evaluate.scores import perplexity as perplexity
from iobs.evaluate.scores import rank_correlation as rank_correlation
from iobs.evaluate.scores import squared_error as squared_error
from iobs.evaluate.tasks import answer as answer
from iobs.evaluate.tasks import check_tasks as check_tasks
from iobs.evaluate.tasks import evaluate_tasks as evaluate_tasks
from iobs.pruning.calibration.losses import IGNORED as IGNORED
