"""Smooth functions to minimise: `iobs.objectives`."""

from iobs.optimize.objectives.autodiff import TorchObjective, from_torch
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.cox import Cox
from iobs.optimize.objectives.families import Gamma, Logistic, NegativeBinomial, Poisson, Tweedie
from iobs.optimize.objectives.linear import LeastSquares, LinearModel
from iobs.optimize.objectives.tabled import MultiResponse

__all__ = [
    "Cox",
    "Gamma",
    "LeastSquares",
    "LinearModel",
    "Logistic",
    "MultiResponse",
    "NegativeBinomial",
    "Objective",
    "Poisson",
    "TorchObjective",
    "Tweedie",
    "from_torch",
]
