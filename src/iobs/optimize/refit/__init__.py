"""Minimisers of f on a given support."""

from iobs.optimize.refit.newton import Fit, refit

__all__ = ["Fit", "refit"]
