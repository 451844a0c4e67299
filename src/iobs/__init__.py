"""iobs: minimise a loss under a hard sparsity constraint, with second-order information."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from iobs.core.patterns import NM, Unstructured
from iobs.core.quadratic import Quadratic, Solution
from iobs.prune import Allocation, GradientStep, Report, audit, keep_sparse, prune
from iobs.solvers import solve

if TYPE_CHECKING:
    from iobs.models.packed import load_packed, save_packed
    from iobs.optimize import objectives
    from iobs.optimize.estimators import SparseClassifier, SparseRegressor
    from iobs.optimize.minimize import Result, minimize

__version__ = "0.1.0"
__all__ = [
    "NM",
    "Allocation",
    "GradientStep",
    "Quadratic",
    "Report",
    "Result",
    "Solution",
    "SparseClassifier",
    "SparseRegressor",
    "Unstructured",
    "audit",
    "keep_sparse",
    "load_packed",
    "minimize",
    "objectives",
    "prune",
    "save_packed",
    "solve",
]

# Loaded on first use, so that pruning needs no scikit-learn and regression no more than it uses.
_LAZY = {
    "load_packed": "iobs.models.packed",
    "save_packed": "iobs.models.packed",
    "objectives": "iobs.optimize.objectives",
    "minimize": "iobs.optimize.minimize",
    "Result": "iobs.optimize.minimize",
    "SparseRegressor": "iobs.optimize.estimators",
    "SparseClassifier": "iobs.optimize.estimators",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'iobs' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    return module if name == "objectives" else getattr(module, name)
