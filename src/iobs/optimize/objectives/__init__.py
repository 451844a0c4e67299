"""Smooth functions to minimise: `iobs.objectives`."""

from iobs.optimize.objectives.autodiff import TorchObjective, from_torch
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.linear import LeastSquares, LinearModel, Logistic, Poisson

__all__ = ["LeastSquares", "LinearModel", "Logistic", "Objective", "Poisson", "TorchObjective", "from_torch"]
