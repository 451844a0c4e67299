"""Fields of a recipe set from text, as by `--set KEY=VALUE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from iobs.errors import ProblemError
from iobs.pruning.recipe.allocation import as_allocation
from iobs.pruning.recipe.block_fit import BlockFit
from iobs.pruning.recipe.recipe import Recipe
from iobs.pruning.recipe.text import NAMED, plain, value_of


def changed(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """A copy with fields set from text, as on the command line: {"rounds.count": "3", "finetune.lr": "1e-3"}.

    Only all settings together must be possible, so their order does not matter. `finetune` and `rounds.finetune` start
    from those of "best" where the recipe has none; "none" removes them.

    Raises:
        ProblemError: there is no such field, or the value is impossible.
    """
    for key in ("rounds", "rounds.count"):
        if key in settings:
            recipe = recipe.but(rounds=value_of(settings[key]))
    found: dict[str, Any] = plain(recipe, True, lambda one: one)
    for key in sorted(settings.keys() - {"rounds", "rounds.count"}, key=lambda key: (key.count("."), key)):
        *path, last = key.split(".")
        part = found
        for depth, name in enumerate(path):
            part[name] = part = _opened(name, _field(part, name, key), depth)
        _field(part, last, key)
        part[last] = None if last == "finetune" and settings[key].lower() == "false" else value_of(settings[key])
    return Recipe.from_dict(found)


def _field(part: Mapping[str, Any], name: str, key: str) -> Any:
    known = [one for one in part if one != "name"]  # which says what kind of solver the others belong to
    if name not in known:
        fields_here = f"; here the fields are {', '.join(known)}" if known else ""
        raise ProblemError(f"A recipe has no field {key!r} ({name!r} is unknown{fields_here}).")
    return part[name]


def _opened(name: str, value: Any, depth: int) -> dict[str, Any]:
    """A field as a mapping of its own fields; empty where it has none."""
    if value is None and name == "finetune":
        best = Recipe.preset("best")
        value = best.rounds.finetune if depth else best.finetune
    elif value is None and name == "blocks":
        value = BlockFit()
    elif isinstance(value, str) and name == "allocation":
        value = as_allocation(value)
    elif isinstance(value, str) and name in ("solver", "refine"):
        Recipe(**{name: value})  # type: ignore[arg-type]  # says if it is unknown
        if value not in NAMED:
            raise ProblemError(
                f"The {name} {value!r} takes no options from text; give an object with options in Python."
            )
        value = NAMED[value]()
    inner = plain(value, True, lambda one: one)
    return inner if isinstance(inner, dict) else {}
