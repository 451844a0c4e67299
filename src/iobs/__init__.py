"""iobs: minimise a loss under a hard sparsity constraint, with second-order information.

Names are imported on first use: `import iobs` is quick, pruning loads no scikit-learn, regression no transformers.
"""

from iobs import openmp as _openmp  # noqa: F401 - sets how threads wait, before anything loads torch
from iobs.core.late import lazy_names as _lazy_names
from iobs.registration import register as _register

_register()

__version__ = "0.1.0"
# Pages name functions of these rooms by their place, as `iobs.solvers.solve_many`.
_ROOMS = ("data", "evaluate", "exports", "inference", "models", "pruning", "solvers", "vocabulary")
__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, _ROOMS)
