"""Curves of deep models: measured in a few blocks, interpolated in the others."""

import math

import pytest
import torch
from torch import nn

import iobs
from iobs.pruning.allocation.counts import Curve
from iobs.pruning.allocation.kin import MEASURED_BLOCKS, measured_blocks
from iobs.pruning.allocation.likeness import between
from iobs.pruning.allocation.measurements import Measured
from iobs.pruning.allocation.response import Trial
from iobs.pruning.allocation.sensitivity import Planner


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


class Deep(nn.Module):
    def __init__(self, count, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 5)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(count))

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


RECIPE = iobs.Recipe.preset("one-shot").but(allocation="block", solver="sparsegpt")


@pytest.mark.parametrize("count", [1, 2, 6, 7, 8, 22, 32, 80])
def test_first_and_last_blocks_are_measured_and_a_few_between(count):
    found = measured_blocks(count)
    assert found == sorted(set(found))
    assert len(found) == min(count, MEASURED_BLOCKS)
    assert {0, count - 1, min(1, count - 1), max(0, count - 2)} <= set(found)


def test_measurements_between_two_equal_ones_are_theirs():
    one = Measured(Curve([1, 4, 10], [0.5, 0.25, 0.0], 2.0), [Trial(0.5, 0.1)])
    found = between(one, one, 0.3, 10)
    assert found.curve.keeps == [1, 4, 10]
    assert found.curve.errors == pytest.approx([0.25, 0.125, 0.0])
    assert found.curve.energy == 1.0
    assert [found.trials[0].error, found.trials[0].damage] == pytest.approx([0.25, 0.1])


def test_measurements_are_mixed_geometrically_by_distance():
    one = Measured(Curve([1, 10], [0.5, 0.0], 1.0), [Trial(0.5, 0.1)])
    other = Measured(Curve([1, 10], [2.0, 0.0], 10.0), [Trial(2.0, 0.4)])
    found = between(one, other, 0.25, 8)
    assert found.curve.keeps == [1, 8]  # the layer has two zeros already
    assert found.curve.errors[0] == pytest.approx(math.exp(0.75 * math.log(0.5) + 0.25 * math.log(0.2)))
    assert found.trials[0].damage == pytest.approx(math.exp(0.75 * math.log(0.1) + 0.25 * math.log(0.4)))


def measured_layers(monkeypatch):
    measure, names = Planner._measure_layer, []

    def named(self, layer, *args):
        names.append(layer.name)
        return measure(self, layer, *args)

    monkeypatch.setattr(Planner, "_measure_layer", named)
    return names


def test_deep_model_is_measured_in_six_blocks_and_keeps_its_exact_count(monkeypatch):
    torch.manual_seed(0)
    names = measured_layers(monkeypatch)
    model, data = Deep(9), [torch.randn(32, 8) for _ in range(4)]
    report = iobs.prune(model, data, 0.5, RECIPE, include="blocks.*")
    assert {int(name.split(".")[1]) for name in names} == set(measured_blocks(9))
    assert len(names) == 2 * MEASURED_BLOCKS
    assert report.zeros == report.weights // 2
    assert len(report.allocation) == 18


def test_divergences_of_the_whole_model_are_measured_for_every_layer(monkeypatch):
    names = measured_layers(monkeypatch)
    iobs.prune(Deep(7), [torch.randn(32, 8) for _ in range(4)], 0.5, RECIPE.but(allocation="kl"))
    assert len(names) == 16


def test_layers_without_kin_are_measured(monkeypatch):
    torch.manual_seed(0)
    names = measured_layers(monkeypatch)
    model = Deep(9)
    model.blocks[6].up, model.blocks[6].down = nn.Linear(8, 24), nn.Linear(24, 8)
    iobs.prune(model, [torch.randn(32, 8) for _ in range(4)], 0.5, RECIPE)
    assert {"first", "last", "blocks.6.up", "blocks.6.down"} <= set(names)
    assert len(names) == 2 * MEASURED_BLOCKS + 4


@pytest.mark.slow
def test_counts_are_nearly_those_of_a_model_that_is_measured_whole(monkeypatch):
    """Blocks of equal weights differ only by their inputs, which change little from block to block."""
    torch.manual_seed(0)
    model, data = Deep(9), [torch.randn(64, 8) for _ in range(4)]
    for block in model.blocks:
        block.load_state_dict(model.blocks[0].state_dict())
        block.down.weight.data *= 0.1
    chosen = {}
    for name in ("few", "all"):
        if name == "all":
            monkeypatch.setattr("iobs.pruning.allocation.kin.measured_blocks", lambda count: [*range(count)])
        copied = Deep(9)
        copied.load_state_dict(model.state_dict())
        report = iobs.prune(copied, data, 0.5, RECIPE, include="blocks.*")
        chosen[name] = torch.tensor([record.chosen for record in report.allocation])
    assert float((chosen["few"] - chosen["all"]).abs().max()) < 0.15
    assert float((chosen["few"] - chosen["all"]).abs().mean()) < 0.04
