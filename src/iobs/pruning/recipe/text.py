"""Recipes as plain types and as YAML, and their fields set from text as by `--set KEY=VALUE`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from iobs.core.files import expanded
from iobs.core.patterns import Grid, Pattern, Rate, SparseGrid, Unstructured, as_pattern, share
from iobs.errors import PatternError, ProblemError, is_a
from iobs.pruning.recipe.parts import NETWORK_SOLVERS, Allocation, BlockFit, FineTune, Rounds, Rule, as_allocation
from iobs.pruning.report import JsonObject
from iobs.solvers import REFINEMENTS, SOLVERS

if TYPE_CHECKING:
    from iobs.pruning.recipe import Recipe

R = TypeVar("R")
RUN = "run"  # section of a file in an output directory: what the command was given besides the recipe
_PACKAGE = __name__.rpartition(".")[0]
NAMED: dict[str, Callable[..., object]] = {**SOLVERS, **REFINEMENTS, **NETWORK_SOLVERS}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML with the numbers of version 1.2: 1e-3 is a number, and 2:4 is text, not 124 by base 60; 50% is 0.5."""


_NUMBERS = {"int": r"[-+]?(0|[1-9][0-9]*)$", "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), [*"+-.0123456789"])

_Loader.add_implicit_resolver("!share", re.compile(r"[0-9]+(\.[0-9]*)?%$"), [*"0123456789"])
_Loader.add_constructor("!share", lambda loader, node: share(node.value))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """YAML that quotes every text that version 1.1 or 1.2 reads as something else."""


_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}


def to_dict(recipe: object, complete: bool = False) -> JsonObject:
    """`Recipe.to_dict`."""
    values: JsonObject = plain(recipe, complete, _refuse)
    return values


def describe_part(part: object, describe: Callable[[object], str] = repr) -> JsonObject:
    """All fields in plain types; functions and unknown objects are replaced by a description."""
    values: JsonObject = plain(part, True, describe)
    return values


def recipe_as_text(recipe: object) -> str:
    """The fields that differ from the defaults as YAML; functions by their names."""
    values = plain(recipe, False, lambda value: getattr(value, "__qualname__", None) or repr(value))
    return "Recipe\n" + "".join(f"  {line}\n" for line in dump_yaml(values or {"solver": "admm"}).splitlines())


