"""Prune a whole network: Algorithm 2."""

from iobs.prune.allocation import Allocation
from iobs.prune.audit import audit
from iobs.prune.driver import prune
from iobs.prune.progress import Progress
from iobs.prune.record import Report
from iobs.prune.sparse_training import keep_sparse
from iobs.prune.steps import GradientStep

__all__ = ["Allocation", "GradientStep", "Progress", "Report", "audit", "keep_sparse", "prune"]
