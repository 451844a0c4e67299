"""Calibration and evaluation data: text, images, arrays, or batches from a function of the user.

Names are imported on first use: reading a table loads neither torch nor models.
"""

from iobs.core.late import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)
