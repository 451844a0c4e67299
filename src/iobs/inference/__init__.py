"""Pruned models run faster on a CPU: formats of sparse matrices, kernels, and `iobs.accelerate`."""

from iobs.inference.choices import Acceleration, Choice, accelerate
from iobs.inference.formats import FORMATS, StoredMatrix, store
from iobs.inference.modules import StoredConv, StoredLinear

__all__ = ["FORMATS", "Acceleration", "Choice", "StoredConv", "StoredLinear", "StoredMatrix", "accelerate", "store"]
