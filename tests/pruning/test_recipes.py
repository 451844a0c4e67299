"""Recipes on small networks: exact counts, notes on decisions, never worse than one shot."""

from dataclasses import replace

import pytest
import torch
from families import LANGUAGE_MODELS, language_batches
from menagerie import three_layers
from torch import nn

import iobs
from iobs.errors import ProblemError
from iobs.pruning import decisions
from iobs.pruning.recipe import PRESETS, Allocation, BlockFit
from iobs.pruning.runtime import memory

BEST = PRESETS["best"]
ONE_SHOT = iobs.Recipe(target="residual", curvature="auto", allocation=iobs.Allocation("auto", generations=0))
SHORT = BEST.but(
    blocks=BlockFit(masks=2, between=1, steps=2, lr=1e-3, network_steps=2, network_lr=1e-4),
    finetune=replace(BEST.finetune, steps=60, most_steps=None),
)


@pytest.mark.parametrize("recipe", [*({**PRESETS, "best": SHORT}).values()], ids=PRESETS)
def test_recipes_keep_the_requested_count(recipe):
    model, data = three_layers()
    report = iobs.prune(model, data, iobs.Unstructured(0.7), recipe)
    total = 16 * 24 + 24 * 12 + 12 * 4
    assert (
        sum(row.zeros for row in report.audit) >= round(0.7 * total) - 2
    )  # rounding changes the count of a layer by at most half a weight
    chosen = report.best
    assert chosen.asked == pytest.approx(0.7, abs=2e-3)


def test_best_recipe_notes_its_decisions():
    model, data = three_layers()
    report = iobs.prune(model, data, iobs.Unstructured(0.8), SHORT)
    story = " ".join(report.notes)
    assert "Estimated time" in story
    assert "learning rate" in story
    assert "nats from the dense one" in story
    assert "without a search" in story


@pytest.mark.slow
def test_best_recipe_searches_rates_if_samples_suffice():
    model, data = three_layers()
    more = torch.randn(480, 16, generator=torch.Generator().manual_seed(2)).split(40)
    report = iobs.prune(
        model, [*data, *((part, model(part).argmax(1).detach()) for part in more)], iobs.Unstructured(0.8), SHORT
    )
    assert any("judged by 168 outputs" in note for note in report.notes)
    assert report.best.loss_heldout <= report.rounds[0].loss_heldout
    assert [record.kind for record in report.rounds].count(
        "finetune"
    ) == 2  # one of full length, one of the length of the trials
    assert len(report.rounds[-1].step_losses) < len(report.rounds[-2].step_losses)
    assert report.rounds[0].parent is None
    for finetuned in report.rounds[-2:]:  # fine-tuning measures no layer errors: those of the projection are repeated
        assert finetuned.layers == report.rounds[finetuned.parent].layers
    decided, asked = report.settings["decided"]["finetune"], report.settings["recipe"]["finetune"]
    assert "auto" not in (decided["lr"], decided["optimizer"])
    assert asked["lr"] == asked["optimizer"] == "auto"


def test_presets_have_residual_targets_and_fast_fits_blocks_for_one_epoch():
    assert {PRESETS[name].target for name in ("one-shot", "fast", "best")} == {"residual"}
    assert PRESETS["one-shot"] == ONE_SHOT
    fast, best = PRESETS["fast"], PRESETS["best"]
    assert (fast.blocks.masks, fast.blocks.network_steps, fast.rounds.count, fast.finetune) == (1, 0, 1, None)
    assert fast.blocks.within(20).steps == 20
    assert best.blocks.masks > 1
    assert best.blocks.network_steps > best.finetune.steps


def test_best_recipe_takes_network_steps_on_text_and_fine_tuning_on_other_data():
    fit = BlockFit(masks=1, steps=2, lr=1e-3, network_steps=2, network_lr=1e-4)
    recipe = SHORT.but(blocks=fit, allocation="uniform")
    text = LANGUAGE_MODELS["llama"][0](), language_batches(count=4)
    found = {}
    for name, (model, data) in {"text": text, "other": three_layers()}.items():
        report = iobs.prune(model, data, 0.5, recipe)
        decided = report.settings["decided"]
        found[name] = decided["blocks"]["network_steps"], decided["finetune"] is not None, len(report.rounds) > 1
        assert any("take the place of rounds and fine-tuning" in note for note in report.notes) == (name == "text")
    assert found == {"text": (2, False, False), "other": (0, True, True)}


