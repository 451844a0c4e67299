"""Choices of a node against enumeration of its supports: sums of costs, and children that share them out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from iobs.optimize.bounds.choices import Choices


def _supports(choices):
    """All supports of a node."""
    p = choices.roles.size
    supports = set()
    for size in range(choices.most + 1):
        for chosen in itertools.combinations(range(p), size):
            inside = np.isin(np.arange(p), chosen)
            if (
                not (choices.used & ~inside).any()
                and not (inside & ~choices.used & ~choices.free).any()
                and all(inside[choices.members(group)].any() for group in choices.groups)
            ):
                supports.add(chosen)
    return supports


def _random(rng):
    """(choices, costs) with up to three groups; some costs are equal."""
    p, count = int(rng.integers(2, 9)), int(rng.integers(0, 4))
    roles = rng.choice([-3, -2, -1, *range(count)], p).astype(np.int16)
    least = int((roles == -2).sum()) + np.unique(roles[roles >= 0]).size
    costs = rng.integers(0, 6, p).astype(float)
    choices = Choices(roles, least + int(rng.integers(0, 3))).settled([], [])
    return choices, costs


@pytest.mark.parametrize("seed", range(40))
def test_largest_sums_with_and_without_each_feature_equal_enumeration(seed):
    rng = np.random.default_rng(seed)
    for _ in range(8):
        choices, costs = _random(rng)
        sums = {support: costs[list(support)].sum() for support in _supports(choices)}
        largest = max(sums.values())
        assert choices.largest(costs) == largest
        with_it, without = choices.reduced(costs)
        for feature in np.flatnonzero(choices.free):
            inside = max(value for support, value in sums.items() if feature in support)
            outside = max((value for support, value in sums.items() if feature not in support), default=None)
            # Without limit no cost is saved by a feature that may be used anyway.
            assert with_it[feature] == largest - inside, (choices, costs, feature)
            assert outside is None or without[feature] == largest - outside, (choices, costs, feature)


@pytest.mark.parametrize("seed", range(40))
def test_two_children_share_out_the_supports(seed):
    rng = np.random.default_rng(seed)
    for _ in range(8):
        choices, _ = _random(rng)
        parts = [choices.members(group) for group in choices.groups]
        parts += [np.flatnonzero(choices.plain)] if choices.room and choices.plain.any() else []
        if not parts:
            continue
        part = parts[rng.integers(len(parts))]
        features = np.isin(
            np.arange(choices.roles.size), rng.choice(part, rng.integers(1, part.size + 1), replace=False)
        )
        one, none = choices.with_group(features), choices.settled([], features)
        children = [set() if child is None else _supports(child) for child in (one, none)]
        everything = _supports(choices)
        assert children[0] == {support for support in everything if features[list(support)].any()}
        assert children[1] == everything - children[0]
        for child in (one, none):
            assert child is None or child.room >= 0
