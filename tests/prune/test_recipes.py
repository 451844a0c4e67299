"""Recipes as a whole on small networks: they run, count exactly, say what they picked, and never lose to one shot."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import ProblemError
from iobs.prune import choices
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
    assert "nats from the dense one" in story
    assert "not searched for" in story


def test_best_searches_where_enough_samples_judge():
    model, data = network()
    more = torch.randn(480, 16, generator=torch.Generator().manual_seed(2)).split(40)
    report = iobs.prune(
        model,
        [*data, *((part, model(part).argmax(1).detach()) for part in more)],
        iobs.Unstructured(0.8),
        recipe="best",
    )
    assert any("judged by 168 answers" in note for note in report.notes)
    assert report.best.loss_heldout <= report.rounds[0].loss_heldout
    assert [record.kind for record in report.rounds].count("polish") == 2  # in full, and as short as its trials
    assert len(report.rounds[-1].step_losses) < len(report.rounds[-2].step_losses)
    assert report.rounds[0].polished_round is None
    for polish in report.rounds[-2:]:  # errors that no polish has measured are said to be the projection's
        assert polish.layers == report.rounds[polish.polished_round].layers
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
    assert resolve("best", {"polish": False, "step": None}) == replace(resolve("best", {}), polish=None)


def test_targets_that_contradict_the_inputs():
    with pytest.raises(ProblemError, match="imitates outputs"):
        resolve("best", {"inputs": "dense"})


def test_unknown_recipe():
    with pytest.raises(ProblemError, match="no recipe"):
        resolve("quick", {})


def test_a_task_loss_that_is_large_on_the_dense_network_is_no_damage():
    model, data = network()
    data = [(inputs, (labels + 1) % 4) for inputs, labels in data]  # every answer is called wrong
    step, polish = (replace(RECIPES["best"][name], loss="task", steps=12) for name in ("step", "polish"))
    report = iobs.prune(model, data, iobs.Unstructured(0.05), recipe="best", step=step, polish=polish)
    assert report.rounds[0].loss_heldout > 1
    assert [record.kind for record in report.rounds].count("projection") == 1


def test_where_every_rate_diverges_the_projection_stays():
    model, data = network()

    def nonsense(module, batch):
        return module(batch[0]).sum() * float("nan") if torch.is_grad_enabled() else module(batch[0]).square().mean()

    polish = iobs.GradientStep(lr="auto", optimizer="auto", steps=12, loss=nonsense, support="fixed")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), polish=polish)
    assert [record.kind for record in report.rounds] == ["projection"]
    assert any("diverges" in note for note in report.notes)
    polish = replace(polish, lr=0.1, optimizer="sgd")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), polish=polish)
    assert [record.kind for record in report.rounds] == ["projection"]
    assert any("left out" in note for note in report.notes)


def test_steps_and_polish_keep_their_own_optimizers():
    model, data = network()
    step = iobs.GradientStep(lr="auto", optimizer="sgd", steps=3, loss="kl")
    polish = iobs.GradientStep(lr="auto", optimizer="adam", steps=12, loss="kl", support="fixed")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=step, polish=polish)
    assert report.settings["step"]["optimizer"] == "sgd"
    assert report.settings["polish"]["optimizer"] == "adam"


@pytest.mark.parametrize(("loss", "polished"), [(1.2, True), (1.3, False)])
def test_a_polish_whose_trials_do_much_harm_is_left_out(monkeypatch, loss, polished):
    tried = {"tried": [("adam", 1e-3, loss), ("momentum", 1e-2, 2.0)], "before": 1.0}
    monkeypatch.setattr(choices, "_tried_out", lambda *_: tried)
    model, data = network()
    polish = iobs.GradientStep(lr="auto", optimizer="auto", steps=20, loss="kl", support="fixed")
    report = iobs.prune(model, data, iobs.Unstructured(0.3), rounds=1, polish=polish)
    assert any(record.kind == "polish" for record in report.rounds) == polished
    assert any(note.startswith("No polish: after 12 steps") for note in report.notes) != polished


def test_growing_sparsity_starts_from_the_dense_weights_without_steps_too():
    model, data = network()
    report = iobs.prune(model, data, iobs.Unstructured(0.8), recipe="fast", rounds=4, schedule="cubic")
    assert report.rounds[1].sparsity == pytest.approx(report.rounds[1].asked, abs=0.02) != 0.8


def test_mixed_samples_do_not_judge_a_task_loss():
    torch.manual_seed(0)
    centres = 3 * torch.randn(4, 3, 8, 8)
    labels = torch.arange(120) % 4
    inputs = centres[labels] + 0.3 * torch.randn(120, 3, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    with torch.no_grad():
        model[1].weight.copy_(centres.flatten(1) / 20)
        model[1].bias.copy_(-centres.flatten(1).square().sum(1) / 40)
    teach = iobs.GradientStep(lr=1e-3, steps=2, loss="kl", augment="auto", batch_size=20)
    report = iobs.prune(
        model,
        [(inputs, labels)],
        iobs.Unstructured(0.5),
        rounds=2,
        step=replace(teach, loss="task", augment=None),
        polish=teach,
    )
    assert report.dense_loss < 0.05


def test_fresh_data_and_a_single_round_use_every_sample():
    model, data = network()
    report = iobs.prune(model, data, iobs.Unstructured(0.3), recipe="best", data="fresh", polish=False)
    assert len(report.rounds) == 1
    assert report.rounds[0].layers[0].inputs == 108


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": iobs.GradientStep()}, "between two rounds"),
        ({"step": iobs.GradientStep(), "recipe": "fast"}, "between two rounds"),
        ({"step": iobs.GradientStep(), "rounds": 2, "schedule": "cubic"}, "three rounds"),
        ({"step": True, "rounds": 2}, "must be a GradientStep"),
        ({"polish": 5}, "must be a GradientStep"),
        ({"rounds": 2.5}, "whole number"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings, message):
    model, data = network()
    with pytest.raises(ProblemError, match=message):
        iobs.prune(model, data, iobs.Unstructured(0.5), **settings)


def test_best_grows_the_sparsity_where_the_damage_is_large(monkeypatch):
    monkeypatch.setattr(choices, "_DAMAGE", 0.0)
    model, data = network()
    report = iobs.prune(model, data, iobs.Unstructured(0.8), recipe="best", rounds=4, polish=False)
    first, *shares = (record.sparsity for record in report.rounds)
    assert len(shares) == 3
    assert shares[0] < shares[1] < shares[2] == first == pytest.approx(0.8, abs=0.01)
    assert any("sparsity grows over the rounds" in note for note in report.notes)
    two = iobs.prune(*network(), iobs.Unstructured(0.8), recipe="best", rounds=2, polish=False)
    assert len(two.rounds) == 1
    assert any("They would pay" in note for note in two.notes)
