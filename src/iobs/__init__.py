"""iobs: minimise a loss under a hard sparsity constraint, with second-order information.

Names are imported on first use: `import iobs` is quick, pruning loads no scikit-learn, regression no transformers.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from iobs import openmp as _openmp  # noqa: F401 - sets how threads wait, before anything loads torch
from iobs.registration import register as _register

if _TYPE_CHECKING:
    from iobs import errors, transformers
    from iobs.core.column_groups import Groups
    from iobs.core.patterns import NM, Budget, Grid, Rate, Unstructured
    from iobs.core.quadratic import FreeBias, Quadratic, Solution
    from iobs.core.structured import Structured
    from iobs.exports import export
    from iobs.inference import accelerate
    from iobs.models import load
    from iobs.models.packed import load_packed, save_packed
    from iobs.optimize import objectives
    from iobs.optimize.bounds.branch_and_bound import certify
    from iobs.optimize.bounds.rashomon import RashomonSet, rashomon_set
    from iobs.optimize.estimators import (
        RiskScore,
        SparseClassifier,
        SparseCox,
        SparseEquations,
        SparseInteractions,
        SparseMultiTaskRegressor,
        SparseRegressor,
        knockoff_filter,
        split_inference,
        stability_selection,
    )
    from iobs.optimize.minimize import MinimizeResult, minimize
    from iobs.pruning import (
        Allocation,
        Callback,
        FineTune,
        Recipe,
        Report,
        Rounds,
        Rule,
        audit,
        fold,
        keep_sparse,
        prune,
    )
    from iobs.pruning.recipe import CBS, CHITA, GlobalMagnitude, WoodFisher
    from iobs.solvers import ADMM, OBC, SparseGPT, solve
    from iobs.vocabulary import reduce_vocabulary

_register()

__version__ = "0.1.0"
__all__ = [
    "ADMM",
    "CBS",
    "CHITA",
    "NM",
    "OBC",
    "Allocation",
    "Budget",
    "Callback",
    "FineTune",
    "FreeBias",
    "GlobalMagnitude",
    "Grid",
    "Groups",
    "MinimizeResult",
    "Quadratic",
    "RashomonSet",
    "Rate",
    "Recipe",
    "Report",
    "RiskScore",
    "Rounds",
    "Rule",
    "Solution",
    "SparseClassifier",
    "SparseCox",
    "SparseEquations",
    "SparseGPT",
    "SparseInteractions",
    "SparseMultiTaskRegressor",
    "SparseRegressor",
    "Structured",
    "Unstructured",
    "WoodFisher",
    "accelerate",
    "audit",
    "certify",
    "errors",
    "export",
    "fold",
    "keep_sparse",
    "knockoff_filter",
    "load",
    "load_packed",
    "minimize",
    "objectives",
    "prune",
    "rashomon_set",
    "reduce_vocabulary",
    "save_packed",
    "solve",
    "split_inference",
    "stability_selection",
    "transformers",
]

_HOMES = {
    "iobs.core.column_groups": ("Groups",),
    "iobs.core.patterns": ("NM", "Budget", "Grid", "Rate", "Unstructured"),
    "iobs.core.quadratic": ("FreeBias", "Quadratic", "Solution"),
    "iobs.core.structured": ("Structured",),
    "iobs.exports": ("export",),
    "iobs.inference": ("accelerate",),
    "iobs.models": ("load",),
    "iobs.models.packed": ("load_packed", "save_packed"),
    "iobs.optimize.bounds.branch_and_bound": ("certify",),
    "iobs.optimize.bounds.rashomon": ("RashomonSet", "rashomon_set"),
    "iobs.optimize.estimators": (
        *("RiskScore", "SparseClassifier", "SparseCox", "SparseEquations", "SparseInteractions"),
        *("SparseMultiTaskRegressor", "SparseRegressor"),
        *("knockoff_filter", "split_inference", "stability_selection"),
    ),
    "iobs.optimize.minimize": ("MinimizeResult", "minimize"),
    "iobs.pruning": (
        *("Allocation", "Callback", "FineTune", "Recipe", "Report"),
        *("Rounds", "Rule", "audit", "fold", "keep_sparse", "prune"),
    ),
    "iobs.pruning.recipe": ("CBS", "CHITA", "GlobalMagnitude", "WoodFisher"),
    "iobs.solvers": ("ADMM", "OBC", "SparseGPT", "solve"),
    "iobs.vocabulary": ("reduce_vocabulary",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = {
    "errors": "iobs.errors",
    "objectives": "iobs.optimize.objectives",
    "transformers": "iobs.transformers",
    # Rooms whose functions pages name by their place, as `iobs.solvers.solve_many`.
    **{
        name: f"iobs.{name}"
        for name in ("data", "evaluate", "exports", "inference", "models", "pruning", "solvers", "vocabulary")
    },
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return _import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'iobs' has no attribute {name!r}")
    value = getattr(_import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
