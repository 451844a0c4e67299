"""Block reconstruction: exact zeros, lower errors, exact repeats, and an undo that works."""

import copy
from functools import partial

import pytest
import torch
from families import LANGUAGE_MODELS, language_batches
from menagerie import build
from torch import nn

import iobs
from iobs.core.patterns import NM, Unstructured
from iobs.errors import DistributedError, ProblemError
from iobs.pruning.calibration.losses import kl_to, mean_loss
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import evaluating
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.pruning.reconstruction import fits, growing, next_start
from iobs.pruning.runtime.ranks import Ranks
from iobs.pruning.samples.batches import Samples
from iobs.pruning.workspace import Workspace

SHORT = BlockFit(masks=2, steps=6, between=2, lr=3e-3)
SHOT = Recipe(target="residual", solver="sparsegpt")  # a cheap solver: the fits are tested
RECIPE = SHOT.but(blocks=SHORT)


def llama():
    torch.manual_seed(0)
    model = LANGUAGE_MODELS["llama"][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # blocks that change their input
    return model, language_batches(count=8, length=64)  # the whole context: shorter windows would be joined


def distance(model, dense, data):
    with evaluating(model), evaluating(dense), torch.no_grad():
        return mean_loss(model, Samples.of(data), kl_to(dense))


@pytest.mark.parametrize("window", [1, 2])
def test_reconstruction_keeps_counts_and_lowers_the_divergence(window):
    model, data = llama()
    dense, shot = copy.deepcopy(model), copy.deepcopy(model)
    iobs.prune(shot, data, 0.7, SHOT)
    report = iobs.prune(model, data, 0.7, RECIPE.but(blocks=BlockFit(window=window, steps=40, between=4, lr=3e-3)))
    assert report.zeros == sum(round(0.7 * row.weights) for row in report.audit)
    assert distance(model, dense, data) < 0.9 * distance(shot, dense, data)


def test_model_without_gradients_is_projected_only(monkeypatch):
    model, data = llama()
    shot = copy.deepcopy(model)
    kind = type(model.model.layers[0])
    monkeypatch.setattr(kind, "forward", torch.no_grad()(kind.forward))
    fit = BlockFit(masks=1, steps=4, network_steps=4, network_lr=1e-3, last="mse")
    report = iobs.prune(model, data, 0.5, SHOT.but(blocks=fit))
    iobs.prune(shot, data, 0.5, SHOT)
    assert any("computes without gradients" in note for note in report.notes)
    assert report.zeros == sum(round(0.5 * row.weights) for row in report.audit)
    assert all(torch.equal(value, shot.get_parameter(name)) for name, value in model.named_parameters())


def test_unpruned_matrices_keep_their_bits():
    model, data = llama()
    dense = copy.deepcopy(model)
    iobs.prune(model, data, 0.5, RECIPE, ignore="*.gate_proj")
    for name, value in model.named_parameters():
        if "gate_proj" in name or "embed" in name or "head" in name:
            assert torch.equal(value, dense.get_parameter(name)), name
    assert not torch.equal(model.model.norm.weight, dense.model.norm.weight)


def test_two_of_four_holds_in_every_group():
    model, data = llama()
    iobs.prune(model, data, "2:4", RECIPE)
    weight = model.model.layers[1].mlp.up_proj.weight
    assert int((weight.reshape(-1, 4) != 0).sum(1).max()) == 2


@pytest.mark.parametrize("steps", [6, 0])  # with 0 only the fits between projections change norms
def test_same_call_and_resumed_call_give_the_same_bits(steps, tmp_path):
    model, data = llama()
    runs = [copy.deepcopy(model) for _ in range(3)]
    prune = partial(iobs.prune, data=data[:4], pattern=0.5, include=["*.q_proj", "*.down_proj"])
    recipe = RECIPE.but(blocks=BlockFit(masks=2, steps=steps, between=3))
    prune(runs[0], recipe=recipe)
    prune(runs[1], recipe=recipe, checkpoint=tmp_path)
    assert any(tmp_path.iterdir())
    prune(runs[2], recipe=recipe, checkpoint=tmp_path)
    for name, value in runs[0].state_dict().items():
        assert torch.equal(value, runs[1].state_dict()[name])
        assert torch.equal(value, runs[2].state_dict()[name])


def test_harmful_fit_is_undone(monkeypatch):
    model, data = llama()
    shot = copy.deepcopy(model)
    iobs.prune(shot, data, 0.5, SHOT, holdout=0.25)
    monkeypatch.setattr(fits, "_RETREAT", 1.0)
    recipe = RECIPE.but(blocks=BlockFit(masks=1, steps=10, lr=1e6))
    report = iobs.prune(model, data, 0.5, recipe, holdout=0.25)
    assert any("raise the held-out loss" in note for note in report.notes)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, shot.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_network_without_blocks_is_projected_only():
    model, data = build("perceptron")
    other = copy.deepcopy(model)
    report = iobs.prune(model, data, 0.5, RECIPE)
    iobs.prune(other, data, 0.5, SHOT)
    assert sum("No block reconstruction" in note for note in report.notes) == 1
    assert "blocks" not in report.settings["decided"]
    assert torch.equal(model.fc2.weight, other.fc2.weight)


def test_fewer_steps_than_ranks_are_refused_before_any_work(monkeypatch):
    """Eight windows make four batches of a gradient step."""
    model, data = llama()
    data = [{"input_ids": one[:, :16]} for batch in data for one in batch["input_ids"][:, None]][:8]
    monkeypatch.setattr(Workspace, "ranks", Ranks(0, 8))
    with pytest.raises(DistributedError, match=r"8 ranks share \d calibration batches"):
        iobs.prune(model, data, 0.5, RECIPE, holdout=0.0)


@pytest.mark.parametrize("name", ["transformer", "convolutional"])
def test_other_networks_are_reconstructed(name):
    model, data = build(name)
    report = iobs.prune(model, data, 0.5, RECIPE)
    assert all(row.zeros >= row.asked for row in report.audit)


def test_sparsity_grows_to_the_pattern():
    layer = Layer("x", (10, 10))
    shares = [round(one.groups(layer.shape).keep / 100, 2) for one in growing(Unstructured(0.7), layer, 4)]
    assert shares == [0.58, 0.45, 0.35, 0.3]
    assert growing(NM(2, 4), layer, 3) == [NM(3, 4), NM(2, 4)]
    assert growing(NM(2, 4), layer, 1) == [NM(2, 4)]


@pytest.mark.parametrize(("window", "starts"), [(1, [2, 4, 5]), (2, [0, 2]), (3, [0, 0])])
def test_windows_slide_by_one_block_with_layers(window, starts):
    assert [next_start([0, 2, 4], stage, window) for stage in (0, 2, 4)][: len(starts)] == starts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 3}, "must be a BlockFit"),
        ({"blocks": SHORT, "target": "model"}, "dense outputs on pruned inputs"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ProblemError, match=message):
        Recipe().but(**changes)
    with pytest.raises(ProblemError, match="at least 1"):
        BlockFit(window=0)


def test_recipe_with_blocks_survives_yaml():
    recipe = Recipe.preset("best").but(blocks=BlockFit(window=1, lr=1e-3, epochs=0.5))
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_blocks_of_convolutions_alone_have_a_chain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(96, 3)).eval()
    report = iobs.prune(model, [torch.randn(16, 3, 8, 8)] * 2, 0.5, Recipe(target="residual", blocks=SHORT))
    assert report.zeros > 0
