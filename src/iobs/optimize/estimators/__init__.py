"""scikit-learn estimators with exactly k features: regression (squared or Poisson loss) and classification."""

from iobs.optimize.estimators.classifier import SparseClassifier
from iobs.optimize.estimators.regressor import SparseRegressor

__all__ = ["SparseClassifier", "SparseRegressor"]
