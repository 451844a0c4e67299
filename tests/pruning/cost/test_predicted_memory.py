"""Predicted bytes of Grams, solves and steps, against counted bytes of tensors."""

import families
import pytest
import torch
from tensor_bytes import TensorBytes
from torch import nn

import iobs
from iobs.core.patterns import Unstructured, as_pattern
from iobs.pruning.blockwise.storage import Storage
from iobs.pruning.calibration import gram
from iobs.pruning.calibration.gram import Gram, Statistics, layer_outputs, relative_output_error, target_energy
from iobs.pruning.calibration.replay import Residency
from iobs.pruning.cost import memory
from iobs.pruning.cost.memory import GramSizes, Sizes, checkpoint_bytes, peaks, peaks_in_memory
from iobs.pruning.layerwise import problem
from iobs.pruning.layerwise.problem import Task, solve_layer
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import BlockFit, FineTune, Recipe
from iobs.pruning.store import Store
from iobs.pruning.workspace import Request

TOKENS, WIDTH = 64, 256


def counted(layer, kind, recipe, residency):
    """The peaks of the bytes of tensors while Grams are computed, and while a layer is solved."""
    torch.manual_seed(0)
    outputs = kind.outputs(layer)
    rows, columns = layer.shape
    weight = torch.randn(rows, columns)
    with TensorBytes() as gathering:
        grams = []
        for part in range(kind.parts):
            grams.append(Gram.empty(layer, weight.device, kind.pairs, False, outputs))
            for _ in range(2):
                own = torch.randn(1, TOKENS, columns)
                dense = own + 0.1 * torch.randn(1, TOKENS, columns) if kind.pairs else None
                if outputs:
                    # A copy, freed at once: a view of a tensor from outside would be counted until the end.
                    dense = layer_outputs(weight.clone(), dense).add_(torch.randn(1, TOKENS, rows))
                grams[-1].add(own, dense)
            grams[-1].finish()
            grams[-1].park(str(part), residency.park)
    found = Statistics(grams[0], grams[1] if kind.parts == 2 else None)
    energy = target_energy(found.calibration, weight)
    found.forget_energy()
    tensors = [tensor for one in grams for tensor in (one.own, one.cross)]
    tensors = [] if kind.parks(layer) else tensors
    with TensorBytes().hold(*(tensor for tensor in tensors if tensor is not None)) as solving:
        task = Task(
            layer,
            Unstructured(0.5),
            weight.clone(),
            weight.clone() if kind.pairs else None,
            recipe.for_layer(layer.name),
        )
        solved = torch.cat([one.weight for one in solve_layer(task, found)])
        relative_output_error(found.calibration, solved, weight, energy=energy)
    return gathering.peak, solving.peak


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("solver", ["sparsegpt", "admm", "wanda"])
@pytest.mark.parametrize("shape", [(WIDTH, 704), (704, WIDTH)])
def test_grams_and_solves_take_the_predicted_bytes(shape, solver, pairs, parts, wide, monkeypatch):
    """Within a factor of 1.5, also for a solver that declares nothing; and hardly ever more than predicted."""
    for module in (gram, problem, memory):
        monkeypatch.setattr(module, "WIDE", 64 if wide else 10_000)
    recipe = Recipe(solver=solver, target="residual" if pairs else "layer")
    layer, kind = Layer("a", shape), GramSizes(parts, pairs, WIDTH)
    gathered, solved = counted(layer, kind, recipe, Residency())
    assert 0.9 < kind.gathering(layer, TOKENS, 4) / gathered < 1.5
    assert 0.9 < kind.solving(layer, recipe) / solved < 1.5


@pytest.mark.parametrize("shape", [(WIDTH, 704), (704, WIDTH)])
@pytest.mark.parametrize("pairs", [False, True])
def test_grams_of_wide_layers_in_files_take_no_memory(shape, pairs, tmp_path, monkeypatch):
    for module in (gram, problem, memory):
        monkeypatch.setattr(module, "WIDE", 64)
    recipe = Recipe(target="residual" if pairs else "layer")
    layer, kind = Layer("a", shape), GramSizes(2, pairs, WIDTH, parked=True)
    storage = Storage("disk", torch.device("cpu"), tmp_path)
    gathered, solved = counted(layer, kind, recipe, storage)
    assert 0.9 < kind.gathering(layer, TOKENS, 4) / gathered < 1.5
    assert 0.9 < kind.solving(layer, recipe) / solved < 1.5
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == kind.parked_bytes(layer)


