"""Curves of mixtures of many experts: measured for a few experts of a stack, likened for the others by their loads."""

import copy

import families
import pytest
import torch
from families import prune_directory
from torch import nn
from torch.nn.functional import linear

import iobs
from iobs.models import load
from iobs.pruning.allocation import kin
from iobs.pruning.allocation.counts import Curve
from iobs.pruning.allocation.kin import MEASURED_BLOCKS, measured_shares
from iobs.pruning.allocation.likeness import MEASURED_EXPERTS, Expert, among, measured_experts
from iobs.pruning.allocation.measurements import Measured
from iobs.pruning.allocation.response import Trial
from iobs.pruning.allocation.sensitivity import Planner
from iobs.pruning.calibration.experts import Stack
from iobs.pruning.network.layers import find_layers

RECIPE = iobs.Recipe.preset("one-shot").but(allocation="block", solver="sparsegpt")


class Experts(nn.Module):
    """One expert for each token, some more often than others."""

    def __init__(self, count, width=8):
        super().__init__()
        self.num_experts = count
        self.route = nn.Parameter(torch.randn(count, width) * torch.linspace(0.8, 1.3, count)[:, None])
        self.up = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, width) / width**0.5)

    def forward(self, hidden):
        rows = hidden.flatten(0, -2)
        chosen, found = (rows @ self.route.T).argmax(-1), rows.clone()
        for number in chosen.unique().tolist():
            own = chosen == number
            found[own] += linear(torch.relu(linear(rows[own], self.up[number])), self.down[number])
        return found.view(hidden.shape)


