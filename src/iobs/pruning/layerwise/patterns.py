"""The pattern of every layer, group and round, and the sparsity that patterns ask for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from iobs.core.column_groups import Groups
from iobs.core.grids import codes_and_scales, entries_of, grid_of, on_grid_of, over_columns, snapped
from iobs.core.integers import Integers
from iobs.core.patterns import NM, Grid, Pattern, Rate, Unstructured, as_pattern
from iobs.core.quadratic import Solution
from iobs.errors import LayerSelectionError, PatternError, ProblemError
from iobs.pruning.coverage import Reason
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.selection import Selection
from iobs.pruning.recipe import LayerSettings, Rule
from iobs.solvers import Solver
from iobs.solvers.admm import ADMM
from iobs.solvers.families import ENTRIES, GRID_SOLVERS, RATE_SOLVERS, SOLVERS, UNIT_SOLVERS, family_of
from iobs.solvers.gridded.baselines import GPTQ
from iobs.solvers.gridded.search import GridSearch
from iobs.solvers.successive_rounding import SuccessiveRounding


def patterns_of(
    selection: Selection, pattern: Pattern, rules: Sequence[Rule]
) -> tuple[Selection, dict[Layer, Pattern]]:
    """Apply the rules of a recipe to a selection.

    Returns:
        The selection without layers that a rule leaves dense, and the pattern of every remaining layer. This is the
        pattern of the last matching rule that has one, otherwise `pattern` itself.

    Raises:
        LayerSelectionError: a rule matches no weight matrix, or only matrices that stay dense; or no layer is left.
        PatternError: a pattern does not fit a layer; names all such layers.
    """
    for rule in rules:
        _require_match(rule, selection)
    dense: dict[str, Reason] = {}
    patterns: dict[Layer, Pattern] = {}
    for layer in selection.layers:
        matching = [rule for rule in rules if rule.matches(layer.name)]
        last = next((rule for rule in reversed(matching) if rule.dense or rule.pattern is not None), None)
        if last is not None and last.dense:
            dense[layer.name] = Reason("asked", f"dense by the rule {last.match!r}")
        else:
            patterns[layer] = pattern if last is None else as_pattern(last.pattern)  # type: ignore[arg-type]
    if not patterns:
        raise LayerSelectionError("Nothing is left to prune: the rules leave every layer dense.")
    for distinct in {id(chosen): chosen for chosen in patterns.values()}.values():
        require_fit([layer for layer, chosen in patterns.items() if chosen is distinct], distinct)
    return Selection(tuple(patterns), {**selection.skipped, **dense}), patterns


def _require_match(rule: Rule, selection: Selection) -> None:
    """Raise unless a rule matches a layer, or, if it leaves layers dense, any weight matrix."""
    if any(rule.matches(layer.name) for layer in selection.layers):
        return
    dense = [name for name in selection.skipped if rule.matches(name)]
    if dense and rule.dense:
        return
    if dense:
        raise LayerSelectionError(
            f"The rule {rule.match!r} matches only weights that stay dense: {dense[0]!r} "
            f"({selection.skipped[dense[0]]}). Name them in include= to prune them."
        )
    names = ", ".join(layer.name for layer in selection.layers[:5])
    raise LayerSelectionError(
        f"The rule {rule.match!r} matches none of the model's layers (the first are {names}). "
        'Rules match shell style, "*.mlp.*", or "re:" and a regular expression for the whole name.'
    )


def require_fit(layers: Sequence[Layer], pattern: Pattern) -> None:
    """Raise unless a pattern fits every layer.

    Raises:
        PatternError: it does not; names all layers that it does not fit.
    """
    misfits, reason = [], ""
    for layer in layers:
        try:
            pattern.groups(layer.shape)
        except PatternError as error:
            misfits.append(f"{layer.name} ({layer.shape[0]} x {layer.shape[1]})")
            reason = str(error)
    if misfits:
        raise PatternError(f"{reason} Layers that do not fit {pattern}: {', '.join(misfits)}.")


def patterns_of_groups(layer: Layer, pattern: Pattern) -> list[Pattern]:
    """The pattern of each group's rows; a layer's exact count is spread evenly over its groups."""
    entries = entries_of(pattern)
    whole = isinstance(entries, Unstructured) and entries.per == "layer" and not isinstance(pattern, (Grid, Rate))
    if layer.groups == 1 or not whole:
        return [pattern] * layer.groups
    keep = pattern.groups(layer.shape).keep
    bounds = [keep * part // layer.groups for part in range(layer.groups + 1)]
    return [on_grid_of(pattern, Unstructured(keep=high - low)) for low, high in itertools.pairwise(bounds)]


def rows_compete(pattern: Pattern) -> bool:
    """True if the rows of a layer share a count, so that the weights of their errors decide about zeros."""
    if isinstance(pattern, (Grid, Rate)):  # on a grid all entries are kept; the rows of a rate share their bits
        return isinstance(pattern, Rate)
    entries = entries_of(pattern)
    return not (isinstance(entries, NM) or (isinstance(entries, Unstructured) and entries.per == "row"))


def thinner(pattern: Pattern, layer: Layer, share: float) -> Pattern:
    """The pattern of a layer with its sparsity multiplied by a share, on the same grid.

    N:M patterns and grids that keep all entries are unchanged.
    """
    entries = entries_of(pattern)
    if not isinstance(entries, Unstructured) or isinstance(pattern, (Grid, Rate)):
        return pattern
    return on_grid_of(pattern, Unstructured(share_of(entries, layer) * share, per=entries.per))


def share_of(pattern: Pattern, layer: Layer) -> float:
    """The exact share of zeros that a pattern gives in a layer."""
    if isinstance(pattern, Groups):
        return pattern.zeros(layer.shape) / layer.weights
    groups = pattern.groups(layer.shape)
    return 1 - groups.keep / groups.size


def sparsity_of(patterns: dict[Layer, Pattern]) -> float:
    """The share of zeros over all layers that their patterns ask for."""
    zeros = sum(share_of(pattern, layer) * layer.weights for layer, pattern in patterns.items())
    return zeros / sum(layer.weights for layer in patterns)


# ---- layers whose weights lie on a grid or are coded integers: solvers, stored values, gradient steps that keep both
_S = TypeVar("_S")
_FOR_GRIDS_ALONE = GRID_SOLVERS.keys() - SOLVERS.keys()
_INSTANCES = tuple(kind for kind in GRID_SOLVERS.values() if isinstance(kind, type))


def require_solvable(settings: Mapping[Layer, LayerSettings], patterns: Mapping[Layer, Pattern]) -> None:
    """Raise, before any work, unless the settings of the layers can keep the grids of their patterns.

    Raises:
        ProblemError: a setting cannot keep a grid, or a solver of grids or units has a layer without them.
    """
    for layer, pattern in patterns.items():
        solver = settings[layer].solver
        if isinstance(pattern, Rate):
            _require_rate_solver(solver, settings[layer], pattern)
            continue
        if grid_of(pattern) is None:
            if isinstance(solver, str) and solver in _FOR_GRIDS_ALONE:
                raise ProblemError(
                    f"The solver {solver!r} puts weights on a grid, and the pattern {pattern} of {layer.name!r} has "
                    "none; give a pattern & iobs.Grid(4)."
                )
            units = isinstance(solver, str) and solver in set(UNIT_SOLVERS) - SOLVERS.keys()
            if units and family_of(pattern) is ENTRIES:
                raise ProblemError(
                    f"The solver {solver!r} chooses whole units, and the pattern of {layer.name!r} is {pattern}; "
                    "give iobs.Structured."
                )
            continue
        _require_grid_solver(solver, pattern)
        wrong = {"refine": settings[layer].refine is not None, "keep_zeros": settings[layer].keep_zeros}
        names = ", ".join(name for name, is_set in wrong.items() if is_set)
        if names:
            raise ProblemError(
                f"{names}: cannot keep weights on a grid yet. Leave it out, or prune without a grid; the recipes "
                '"one-shot", "fast" and "best" keep grids.'
            )


def require_coded(model: nn.Module, patterns: Mapping[Layer, Pattern]) -> None:
    """Raise unless every table of an embedding has a rate: other patterns need the inputs of a matrix product.

    Raises:
        PatternError: one has another pattern; names it.
    """
    for layer, pattern in patterns.items():
        if not isinstance(pattern, Rate) and isinstance(model.get_submodule(layer.path), nn.Embedding):
            raise PatternError(
                f"{layer.name!r} is the table of an embedding, which takes a rate such as rate:3.0, not {pattern}. "
                f'Leave it dense by iobs.Rule("{layer.name}", dense=True).'
            )


def require_exact(patterns: Mapping[Layer, Pattern], normed: Collection[str]) -> None:
    """Raise if a layer has a grid whose values weight norm would round.

    Args:
        patterns: of every layer.
        normed: names of the weights that weight norm computes.

    Raises:
        ProblemError: a layer has one.
    """
    for layer, pattern in patterns.items():
        if layer.key in normed and (isinstance(pattern, Rate) or grid_of(pattern) is not None):
            raise ProblemError(
                f"The weight of {layer.name!r} has a weight norm, whose rounding would take it off the grid of "
                f"{pattern}. Make it a plain weight first: iobs.fold(model)."
            )


def _require_rate_solver(solver: object, settings: LayerSettings, pattern: Pattern) -> None:
    """Raise unless the settings of a layer leave its integers to `SuccessiveRounding`."""
    usual = isinstance(solver, (ADMM, SuccessiveRounding)) or solver in ("admm", *RATE_SOLVERS)
    if not usual or settings.refine is not None or settings.keep_zeros:
        raise ProblemError(
            f"The pattern {pattern} is solved by successive rounding alone: leave out solver, refine and keep_zeros; "
            'the recipes "one-shot", "fast" and "best" have none that it does not take.'
        )


def _require_grid_solver(solver: object, pattern: Pattern) -> None:
    """Raise unless a solver puts the weights of a pattern on its grid."""
    solves_grids = solver in GRID_SOLVERS if isinstance(solver, str) else isinstance(solver, (*_INSTANCES, ADMM))
    if not solves_grids:
        names = ", ".join(f'"{name}"' for name in GRID_SOLVERS)
        raise ProblemError(f"The solver {solver!r} cannot put weights on the grid of {pattern}; give one of {names}.")
    if not isinstance(pattern, Grid) and (solver == "gptq" or isinstance(solver, GPTQ)):
        raise ProblemError(f'GPTQ rounds dense weights: use "sparsegpt" for the pattern {pattern}.')


def solver_for(solver: str | Solver, pattern: Pattern, dtype: torch.dtype) -> str | Solver:
    """The solver of a recipe, as it solves a pattern: on a grid `ADMM` becomes the search with its budget.

    Args:
        solver: of the recipe.
        pattern: of the layer.
        dtype: of the layer's weights, which limits coded integers.
    """
    if isinstance(pattern, Rate):
        return SuccessiveRounding(dtype)
    if isinstance(solver, ADMM) and grid_of(pattern) is not None:
        return GridSearch(solver.budget)
    return solver


def solver_without_grid(solver: _S) -> _S | ADMM:
    """The solver for the same layer with free values: `ADMM` in place of a solver that only grids have."""
    named = isinstance(solver, str) and solver in _FOR_GRIDS_ALONE
    return ADMM("fast") if named or isinstance(solver, _INSTANCES) else solver


def stored_weight(solution: Solution, pattern: Pattern, dtype: torch.dtype) -> Tensor:
    """The weights of a solution as they are stored: on a grid, codes times scales of 16 bits in the dtype."""
    grid = grid_of(pattern)
    if isinstance(pattern, Rate):
        steps, factors = solution.stats["steps"], solution.stats["factors"]
        codes = (solution.weight / (factors[:, None] * steps)).round()
        return Integers(codes.to(torch.int16), steps, factors).weight(dtype)
    if grid is None:
        return solution.weight
    return snapped(solution.weight, solution.stats["scales"], grid, dtype)


def free_zeros(masks: dict[str, Tensor], patterns: Mapping[Layer, Pattern]) -> dict[str, Tensor]:
    """Masks of gradient steps in which all entries of dense grids may change: a zero there is one code of many.

    Args:
        masks: by parameter; changed in place.
        patterns: of every layer.
    """
    for layer, pattern in patterns.items():
        if isinstance(pattern, (Grid, Rate)) and layer.key in masks:
            layer.write_into(masks[layer.key], torch.ones(layer.shape, dtype=torch.bool))
    return masks


def is_rounded(patterns: Iterable[Pattern]) -> bool:
    """True if a pattern puts weights on a grid, or makes them coded integers."""
    return any(isinstance(pattern, Rate) or grid_of(pattern) is not None for pattern in patterns)


def rounding_of(
    model: nn.Module, patterns: Mapping[Layer, Pattern], dtype_of: Callable[[Layer], torch.dtype]
) -> GridRounding | None:
    """The rounding of gradient steps to the values that the patterns allow; None if all values are free.

    Args:
        model: see `GridRounding`.
        patterns: see `GridRounding`.
        dtype_of: dtype in which the weights of a layer are stored.
    """
    return GridRounding(model, patterns, dtype_of) if is_rounded(patterns.values()) else None


class GridRounding:
    """Rounding of trained parameters to the grids of the layers in them, with the scales of the current weights.

    Gradient steps change masters, and gradients are those at the rounded values: straight-through estimation. Coded
    integers stay, so that their code does; the steps of their columns follow the masters.

    Args:
        model: its weights lie on their grids.
        patterns: of every layer; layers without a grid are not rounded.
        dtype_of: dtype in which the weights of a layer are stored: the products of integers are exact in it.
    """

    def __init__(
        self, model: nn.Module, patterns: Mapping[Layer, Pattern], dtype_of: Callable[[Layer], torch.dtype]
    ) -> None:
        self._dtype_of = dtype_of
        self._scales: dict[str, list[tuple[Layer, Grid, Tensor]]] = {}
        self._integers: dict[str, list[tuple[Layer, Integers]]] = {}
        for layer, pattern in patterns.items():
            grid = grid_of(pattern)
            if isinstance(pattern, Rate):
                integers = Integers.of(layer.read(model).to(layer.stored(model).dtype))
                assert integers is not None, f"{layer.name} holds no integers times steps"
                self._integers.setdefault(layer.key, []).append((layer, integers))
            if grid is not None:
                dtype = layer.stored(model).dtype
                _, scales = codes_and_scales(layer.read(model).to(dtype), grid)
                self._scales.setdefault(layer.key, []).append((layer, grid, scales))

    def __call__(self, name: str, master: Tensor, dtype: torch.dtype) -> Tensor:
        """The value to store for the master of a parameter, in the dtype of the parameter."""
        if name not in self._scales and name not in self._integers:
            return master
        value = master.to(dtype, copy=True)
        for layer, integers in self._integers.get(name, ()):
            moved = integers.to(master.device).towards(layer.matrix(master), self._dtype_of(layer))
            layer.write_into(value, moved.weight(dtype))
        for layer, grid, scales in self._scales.get(name, ()):
            spread = over_columns(scales, grid, layer.shape[1]).to(master.device)
            codes = (layer.matrix(master) / spread).round_().clamp_(-grid.levels, grid.levels)
            layer.write_into(value, (codes * spread).to(dtype))
        return value
