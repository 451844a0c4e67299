"""recipe.yaml of an output directory: the recipe, and a section `run` with the other options of the command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from iobs.core.files import expanded
from iobs.core.patterns import Pattern, Unstructured, share
from iobs.data.documents import CORPORA
from iobs.errors import PatternError, ProblemError, is_a
from iobs.models.factory import is_function_spec
from iobs.models.output import destination
from iobs.pruning.driver import require_numbers
from iobs.pruning.recipe import Changes, Recipe, as_recipe
from iobs.pruning.recipe.settings import changed
from iobs.pruning.recipe.structured import as_structured_recipe
from iobs.pruning.recipe.text import RUN, dumped, pattern_of, plain_pattern, read_yaml

RUN_FILE = "recipe.yaml"


@dataclass(frozen=True)
class RunOptions:
    """Settings of a run besides the recipe.

    Attributes:
        pattern: what to prune to.
        holdout: share of the samples that is held out.
        seed: of every random choice.
        include: names of the layers to prune; None: the usual ones.
        ignore: names of the layers that stay dense.
        data: calibration data; empty: the model's usual ones.
        samples: number of calibration samples.
        seq_len: tokens per sample.
        batch_size: samples per forward pass.
        dtype: of the weights, by name; None: as stored.
        low_memory: one block in memory at a time.
    """

    pattern: Pattern = Unstructured(0.5)  # noqa: RUF009 - frozen
    holdout: float = 0.1
    seed: int = 0
    include: Sequence[str] | None = None
    ignore: Sequence[str] | None = None
    data: Sequence[str] = ()
    samples: int = 128
    seq_len: int = 2048
    batch_size: int = 8
    dtype: str | None = None
    low_memory: bool = False

    def __post_init__(self) -> None:
        """Check the values of a file; on the command line most options are checked when they are read."""
        require_numbers(self.holdout, self.seed)
        for name, least in (("samples", 1), ("seq_len", 2), ("batch_size", 1)):
            value = getattr(self, name)
            if not is_a(Integral, value) or value < least:
                raise ProblemError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        for name in ("include", "ignore", "data"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, [value])
            elif value is not None and not (isinstance(value, (list, tuple)) and is_a(str, *value)):
                raise ProblemError(f"{name} must be a list of texts, got {value!r}.")
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise ProblemError(f"dtype must be a name such as float32, got {self.dtype!r}.")
        if not isinstance(self.low_memory, bool):
            raise ProblemError(f"low_memory must be true or false, got {self.low_memory!r}.")

    @classmethod
    def of(cls, *layers: Mapping[str, Any], judged: bool = True) -> RunOptions:
        """Options from several mappings; the first one that has a value other than None wins.

        Args:
            *layers: the mappings.
            judged: the recipe has gradient steps that held-out samples judge. Otherwise a run in the memory of one
                block holds none out by default, because they need Gram matrices of their own.

        Raises:
            ProblemError: an unknown key.
        """
        known = [one.name for one in fields(cls)]
        found: dict[str, Any] = {}
        for layer in layers:
            unknown = sorted(str(name) for name in layer.keys() - set(known))
            if unknown:
                raise ProblemError(
                    f"The section run of a recipe has no key {', '.join(unknown)}; the keys are {', '.join(known)}."
                )
            found = {**{name: value for name, value in layer.items() if value is not None}, **found}
        if found.get("low_memory") and not judged:
            found.setdefault("holdout", 0.0)
        if "pattern" in found and not hasattr(found["pattern"], "groups"):
            found["pattern"] = pattern_of(found["pattern"])
        return cls(**found)

    def as_dict(self, folder: Path) -> dict[str, Any]:
        """Plain types for a file in a folder; existing files among the data by their path from there."""
        data = [_placed(one, folder) for one in self.data]
        values = {**vars(self), "pattern": plain_pattern(self.pattern), "data": data}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True)
class Asked:
    """Settings of a command: a recipe and the options of the run."""

    recipe: Recipe
    options: RunOptions

    def write(self, folder: Path) -> None:
        """Write recipe.yaml; `iobs prune --recipe` repeats the run from it."""
        values = {**self.recipe.to_dict(complete=True), RUN: self.options.as_dict(destination(folder))}
        text = dumped(values)
        (folder / RUN_FILE).write_text(text, encoding="utf8")


def read_recipe(
    name: str, changes: Changes, settings: Sequence[str], units: bool = False
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe of a name or a file, with the changes and the settings KEY=VALUE; and the section `run`.

    The settings come last and all at once, so that `solver.block` fits the solver and `rounds.finetune` the rounds that
    the command line gives. With `units` a name is that of a recipe for whole units.

    Raises:
        ProblemError: there is no such recipe or setting.
    """
    run: dict[str, Any] = {}
    if name.endswith((".yaml", ".yml")):
        values = read_yaml(Path(name))
        run = values.pop(RUN, None) or {}
        if not isinstance(run, dict):
            raise ProblemError(f"The section run of {name} must be lines such as `seed: 0`, got {run!r}.")
        if isinstance(run.get("data"), list):
            run["data"] = [_found(one, expanded(name).parent) if isinstance(one, str) else one for one in run["data"]]
        recipe = Recipe.from_dict(values)
    else:
        recipe = as_structured_recipe(name) if units else as_recipe(name)
    found: dict[str, str] = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ProblemError(f"--set takes KEY=VALUE, such as rounds.count=3; got {setting!r}.")
        if key == "holdout":
            run["holdout"] = _share(text)
        else:
            found[key] = text
    return changed(recipe.but(**changes), found), run


def _placed(source: str, folder: Path) -> str:
    """A data source with the path of its file from a folder, if there is a file."""
    file, colon, function = source.rpartition(":") if is_function_spec(source) else (source, "", "")
    path = expanded(file)
    if source in CORPORA or not path.exists():
        return source
    try:
        return f"{os.path.relpath(path.resolve(), folder.resolve())}{colon}{function}"
    except ValueError:  # another drive
        return f"{path.resolve()}{colon}{function}"


def _found(source: str, folder: Path) -> str:
    """A data source of a recipe in a folder: with the path of its file, if there is a file at its path from there."""
    file, colon, function = source.rpartition(":") if is_function_spec(source) else (source, "", "")
    path = folder / file
    return f"{os.path.normpath(path)}{colon}{function}" if source not in CORPORA and path.exists() else source


def _share(text: str) -> float:
    try:
        return share(text)
    except PatternError:
        raise ProblemError(f"holdout must be a number in [0, 1), got {text!r}.") from None