def test_two_streams_raise_the_peaks_of_grams_and_solves():
    sizes = Sizes([Layer("a", (WIDTH, 704)), Layer("b", (704, WIDTH))], 10**6, 2, 512, 512, 1000)
    own, residual = (peaks(sizes, Recipe(target=target), False) for target in ("layer", "residual"))
    moments = 8 * WIDTH * 704  # of the target outputs of the layer that writes into the residual stream
    assert residual["Grams"] - own["Grams"] > moments
    assert residual["solves"] - own["solves"] > moments


def test_biases_raise_the_peak_of_solves():
    sizes = [Sizes([Layer("a", (64, 64))], 10**4, 2, 512, 512, 1000, biased) for biased in (False, True)]
    plain, biased = (peaks(one, Recipe(target="residual"), False)["solves"] for one in sizes)
    copies = 2 * 8 * 64**2  # of the Gram, and of the products with the target outputs
    assert biased - plain == copies


def test_steps_of_the_network_keep_the_input_of_every_block():
    recipe = Recipe(target="residual", blocks=BlockFit(network_steps=2))
    one, many = (Sizes([Layer("a", (64, 32))], 10**4, 2, 512, 512, 0, hidden=64, blocks=count) for count in (1, 33))
    name = "steps of the network"
    assert peaks(many, recipe, False)[name] - peaks(one, recipe, False)[name] == 2 * 32 * 512 * 64


@pytest.mark.parametrize(("name", "expected", "block"), [("one-shot", 2, 0), ("fast", 6, 4), ("best", 14, 0)])
def test_checkpoint_bytes_of_a_weight(name, expected, block):
    assert checkpoint_bytes(1000, 10, 2, Recipe.preset(name)) == 1000 * expected + 10 * block


def test_an_allocation_has_grams_of_held_out_samples():
    sizes = Sizes([Layer("a", (WIDTH, WIDTH))], 10**5, 2, 512, 512, 1000)
    recipe = Recipe(allocation="fisher", blocks=BlockFit(window=1))
    found = peaks(sizes, recipe, False)
    assert found["allocation"] - found["solves"] == 8 * WIDTH**2


@pytest.fixture(scope="module")
def language_model():
    return families.build("llama")


def in_memory(language_model, pattern=0.5, recipe="one-shot", holdout=0.5):
    model, data = language_model
    store, pattern = Store(model), as_pattern(pattern)
    recipe = Recipe.preset(recipe) if isinstance(recipe, str) else recipe
    patterns = dict.fromkeys(store.select(None, None, False).layers, pattern)
    return peaks_in_memory(store, Request(recipe, patterns, pattern, holdout, 0, None), data, 0)


def test_a_language_model_in_memory_takes_its_copies_and_its_scores(language_model):
    model, data = language_model
    found = in_memory(language_model)
    whole = sum(value.nbytes for value in model.state_dict().values())
    assert set(found) == {"Grams", "solves", "allocation", "prices of rows", "comparison"}
    assert all(size > whole for size in found.values())  # the dense copy, and one of the pruned layers
    scores = 4 * data[0]["input_ids"].numel() * model.config.vocab_size
    assert found["comparison"] > whole + scores
    assert in_memory(language_model, holdout=0.0)["comparison"] > found["comparison"]


def test_rows_are_priced_where_they_compete_or_are_solved_together(language_model):
    assert not {"prices of rows", "allocation"} & set(in_memory(language_model, iobs.Grid(4)))
    assert {"prices of rows", "allocation"} & set(in_memory(language_model, "2:4")) == {"prices of rows"}


def test_second_moments_of_rows_stay_in_memory(language_model):
    model, _ = language_model
    layers = Store(model).select(None, None, False).layers
    moments = sum(4 * rows**2 for rows, columns in (layer.shape for layer in layers) if rows <= columns)
    together, alone = (
        in_memory(language_model, recipe=Recipe(allocation="uniform", curvature=curvature))
        for curvature in ("auto", "layer")
    )
    assert together["solves"] - alone["solves"] >= moments > 0


def test_fits_of_blocks_take_memory(language_model):
    plain, fitted = in_memory(language_model), in_memory(language_model, recipe="fast")
    assert "steps of blocks" in fitted
    assert fitted["Grams"] > plain["Grams"]  # everything may change, and has a copy


def test_an_encoder_has_no_scores_of_a_vocabulary(language_model):
    model, data = language_model
    comparison = in_memory((model.model, data))["comparison"]
    assert comparison < in_memory(language_model)["comparison"]


def test_memory_of_other_models_and_of_fine_tuning_is_not_foretold(language_model):
    assert in_memory((nn.Linear(4, 4), [torch.randn(8, 4)])) == {}
    assert in_memory(language_model, recipe=Recipe(finetune=FineTune(lr=1e-3, optimizer="adam"))) == {}
