"""scikit-learn estimators with exactly k features: regression and classification; inference about their choice."""

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
