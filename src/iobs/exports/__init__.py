"""Pruned models in the formats of other runtimes: `iobs.export`, one file for each target."""

from iobs.exports.record import Export, Written
from iobs.exports.targets import TARGETS, Target, export, require_packages

__all__ = ["TARGETS", "Export", "Target", "Written", "export", "require_packages"]
