"""Smooth functions to minimise: `iobs.objectives`."""

from iobs.optimize.objectives.autodiff import TorchObjective as TorchObjective
from iobs.optimize.objectives.autodiff import from_torch as from_torch
from iobs.optimize.objectives.base import Objective as Objective
from iobs.optimize.objectives.cox import Cox as Cox
from iobs.optimize.objectives.families import Gamma as Gamma
from iobs.optimize.objectives.families import Logistic as Logistic
from iobs.optimize.objectives.families import NegativeBinomial as NegativeBinomial
from iobs.optimize.objectives.families import Poisson as Poisson
from iobs.optimize.objectives.families import Tweedie as Tweedie
from iobs.optimize.objectives.linear import LeastSquares as LeastSquares
from iobs.optimize.objectives.linear import LinearModel as LinearModel
from iobs.optimize.objectives.tabled import MultiResponse as MultiResponse