class Mixture(nn.Module):
    def __init__(self, blocks, experts, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Experts(experts, width) for _ in range(blocks))

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def data(count=4, positions=96):
    return [torch.randn(8, positions, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


@pytest.fixture
def names(monkeypatch):
    """Names of the layers whose curves are measured."""
    measure, found = Planner._measure_layer, []

    def named(self, layer, *args):
        found.append(layer.name)
        return measure(self, layer, *args)

    monkeypatch.setattr(Planner, "_measure_layer", named)
    return found


def pruned(model, sparsity=0.5, include="blocks.*.up.*", **options):
    return iobs.prune(model, data(), sparsity, RECIPE, include=include, **options)


def mixture(blocks, experts):
    torch.manual_seed(0)
    return Mixture(blocks, experts)


@pytest.mark.parametrize("count", [1, 6, 7, 8, 128])
def test_measured_experts_are_spread_over_the_loads(count):
    loads = [1.0 + load for load in torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()]
    found = measured_experts(loads)
    assert measured_experts([0.0, *loads, 0.0]) == [place + 1 for place in found]
    assert found == sorted(set(found))
    assert len(found) == min(count, MEASURED_EXPERTS)
    assert {1, count} <= {loads[place] for place in found}


def measured(errors, damage, energy=1.0):
    return Measured(Curve([2, 4], [errors * energy, 0.0], energy), [Trial(errors * energy, damage)])


def test_experts_are_likened_by_their_loads():
    known = [Expert(10.0, measured(0.4, 0.02)), Expert(1000.0, measured(0.1, 0.5, energy=3.0))]
    found = among(known, 100.0, 4)  # half of the way, in logarithms
    assert (found.curve.errors, found.curve.energy) == (pytest.approx([0.2, 0.0]), 1.0)
    assert [found.trials[0].error, found.trials[0].damage] == pytest.approx([0.2, 0.1])
    below, above = among(known, 5.0, 4), among(known, 3000.0, 4)
    assert (below.curve.errors, above.curve.errors) == (pytest.approx([0.4, 0.0]), pytest.approx([0.1, 0.0]))
    assert [below.trials[0].damage, above.trials[0].damage] == pytest.approx([0.01, 1.5])
    assert among(known, 0.0, 4).trials == []  # such an expert gets a typical effect
    assert among([*known, Expert(1.0, measured(0.3, 0.0))], 5.0, 4) == below


@pytest.mark.parametrize(("blocks", "experts"), [(2, 8), pytest.param(7, 7, marks=pytest.mark.slow), (7, 2)])
def test_few_experts_of_a_stack_are_measured_as_the_plan_says(blocks, experts, names):
    model = mixture(blocks, experts)
    report = pruned(model)
    layers = [layer for layer in find_layers(model) if layer.parameter == "up"]
    few = experts <= MEASURED_EXPERTS  # all of them are then measured, in all blocks
    expected = blocks * experts if few else min(blocks, MEASURED_BLOCKS) * MEASURED_EXPERTS
    assert len(names) == expected == round(sum(measured_shares(layers, blocks)))
    assert report.zeros == report.weights // 2
    assert len(report.allocation) == len(layers) == blocks * experts


@pytest.mark.slow
def test_counts_are_nearly_those_of_a_mixture_that_is_measured_whole(monkeypatch, names):
    """Experts of equal weights differ by their tokens and their inputs."""
    model = mixture(2, 10)
    for block in model.blocks:
        block.up.data[:], block.down.data[:] = block.up.data[0], block.down.data[0]
    chosen, solves = {}, {}
    for name in ("few", "all"):
        if name == "all":
            monkeypatch.setattr(kin, "MEASURED_EXPERTS", 100)
        names.clear()
        report = pruned(copy.deepcopy(model), 0.6)
        chosen[name] = torch.tensor([record.chosen for record in report.allocation])
        solves[name] = len(names)
    difference = (chosen["few"] - chosen["all"]).abs()
    assert solves == {"few": 2 * MEASURED_EXPERTS, "all": 2 * 10}
    assert float(difference.mean()) < 0.1
    assert float(difference.mean()) < float((chosen["all"] - 0.6).abs().mean()) / 2  # that of equal shares


def test_grams_of_other_experts_are_not_computed(monkeypatch, names):
    asked = []
    routed = Stack._measure

    def noted(self, experts):
        asked.extend(layer.name for layer in experts)
        return routed(self, experts)

    monkeypatch.setattr(Stack, "_measure", noted)
    model = mixture(2, 8)
    pruned(model)
    assert asked[: len(names)] == names  # the run itself needs the Grams of all
    assert len(asked) == len(names) + 2 * 8


def test_resumed_run_ends_in_the_same_bits(monkeypatch, tmp_path):
    expected = mixture(2, 8)
    pruned(expected)
    measure, left = Planner._measure_layer, [4]

    def stopped(self, *args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return measure(self, *args)

    monkeypatch.setattr(Planner, "_measure_layer", stopped)
    with pytest.raises(KeyboardInterrupt):
        pruned(mixture(2, 8), checkpoint=tmp_path)
    resumed = mixture(2, 8)
    pruned(resumed, checkpoint=tmp_path)
    for name, value in expected.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


@pytest.mark.slow
def test_streamed_mixture_is_divided_as_in_memory(tmp_path, names):
    torch.manual_seed(0)
    sizes = {"head_dim": 8, "num_experts": 8, "moe_intermediate_size": 12}
    config = families.hf.Qwen3MoeConfig(**families.EXPERTS, **sizes)
    families.hf.AutoModelForCausalLM.from_config(config).eval().save_pretrained(tmp_path / "model")
    batches = families.language_batches()
    options = {"solver": "sparsegpt", "allocation": "block", "include": "*.experts.down_proj.*"}
    report = prune_directory(tmp_path / "model", tmp_path / "out", batches, arithmetic=torch.float32, **options)
    streamed, names[:] = [*names], []
    assert len(streamed) == 2 * MEASURED_EXPERTS
    model = load(tmp_path / "model", dtype=torch.float32).module
    whole = iobs.prune(model, batches, 0.5, "one-shot", holdout=0.0, **options)
    assert names == streamed
    assert whole.allocation == report.allocation
    assert [row.zeros for row in whole.audit] == [row.zeros for row in report.audit]
