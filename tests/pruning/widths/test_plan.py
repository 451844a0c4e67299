"""Widths of equal shares: as much of the cost as is allowed stays."""

import itertools

import pytest
from torch import nn, randn

import iobs
from iobs.pruning.widths.knapsack import WidthChoice, equal_shares


class Chain:
    """The multiplications of layers in a row, whose widths are the sites."""

    def __init__(self, dense):
        self.dense = dense

    def of(self, widths):
        own = [4, *({**self.dense, **widths}[name] for name in self.dense), 4]
        return sum(first * second for first, second in itertools.pairwise(own))


def chain(*widths):
    """One choice for each tuple of widths, with the effects that choices without curves have."""
    choices = [
        WidthChoice((str(number),), own, tuple((1 - width / own[-1]) ** 2 for width in own))
        for number, own in enumerate(widths)
    ]
    return choices, Chain({choice.sites[0]: choice.widths[-1] for choice in choices})


def test_single_sites_get_wider_where_all_together_cost_too_much():
    choices, cost = chain((8, 16), (8, 16), (8, 16))
    limit = 0.7 * cost.of({})
    found = equal_shares(choices, cost, limit)
    assert sorted(found.values()) != [8, 8, 8]
    assert cost.of(found) <= limit
    for choice in choices:
        assert found[choice.sites[0]] == 16 or cost.of({**found, **choice.at(16)}) > limit


def test_single_sites_get_wider_by_one_step():
    choices, cost = chain((8, 16), (8, 16), tuple(range(1, 17)))
    assert cost.of({"0": 8, "1": 8, "2": 16}) < 300 < cost.of({"0": 16, "1": 8, "2": 12})
    assert equal_shares(choices, cost, 300) == {"0": 8, "1": 8, "2": 13}


def test_fine_widths_keep_equal_shares():
    choices, cost = chain(*[tuple(range(1, 101))] * 3)
    found = equal_shares(choices, cost, 0.5 * cost.of({}))
    assert len({*found.values()}) == 1


@pytest.mark.parametrize("share", [0.3, 0.4])
def test_network_of_one_shot_keeps_what_the_next_width_allows(share):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    batches, pattern = [randn(64, 16)], iobs.Structured(share, multiple_of=16)
    report = iobs.prune(model, batches, pattern, "one-shot")
    widths, dense = [model[0].out_features, model[2].out_features], 16 * 32 + 32 * 32 + 32 * 4
    assert report.costs[0].share == pytest.approx((16 * widths[0] + widths[0] * widths[1] + 4 * widths[1]) / dense)
    assert sorted(widths) == [16, 32]
