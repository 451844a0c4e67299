"""Methods by name: the paper's family and published baselines."""

from __future__ import annotations

from collections.abc import Callable

from iobs.optimize.curvature import DiagonalHessian, EmpiricalFisher, FullHessian, SampledHessian
from iobs.optimize.methods import baselines, subproblem
from iobs.optimize.methods.base import Method
from iobs.optimize.methods.best_known import BestKnown, Exact
from iobs.optimize.methods.gradient import HardThresholding, StochasticIOBS
from iobs.optimize.methods.sparse_newton import RegularisedNewton, SparseNewton

METHODS: dict[str, Callable[[], Method]] = {
    "auto": BestKnown,
    "exact": Exact,
    # Curvature x solver of the subproblem.
    "iht": HardThresholding,
    "stochastic_iht": lambda: HardThresholding(batch=32),
    "topk_iobs": lambda: SparseNewton(FullHessian(), subproblem.Truncate()),
    "topk_refit": lambda: SparseNewton(FullHessian(), subproblem.TruncateAndRefit()),
    "iobs": lambda: SparseNewton(FullHessian(), subproblem.BestSupport()),
    "iobs_exact": lambda: SparseNewton(FullHessian(), subproblem.Enumerate()),
    "sampled_iobs": lambda: SparseNewton(SampledHessian(), subproblem.BestSupport()),
    "stochastic_iobs": lambda: StochasticIOBS(batch="auto", updates=None),
    # Pruning of a dense minimiser: without the gradient, or one coordinate per step.
    "obd": lambda: SparseNewton(DiagonalHessian(), subproblem.Greedy(), stationary=True),
    "obs": lambda: SparseNewton(FullHessian(), subproblem.Greedy(), stationary=True, nested=1),
    "woodfisher": lambda: SparseNewton(EmpiricalFisher(), subproblem.Greedy(), stationary=True),
    "woodtaylor": lambda: SparseNewton(EmpiricalFisher(), subproblem.Greedy(), nested=1),
    "obc": lambda: SparseNewton(FullHessian(), subproblem.Greedy(), nested=1),
    # Convergent from any start.
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
