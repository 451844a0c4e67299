"""Choices under one cost against brute force."""

import itertools

import pytest
import torch

from iobs.pruning.widths.knapsack import best_choices


@pytest.mark.parametrize("seed", range(20))
def test_choices_equal_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 40, (4, 6), generator=generator).tolist()
    effects = torch.rand(4, 6, generator=generator).tolist()
    total = 60 + 5 * seed
    found = best_choices(costs, effects, total)
    every = [
        (sum(effects[layer][one] for layer, one in enumerate(choice)), choice)
        for choice in itertools.product(range(6), repeat=4)
        if sum(costs[layer][one] for layer, one in enumerate(choice)) <= total
    ]
    assert sum(effects[layer][one] for layer, one in enumerate(found)) == pytest.approx(min(every)[0])


def test_large_totals_are_never_exceeded():
    generator = torch.Generator().manual_seed(0)
    costs = torch.randint(1000, 10**6, (9, 7), generator=generator).tolist()
    effects = torch.rand(9, 7, generator=generator).tolist()
    for total in (10**6, 3_141_592, 5 * 10**6):
        found = best_choices(costs, effects, total)
        spent = sum(own[one] for own, one in zip(costs, found, strict=True))
        assert spent <= total or found == [own.index(min(own)) for own in costs]
