"""The pattern of every layer, group and round, and the sparsity that patterns ask for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from iobs.core.column_groups import Groups
from iobs.core.grids import entries_of, on_grid_of
from iobs.core.patterns import NM, Grid, Pattern, Rate, Unstructured, as_pattern
from iobs.errors import LayerSelectionError, PatternError
from iobs.pruning.coverage import Reason
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.selection import Selection
from iobs.pruning.recipe import Rule


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
