"""The pattern of every layer, group and round, and what they add up to."""

from __future__ import annotations

import itertools

from iobs.core.patterns import NM, Pattern, Unstructured, require_pattern
from iobs.errors import PatternError
from iobs.prune.layers import Layer, Selection


def require_fit(selection: Selection, pattern: Pattern) -> None:
    """Every layer fits the pattern, or one error names all that do not.

    Raises:
        PatternError: some do not, or it is no pattern at all.
    """
    require_pattern(pattern)
    misfits, reason = [], ""
    for layer in selection.layers:
        try:
            pattern.groups(layer.shape)
        except PatternError as error:
            misfits.append(f"{layer.name} ({layer.shape[0]} x {layer.shape[1]})")
            reason = str(error)
    if misfits:
        raise PatternError(f"{reason} Layers that do not fit {pattern}: {', '.join(misfits)}.")


def patterns_of_groups(layer: Layer, pattern: Pattern) -> list[Pattern]:
    """The pattern of each group's rows; a layer's exact count is spread evenly over its groups."""
    if layer.groups == 1 or isinstance(pattern, NM) or (isinstance(pattern, Unstructured) and pattern.per == "row"):
        return [pattern] * layer.groups
    keep = pattern.groups(layer.shape).keep
    bounds = [keep * part // layer.groups for part in range(layer.groups + 1)]
    return [Unstructured(keep=high - low) for low, high in itertools.pairwise(bounds)]


def thinner(pattern: Pattern, layer: Layer, share: float) -> Pattern:
    """A share of the sparsity; N:M is all or nothing."""
    if not isinstance(pattern, Unstructured):
        return pattern
    return Unstructured(share_of(pattern, layer) * share, per=pattern.per)


def share_of(pattern: Pattern, layer: Layer) -> float:
    """Share of zeros that a pattern really makes in a layer."""
    groups = pattern.groups(layer.shape)
    return 1 - groups.keep / groups.size


def asked(patterns: dict[Layer, Pattern]) -> float:
    """Share of zeros over all layers."""
    zeros = sum(share_of(pattern, layer) * layer.weights for layer, pattern in patterns.items())
    return zeros / sum(layer.weights for layer in patterns)
