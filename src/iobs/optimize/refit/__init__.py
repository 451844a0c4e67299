"""Minimisers of f on a given support."""

from iobs.optimize.refit.fit import Fit
from iobs.optimize.refit.newton import refit

__all__ = ["Fit", "refit"]
