"""The four uses that the public interface is made for, as a user writes them."""

from dataclasses import replace
from inspect import signature

import menagerie
import torch
from torch.utils.data import DataLoader, TensorDataset

import iobs
from iobs import FineTune, Recipe, Rounds, Rule


def weights(model):
    return [value.clone() for value in model.state_dict().values()]


def test_use_1_the_common_case():
    model, data = menagerie.build("perceptron")
    inputs, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
    report = iobs.prune(model, DataLoader(TensorDataset(inputs, labels), batch_size=16), 0.7, "fast")
    other, data = menagerie.build("perceptron")
    iobs.prune(other, data, iobs.Unstructured(0.7))
    # More kept weights than live inputs: those of a unit whose inputs are all zero become zero too.
    assert round(0.7 * report.weights) <= report.zeros <= round(0.7 * report.weights) + 2
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(other), strict=True))


def test_use_2_attention_by_sparsegpt_at_2_of_4_and_a_dense_head():
    model, loader = menagerie.build("transformer")
    recipe = Recipe(
        rules=(Rule("re:.*\\.[qkv]", pattern="2:4", solver="sparsegpt"), Rule("head", dense=True)),
    )
    report = iobs.prune(model, loader, 0.5, recipe)
    assert len(report.audit) == 18


def test_use_3_rounds_with_fine_tuning_stored_beside_the_model(tmp_path):
    tune = FineTune(lr=1e-3, optimizer="adam", steps=5, loss="kl", support="fixed")
    last = replace(tune, steps=10, parameters="all", decay=True)
    recipe = Recipe(target="model", allocation="fisher", rounds=Rounds(3, "cubic", finetune=tune), finetune=last)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    found = []
    for given in (recipe, tmp_path / "recipe.yaml", str(tmp_path / "recipe.yaml")):
        model, loader = menagerie.build("perceptron")
        iobs.prune(model, loader, 0.8, given)
        found.append(weights(model))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_use_4_a_callback_of_one_method():
    seen = []

    class Mine(iobs.Callback):
        def on_round(self, record):
            seen.append(record.loss_heldout)

    model, loader = menagerie.build("perceptron")
    report = iobs.prune(model, loader, 0.5, "paper", rounds=3, callbacks=[Mine()])
    assert seen == [record.loss_heldout for record in report.rounds]


def test_what_worked_before_still_works():
    model, batches = menagerie.build("perceptron")
    assert iobs.prune(model, batches, iobs.Unstructured(0.5), solver="admm").sparsity > 0.4
    model, batches = menagerie.build("perceptron")
    finetune = replace(Recipe.preset("best").finetune, steps=12, most_steps=None)
    report = iobs.prune(model, batches, iobs.Unstructured(0.5), recipe="best", rounds=6, finetune=finetune)
    assert report.settings["recipe"]["rounds"]["count"] == 6


def test_dir_shows_exactly_the_public_names():
    assert set(dir(iobs)) == {*iobs.__all__, "__version__"}
    for name in iobs.__all__:
        assert getattr(iobs, name) is not None
    assert set(dir(iobs.data)) == {*iobs.data.__all__}


def test_no_public_function_has_more_than_13_parameters():
    for name in ("prune", "solve", "minimize", "audit", "keep_sparse", "load", "save_packed", "load_packed"):
        assert len(signature(getattr(iobs, name)).parameters) <= 13, name


def test_the_package_of_prune_is_not_hidden_by_the_function():
    import iobs.pruning.network.layers as found

    assert found.Layer
    assert callable(iobs.prune)


def test_report_prints_the_result_and_is_one_line_in_a_notebook():
    model, loader = menagerie.build("perceptron")
    report = iobs.prune(model, loader, 0.5)
    assert "weights are zero (50" in str(report)
    assert "fc1" in str(report)
    assert len(repr(report)) < 120
    frame = report.to_frame()
    assert [*frame.index] == ["fc1", "fc2", "fc3"]
    assert frame["zeros"].sum() == report.zeros
