"""Methods by name: the table of the paper's family, and its honest baselines."""

from __future__ import annotations

from collections.abc import Callable

from iobs.optimize import baselines, choices
from iobs.optimize.curvature import DiagonalHessian, EmpiricalFisher, FullHessian
from iobs.optimize.globalise import RegularisedNewton
from iobs.optimize.methods import BestKnown, HardThresholding, Method, SparseNewton, StochasticIOBS

METHODS: dict[str, Callable[[], Method]] = {
    "auto": BestKnown,
    # Curvature x choice.
    "iht": HardThresholding,
    "stochastic_iht": lambda: HardThresholding(batch=32),
    "topk_iobs": lambda: SparseNewton(FullHessian(), choices.Truncate()),
    "topk_refit": lambda: SparseNewton(FullHessian(), choices.TruncateAndRefit()),
    "iobs": lambda: SparseNewton(FullHessian(), choices.BestSupport()),
    "iobs_exact": lambda: SparseNewton(FullHessian(), choices.Enumerate()),
    "stochastic_iobs": StochasticIOBS,
    # Pruning a dense minimiser: no gradient, or one coordinate a step.
    "obd": lambda: SparseNewton(DiagonalHessian(), choices.Greedy(), stationary=True),
    "obs": lambda: SparseNewton(FullHessian(), choices.Greedy(), stationary=True, nested=1),
    "woodfisher": lambda: SparseNewton(EmpiricalFisher(), choices.Greedy(), stationary=True),
    "woodtaylor": lambda: SparseNewton(EmpiricalFisher(), choices.Greedy(), nested=1),
    "obc": lambda: SparseNewton(FullHessian(), choices.Greedy(), nested=1),
    # From any start.
    "regularised_newton": RegularisedNewton,
    "cubic_newton": lambda: RegularisedNewton(rule="cubic"),
    # Baselines.
    "accelerated_iht": baselines.AcceleratedIHT,
    "newton_iht": baselines.NewtonIHT,
    "htp": baselines.HTP,
    "nhtp": baselines.NHTP,
    "fnhtp": baselines.FNHTP,
    "cosamp": baselines.CoSaMP,
    "grasp": baselines.GraSP,
    "omp": baselines.OMP,
}
