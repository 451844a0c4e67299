"""scikit-learn estimators with exactly k features: regression and classification; inference about their choice.

Names are imported on first use: a regression loads neither knockoffs nor graphs of covariances.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from iobs.optimize.estimators.classifier import SparseClassifier
    from iobs.optimize.estimators.equations import SparseEquations
    from iobs.optimize.estimators.interactions import SparseInteractions
    from iobs.optimize.estimators.knockoffs import knockoff_filter
    from iobs.optimize.estimators.regressor import SparseMultiTaskRegressor, SparseRegressor
    from iobs.optimize.estimators.risk_score import RiskScore
    from iobs.optimize.estimators.splitting import split_inference
    from iobs.optimize.estimators.stability import stability_selection
    from iobs.optimize.estimators.survival import SparseCox

__all__ = [
    "RiskScore",
    "SparseClassifier",
    "SparseCox",
    "SparseEquations",
    "SparseInteractions",
    "SparseMultiTaskRegressor",
    "SparseRegressor",
    "knockoff_filter",
    "split_inference",
    "stability_selection",
]

_HOMES = {
    "RiskScore": "risk_score",
    "SparseClassifier": "classifier",
    "SparseCox": "survival",
    "SparseEquations": "equations",
    "SparseInteractions": "interactions",
    "SparseMultiTaskRegressor": "regressor",
    "SparseRegressor": "regressor",
    "knockoff_filter": "knockoffs",
    "split_inference": "splitting",
    "stability_selection": "stability",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'iobs.optimize.estimators' has no attribute {name!r}")
    return getattr(_import_module(f"iobs.optimize.estimators.{_HOMES[name]}"), name)
