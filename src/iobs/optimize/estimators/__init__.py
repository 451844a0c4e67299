"""scikit-learn estimators with exactly k features: regression and classification; inference about their choice.

Names are imported on first use: a regression loads neither knockoffs nor graphs of covariances.
"""

from iobs.core.late import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)
