"""Recipes for patterns that remove whole units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from iobs.errors import ProblemError
from iobs.pruning.recipe.parts import FineTune
from iobs.pruning.recipe.recipe import Recipe, as_recipe
from iobs.solvers.families import GRID_SOLVERS, SOLVERS, UNIT_SOLVERS

_OF_ENTRIES = tuple(kind for kind in (*SOLVERS.values(), *GRID_SOLVERS.values()) if isinstance(kind, type))

# One projection that repairs the residual stream, with the bias as a free column. "best" adds gradient steps on the KL
# divergence to the dense network, in eval mode. Batch norms keep their statistics, which the exact refit relies on.
_ONE_SHOT = Recipe(target="residual", damping=1e-3)
_FINETUNE = FineTune(
    lr="auto",
    optimizer="adam",
    steps=300,
    most_steps=1500,
    loss="kl",
    decay=True,
    batch_size="auto",
    augment="auto",
    parameters="all",
    support="fixed",
)
STRUCTURED = {
    "one-shot": _ONE_SHOT,
    "fast": replace(_ONE_SHOT, allocation="auto"),
    "best": replace(_ONE_SHOT, allocation="auto", finetune=_FINETUNE),
}


def as_structured_recipe(recipe: Recipe | str | Path) -> Recipe:
    """The recipe of a run that removes units: "one-shot", "fast" or "best" for units, a `Recipe`, or a YAML file.

    Raises:
        ProblemError: the recipe has no form for units.
    """
    if isinstance(recipe, str) and recipe in STRUCTURED:
        return STRUCTURED[recipe]
    if recipe == "paper":
        raise ProblemError(f'The recipe "{recipe}" has no form for whole units: use "fast" or "best".')
    return as_recipe(recipe)


def require_structured(recipe: Recipe) -> None:
    """Raise unless a recipe can remove whole units.

    Raises:
        ProblemError: it names a setting or a solver that only zeros have.
    """
    reasons = {
        "rounds": recipe.rounds.count > 1,
        "blocks": recipe.blocks is not None,
        "rules": bool(recipe.rules),
        "keep_zeros": recipe.keep_zeros,
        "a solver of the whole network": recipe.network_solver is not None,
    }
    refused = [name for name, applies in reasons.items() if applies]
    if refused:
        raise ProblemError(f"Structured removes units once, layer after layer; leave out {', '.join(refused)}.")
    solver, names = recipe.solver, ", ".join(UNIT_SOLVERS)
    if solver not in ("admm", *UNIT_SOLVERS) if isinstance(solver, str) else isinstance(solver, _OF_ENTRIES):
        raise ProblemError(f"The solver {solver!r} does not choose whole units; leave it out, or give one of {names}.")
