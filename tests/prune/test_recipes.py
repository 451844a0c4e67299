"""Recipes as a whole on small networks: they run, count exactly, say what they picked, and never lose to one shot."""

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import ProblemError
from iobs.prune.settings import RECIPES, resolve


def network():
    generator = torch.Generator().manual_seed(11)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    inputs = torch.randn(120, 16, generator=generator)
    return model, [(part, model(part).argmax(1).detach()) for part in inputs.split(40)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_keep_the_asked_count(recipe):
    model, data = network()
    report = iobs.prune(model, data, iobs.Unstructured(0.7), recipe=recipe)
    total = 16 * 24 + 24 * 12 + 12 * 4
    assert sum(row.zeros for row in report.audit) >= round(0.7 * total) - 2  # a half per layer, where each is rounded
    chosen = report.best
    assert chosen.asked == pytest.approx(0.7, abs=2e-3)


def test_best_says_what_it_picked_and_keeps_the_best():
    model, data = network()
    report = iobs.prune(model, data, iobs.Unstructured(0.8), recipe="best")
    story = " ".join(report.notes)
    assert "Estimated time" in story
    assert "learning rate" in story
    assert "first projection leaves" in story
    assert report.best.loss_heldout <= report.rounds[0].loss_heldout
    assert [record.kind for record in report.rounds].count("polish") == 2  # in full, and as short as its trials
    assert len(report.rounds[-1].step_losses) < len(report.rounds[-2].step_losses)
    assert "auto" not in (report.settings["polish"]["lr"], report.settings["polish"]["optimizer"])


def test_best_leaves_patterns_that_fix_every_layer_alone():
    model, data = network()
    report = iobs.prune(model, data, iobs.NM(2, 4), recipe="best")
    assert not report.allocation
    assert all(row.zeros == row.shape[0] * row.shape[1] // 2 for row in report.audit)


def test_explicit_arguments_override_a_recipe():
    settings = resolve("best", {"rounds": 3, "allocation": "uniform", "target": "current"})
    assert (settings.rounds, settings.allocation, settings.target) == (3, "uniform", "current")
    assert settings.step == RECIPES["best"]["step"]
    assert resolve(None, {"rounds": 4}).step == RECIPES["best"]["step"]
    assert resolve("best", {"rounds": 1}).polish == RECIPES["best"]["polish"]
    assert resolve(None, {"rounds": 1}).polish is None


def test_targets_that_contradict_the_inputs():
    with pytest.raises(ProblemError, match="imitates outputs"):
        resolve("best", {"inputs": "dense"})


def test_unknown_recipe():
    with pytest.raises(ProblemError, match="no recipe"):
        resolve("quick", {})