def dump_yaml(values: Mapping[str, object]) -> str:
    """Plain types as YAML that `read_yaml` reads back."""
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def read_yaml(source: str | Path) -> JsonObject:
    """The mapping in a YAML file or text.

    Raises:
        ProblemError: the file cannot be read, or holds no mapping.
    """
    name = f"{source}" if isinstance(source, Path) else "The text"
    try:
        text = expanded(source).read_text(encoding="utf8") if isinstance(source, Path) else source
        values = yaml.load(text, _Loader)
    except OSError as error:
        raise ProblemError(f"The recipe {source} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or an impossible date
        raise ProblemError(f"{name} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ProblemError(f"{name} holds no recipe: a recipe is lines such as `solver: admm`, got {values!r}.")
    return values


def from_dict(kind: type[R], values: Mapping[str, object]) -> R:
    """`Recipe.from_dict`; `kind` is the class of recipes."""
    parts: JsonObject = dict(values)
    kinds: dict[str, Mapping[str, Callable[..., object]]]
    kinds = {"solver": {**SOLVERS, **NETWORK_SOLVERS}, "refine": REFINEMENTS}
    for name in kinds.keys() & parts.keys():
        parts[name] = _solver(parts[name], kinds[name])
    if "rounds" in parts:
        rounds = parts["rounds"]
        rounds = dict(rounds) if isinstance(rounds, Mapping) else {"count": rounds}
        rounds["finetune"] = _finetune(rounds.get("finetune"), "rounds.finetune")
        parts["rounds"] = _build(Rounds, rounds, "rounds")
    if "finetune" in parts:
        parts["finetune"] = _finetune(parts["finetune"], "finetune")
    for name, part in (("allocation", Allocation), ("blocks", BlockFit)):
        if isinstance(parts.get(name), Mapping):
            parts[name] = _build(part, parts[name], name)
    if "rules" in parts:
        if not isinstance(parts["rules"], (list, tuple)):
            raise ProblemError(f"rules must be a list of mappings, got {parts['rules']!r}.")
        parts["rules"] = tuple(_rule(rule) for rule in parts["rules"])
    recipe: R = _build(kind, parts, "")
    return recipe


def parse_value(text: str) -> Any:
    """A value of YAML; "none" is None."""
    try:
        return None if text.lower() == "none" else yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError):
        return text


def with_settings(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """A copy with fields set from text, as on the command line: {"rounds.count": "3", "finetune.lr": "1e-3"}.

    Only all settings together must be possible, so their order does not matter. `finetune` and `rounds.finetune` start
    from those of "best" where the recipe has none; "none" removes them.

    Raises:
        ProblemError: there is no such field, or the value is impossible.
    """
    for key in ("rounds", "rounds.count"):
        if key in settings:
            recipe = recipe.but(rounds=parse_value(settings[key]))
    values: dict[str, Any] = plain(recipe, True, lambda value: value)
    for key in sorted(settings.keys() - {"rounds", "rounds.count"}, key=lambda key: (key.count("."), key)):
        *path, last = key.split(".")
        part = values
        for depth, name in enumerate(path):
            part[name] = part = _as_mapping(recipe, name, _field(part, name, key), depth)
        _field(part, last, key)
        part[last] = None if last == "finetune" and settings[key].lower() == "false" else parse_value(settings[key])
    return type(recipe).from_dict(values)


def _field(part: Mapping[str, Any], name: str, key: str) -> Any:
    names = [field for field in part if field != "name"]  # which says what kind of solver the others belong to
    if name not in names:
        fields_here = f"; here the fields are {', '.join(names)}" if names else ""
        raise ProblemError(f"A recipe has no field {key!r} ({name!r} is unknown{fields_here}).")
    return part[name]


def _as_mapping(recipe: Recipe, name: str, value: Any, depth: int) -> dict[str, Any]:
    """A field as a mapping of its own fields; empty where it has none."""
    if value is None and name == "finetune":
        best = type(recipe).preset("best")
        value = best.rounds.finetune if depth else best.finetune
    elif value is None and name == "blocks":
        value = BlockFit()
    elif isinstance(value, str) and name == "allocation":
        value = as_allocation(value)
    elif isinstance(value, str) and name in ("solver", "refine"):
        type(recipe)(**{name: value})  # type: ignore[arg-type]  # says if it is unknown
        if value not in NAMED:
            raise ProblemError(
                f"The {name} {value!r} takes no options from text; give an object with options in Python."
            )
        value = NAMED[value]()
    inner = plain(value, True, lambda part: part)
    return inner if isinstance(inner, dict) else {}


def _build(kind: type, values: Mapping[str, object], where: str) -> Any:
    keys = [field.name for field in fields(kind)]
    unknown = [name for name in values if name not in keys]
    if unknown:
        place = f"{where} of a recipe" if where else "A recipe"
        raise ProblemError(f"{place} has no key {', '.join(map(repr, unknown))}; the keys are {', '.join(keys)}.")
    try:
        return kind(**values)
    except TypeError as error:
        raise ProblemError(f"{where or 'The recipe'} cannot be read: {error}.") from None


def _finetune(value: object, where: str) -> FineTune | None:
    if value is None or isinstance(value, FineTune):
        return value
    if not isinstance(value, Mapping):
        raise ProblemError(f"{where} must be a mapping such as {{steps: 100, lr: 0.001}}, got {value!r}.")
    step: FineTune = _build(FineTune, value, where)
    return step


def _rule(value: object) -> Rule:
    if isinstance(value, Rule):
        return value
    if not isinstance(value, Mapping) or "match" not in value:
        raise ProblemError(f"A rule is a mapping with the key match, got {value!r}.")
    entries = dict(value)
    if isinstance(entries.get("pattern"), Mapping):
        entries["pattern"] = parse_pattern(entries["pattern"])
    if "solver" in entries:
        entries["solver"] = _solver(entries["solver"], SOLVERS)
    rule: Rule = _build(Rule, entries, "a rule")
    return rule


def _solver(value: object, kinds: Mapping[str, Callable[..., object]]) -> Any:
    """A solver or refinement from its name, or from a mapping of its name and options."""
    if not isinstance(value, Mapping):
        return value
    options = dict(value)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in kinds:
        raise ProblemError(f"A solver with options needs a name: one of {', '.join(kinds)}; got {name!r}.")
    try:
        return kinds[name](**options)
    except TypeError as error:
        raise ProblemError(f"The solver {name!r} does not take these options: {error}.") from None


def _refuse(value: object) -> str:
    raise ProblemError(
        f"{value!r} has no YAML form: name a built-in solver, loss or augmentation, or keep this recipe in Python."
    )


def plain(value: object, complete: bool, describe: Callable[[object], object]) -> Any:
    """A part of a recipe in plain types; `describe` is called with what has no plain form."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):  # of numpy, too
        return float(value)
    if isinstance(value, (tuple, list)):
        return [plain(entry, complete, describe) for entry in value]
    if isinstance(value, dict):
        return {key: plain(entry, complete, describe) for key, entry in value.items()}
    if hasattr(value, "groups"):
        try:
            return plain_pattern(value)
        except ProblemError:  # a pattern of the user
            return describe(value)
    if isinstance(value, Rule):
        return _fields(value, False, describe)
    name = next((name for name, kind in NAMED.items() if type(value) is kind), None)
    if name is not None:
        return {"name": name, **_fields(value, complete, describe)}
    if is_dataclass(value) and type(value).__module__.startswith(_PACKAGE):
        return _fields(value, complete, describe)
    return describe(value)


def _fields(value: Any, complete: bool, describe: Callable[[object], object]) -> JsonObject:
    entries = {}
    for field in fields(value):
        entry = getattr(value, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if complete or entry != default:
            entries[field.name] = plain(entry, complete, describe)
    return entries


def plain_pattern(pattern: Pattern) -> float | str | JsonObject:
    """A pattern as a sparsity, as fields, or as text that `core.patterns.parse` reads."""
    if isinstance(pattern, SparseGrid):
        entries = plain_pattern(pattern.pattern)
        return {"entries": entries, "grid": str(pattern.grid)}
    if isinstance(pattern, Rate) and pattern.zeros is not None:
        return {"entries": plain_pattern(pattern.zeros), "rate": float(pattern.bits)}
    if not isinstance(pattern, Unstructured):
        text = str(pattern)
        with suppress(PatternError):
            if as_pattern(text) == pattern:
                return text
        return _refuse(pattern)
    if pattern.per == "layer" and pattern.sparsity is not None:
        return float(pattern.sparsity)
    return {name: value for name, value in vars(pattern).items() if value is not None}


def parse_pattern(value: float | str | Mapping[str, object]) -> Any:
    """The pattern of `plain_pattern`."""
    if isinstance(value, Mapping) and "grid" in value:
        grid, entries = as_pattern(str(value["grid"])), value.get("entries")
        if not isinstance(grid, Grid) or not isinstance(entries, (float, str, Mapping)) or len(value) > 2:
            raise ProblemError(f"A pattern on a grid is {{entries: 0.5, grid: int4/128}}, got {dict(value)!r}.")
        return parse_pattern(entries) & grid
    if isinstance(value, Mapping) and "rate" in value:
        bits, entries = value["rate"], value.get("entries")
        if not is_a(Real, bits) or not isinstance(entries, (int, float, str, Mapping)) or len(value) > 2:
            raise ProblemError(f"Zeros and a rate are {{entries: 0.5, rate: 3.0}}, got {dict(value)!r}.")
        return parse_pattern(entries) & Rate(bits)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return _build(Unstructured, value, "pattern")
    return as_pattern(value)
