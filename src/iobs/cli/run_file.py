"""recipe.yaml of an output directory: the recipe, and a section `run` with the other options of the command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from iobs.core.files import expanded
from iobs.core.formats import as_seconds
from iobs.core.patterns import Pattern, Unstructured, share
from iobs.core.specs import is_function_spec
from iobs.data.text import CORPORA
from iobs.errors import PatternError, ProblemError, is_a
from iobs.models.output import destination
from iobs.pruning.driver import require_numbers
from iobs.pruning.recipe import Changes, Recipe, as_recipe, as_structured_recipe
from iobs.pruning.recipe.parts import require_count, require_flag
from iobs.pruning.recipe.text import RUN, dump_yaml, parse_pattern, plain_pattern, read_yaml, with_settings

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
        within: time that the run may take, in seconds or as text; None: as the recipe says.
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
    within: float | str | None = None

    def __post_init__(self) -> None:
        """Check the values of a file; on the command line most options are checked when they are read."""
        require_numbers(self.holdout, self.seed)
        for name, least in (("samples", 1), ("seq_len", 2), ("batch_size", 1)):
            require_count(name, getattr(self, name), least)
        for name in ("include", "ignore", "data"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, [value])
            elif value is not None and not (isinstance(value, (list, tuple)) and is_a(str, *value)):
                raise ProblemError(f"{name} must be a list of texts, got {value!r}.")
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise ProblemError(f"dtype must be a name such as float32, got {self.dtype!r}.")
        require_flag("low_memory", self.low_memory)
        _ = self.seconds  # raises for a text that is no time

    @property
    def seconds(self) -> float | None:
        """Seconds that the run may take, or None."""
        return None if self.within is None else as_seconds(self.within)

    @classmethod
    def of(cls, *sources: Mapping[str, Any], judged: bool = True) -> RunOptions:
        """Options from several mappings; the first one that has a value other than None wins.

        Args:
            *sources: the mappings.
            judged: the recipe has gradient steps that held-out samples judge. Otherwise a run in the memory of one
                block holds none out by default, because they need Gram matrices of their own.

        Raises:
            ProblemError: an unknown key.
        """
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for source in reversed(sources):
            unknown = sorted(str(name) for name in source.keys() - set(names))
            if unknown:
                raise ProblemError(
                    f"The section run of a recipe has no key {', '.join(unknown)}; the keys are {', '.join(names)}."
                )
            values |= {name: value for name, value in source.items() if value is not None}
        if values.get("low_memory") and not judged:
            values.setdefault("holdout", 0.0)
        if "pattern" in values and not hasattr(values["pattern"], "groups"):
            values["pattern"] = parse_pattern(values["pattern"])
        return cls(**values)

    def as_dict(self, folder: Path) -> dict[str, Any]:
        """Plain types for a file in a folder; existing files among the data by their path from there."""
        data = [_relative_to(folder, source) for source in self.data]
        values = {**vars(self), "pattern": plain_pattern(self.pattern), "data": data}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True)
class RunSettings:
    """Settings of a command: a recipe and the options of the run."""

    recipe: Recipe
    options: RunOptions

    def write(self, folder: Path) -> None:
        """Write recipe.yaml; `iobs prune --recipe` repeats the run from it."""
        values = {**self.recipe.to_dict(complete=True), RUN: self.options.as_dict(destination(folder))}
        (folder / RUN_FILE).write_text(dump_yaml(values), encoding="utf8")


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
            folder = expanded(name).parent
            run["data"] = [_in_folder(folder, source) if isinstance(source, str) else source for source in run["data"]]
        recipe = Recipe.from_dict(values)
    else:
        recipe = as_structured_recipe(name) if units else as_recipe(name)
    fields_as_text: dict[str, str] = {}
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ProblemError(f"--set takes KEY=VALUE, such as rounds.count=3; got {setting!r}.")
        if key != "holdout":
            fields_as_text[key] = text
            continue
        try:
            run["holdout"] = share(text)
        except PatternError:
            raise ProblemError(f"holdout must be a number in [0, 1), got {text!r}.") from None
    return with_settings(recipe.but(**changes), fields_as_text), run


def _file_of(source: str) -> tuple[str, str]:
    """A data source as its file and the rest, which is ":function" for a function of a file."""
    file, colon, function = source.rpartition(":") if is_function_spec(source) else (source, "", "")
    return file, f"{colon}{function}"


def _relative_to(folder: Path, source: str) -> str:
    """A data source with the path of its file from a folder, if there is a file."""
    file, function = _file_of(source)
    path = expanded(file)
    if source in CORPORA or not path.exists():
        return source
    try:
        return os.path.relpath(path.resolve(), folder.resolve()) + function
    except ValueError:  # another drive
        return f"{path.resolve()}{function}"


def _in_folder(folder: Path, source: str) -> str:
    """A data source of a recipe in a folder: with the path of its file, if there is a file at its path from there."""
    file, function = _file_of(source)
    path = folder / file
    return f"{os.path.normpath(path)}{function}" if source not in CORPORA and path.exists() else source