def test_the_only_round_that_is_left_reads_all_samples():
    fit = BlockFit(masks=1, steps=0, network_steps=1, network_lr=1e-4)
    rounds = iobs.Rounds(3, finetune=iobs.FineTune(), data="fresh")
    recipe = iobs.Recipe(solver="magnitude", blocks=fit, rounds=rounds, finetune=iobs.FineTune())
    data = language_batches(count=4)
    report = iobs.prune(LANGUAGE_MODELS["llama"][0](), data, 0.5, recipe)
    assert len(report.rounds) == 1
    assert report.layers[0].inputs == report.settings["samples"] * data[0]["input_ids"].shape[1]


@pytest.mark.parametrize(("steps", "found"), [(0, "by a search"), (2, "by their damages in nats, without a search")])
def test_allocation_searches_unless_steps_of_the_whole_network_follow(steps, found):
    fit = BlockFit(masks=1, steps=0, network_steps=steps, network_lr=1e-4)
    allocation = Allocation("auto", generations=2)
    changes = {"solver": "sparsegpt", "target": "residual", "blocks": fit, "allocation": allocation}
    report = iobs.prune(LANGUAGE_MODELS["llama"][0](), language_batches(count=12), 0.5, iobs.Recipe(**changes))
    assert any(f"Sparsities of layers: {found}" in note for note in report.notes)


def test_best_recipe_does_not_allocate_n_of_m():
    model, data = three_layers()
    report = iobs.prune(model, data, iobs.NM(2, 4), SHORT)
    assert not report.allocation
    assert all(row.zeros == row.shape[0] * row.shape[1] // 2 for row in report.audit)


def test_resolve_lets_arguments_override_a_recipe():
    recipe = BEST.but(rounds=3, allocation="uniform", target="layer")
    assert (recipe.rounds.count, recipe.allocation, recipe.target) == (3, "uniform", "layer")
    assert recipe.rounds == replace(BEST.rounds, count=3)
    assert PRESETS["one-shot"].but(rounds=4).rounds == replace(BEST.rounds, count=4)
    assert BEST.but(rounds=1).rounds == iobs.Rounds()
    assert BEST.but(rounds=1).finetune == BEST.finetune
    assert PRESETS["one-shot"].but(rounds=1) == ONE_SHOT
    assert BEST.but(finetune=None) == replace(BEST, finetune=None)


def test_resolve_refuses_targets_that_contradict_the_inputs():
    with pytest.raises(ProblemError, match='target="residual" corrects the drift'):
        BEST.but(inputs="dense")


def test_resolve_refuses_an_unknown_recipe():
    with pytest.raises(ProblemError, match="no recipe"):
        iobs.Recipe.preset("quick")


def test_best_recipe_measures_damage_relative_to_dense_loss():
    model, data = three_layers()
    data = [(inputs, (labels + 1) % 4) for inputs, labels in data]  # all labels contradict the dense network
    step, last = (replace(one, loss="task", steps=12) for one in (SHORT.rounds.finetune, SHORT.finetune))
    report = iobs.prune(
        model, data, iobs.Unstructured(0.05), "best", rounds=replace(BEST.rounds, finetune=step), finetune=last
    )
    assert report.rounds[0].loss_heldout > 1
    assert [record.kind for record in report.rounds].count("projection") == 1


def test_peak_memory_includes_the_gradient_steps(monkeypatch):
    used = [10]
    monkeypatch.setattr(memory, "resident", lambda: used[0])

    class Steps(iobs.Callback):
        def on_step(self, round_index, done, total, loss):
            used[0] = 1000

        def on_round(self, record):
            used[0] = 20

    model, data = three_layers()
    last = iobs.FineTune(lr=1e-4, steps=3, loss="kl", support="fixed")
    assert iobs.prune(model, data, 0.5, "one-shot", finetune=last, callbacks=[Steps()]).peak_memory_bytes == 1000


def test_projection_is_returned_if_every_rate_diverges():
    model, data = three_layers()

    def nonsense(module, batch):
        return module(batch[0]).sum() * float("nan") if torch.is_grad_enabled() else module(batch[0]).square().mean()

    last = iobs.FineTune(lr="auto", optimizer="auto", steps=12, loss=nonsense, support="fixed")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", finetune=last)
    assert [record.kind for record in report.rounds] == ["projection"]
    assert any("diverges" in note for note in report.notes)
    last = replace(last, lr=0.1, optimizer="sgd")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", finetune=last)
    assert [record.kind for record in report.rounds] == ["projection"]
    assert any("left out" in note for note in report.notes)


def test_steps_and_finetuning_keep_their_own_optimizers():
    model, data = three_layers()
    step = iobs.FineTune(lr="auto", optimizer="sgd", steps=3, loss="kl")
    last = iobs.FineTune(lr="auto", optimizer="adam", steps=12, loss="kl", support="fixed")
    report = iobs.prune(
        model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=step), finetune=last
    )
    assert report.settings["decided"]["rounds"]["finetune"]["optimizer"] == "sgd"
    assert report.settings["decided"]["finetune"]["optimizer"] == "adam"


@pytest.mark.parametrize(("loss", "finetuned"), [(1.2, True), (1.3, False)])
def test_finetuning_is_left_out_if_its_trials_do_harm(monkeypatch, loss, finetuned):
    tried = {"tried": [("adam", 1e-3, loss), ("momentum", 1e-2, 2.0)], "before": 1.0}
    monkeypatch.setattr(decisions, "_losses_of_trials", lambda *_: tried)
    model, data = three_layers()
    last = iobs.FineTune(lr="auto", optimizer="auto", steps=20, loss="kl", support="fixed")
    report = iobs.prune(model, data, iobs.Unstructured(0.3), "one-shot", rounds=1, finetune=last)
    assert any(record.kind == "finetune" for record in report.rounds) == finetuned
    assert any(note.startswith("No fine-tuning: after 12 steps") for note in report.notes) != finetuned


def test_cubic_schedule_starts_dense_without_steps():
    model, data = three_layers()
    report = iobs.prune(model, data, iobs.Unstructured(0.8), "fast", rounds=iobs.Rounds(4, "cubic"))
    assert report.rounds[1].sparsity == pytest.approx(report.rounds[1].asked, abs=0.02) != 0.8


def test_dense_loss_is_not_measured_on_mixed_samples():
    torch.manual_seed(0)
    centres = 3 * torch.randn(4, 3, 8, 8)
    labels = torch.arange(120) % 4
    inputs = centres[labels] + 0.3 * torch.randn(120, 3, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    with torch.no_grad():
        model[1].weight.copy_(centres.flatten(1) / 20)
        model[1].bias.copy_(-centres.flatten(1).square().sum(1) / 40)
    teach = iobs.FineTune(lr=1e-3, steps=2, loss="kl", augment="auto", batch_size=20)
    report = iobs.prune(
        model,
        [(inputs, labels)],
        iobs.Unstructured(0.5),
        "one-shot",
        rounds=iobs.Rounds(2, finetune=replace(teach, loss="task", augment=None)),
        finetune=teach,
    )
    assert report.dense_loss < 0.05


@pytest.mark.slow
def test_fresh_data_uses_every_sample_in_a_single_round():
    model, data = three_layers()
    report = iobs.prune(
        model, data, iobs.Unstructured(0.3), "best", rounds=replace(BEST.rounds, data="fresh"), finetune=None
    )
    assert len(report.rounds) == 1
    assert report.rounds[0].layers[0].inputs == 108


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": {"finetune": {}}}, "between two rounds"),
        ({"rounds": {"count": 2, "schedule": "cubic"}}, "three rounds"),
        ({"rounds": {"count": 2, "finetune": True}}, "must be a mapping"),
        ({"finetune": 5}, "must be a mapping"),
        ({"rounds": 2.5}, "whole number"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ProblemError, match=message):
        iobs.Recipe.from_dict(settings)


def test_finetune_of_another_type_is_refused():
    for make in (lambda: iobs.Recipe().but(finetune=5), lambda: iobs.Rounds(2, finetune=True)):
        with pytest.raises(ProblemError, match="must be a FineTune, or None"):
            make()


@pytest.mark.slow
def test_best_recipe_uses_cubic_schedule_if_damage_is_large(monkeypatch):
    monkeypatch.setattr(decisions, "_DAMAGE", 0.0)
    model, data = three_layers()
    report = iobs.prune(model, data, iobs.Unstructured(0.8), "best", rounds=4, finetune=None)
    first, *shares = (record.sparsity for record in report.rounds)
    assert len(shares) == 3
    assert shares[0] < shares[1] < shares[2] == first == pytest.approx(0.8, abs=0.01)
    assert any("sparsity grows over the rounds" in note for note in report.notes)
    two = iobs.prune(*three_layers(), iobs.Unstructured(0.8), recipe="best", rounds=2, finetune=None)
    assert len(two.rounds) == 1
    assert any("They would pay" in note for note in two.notes)
