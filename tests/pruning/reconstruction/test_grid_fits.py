"""Block reconstruction and steps of the whole network with values on a grid: codes stay exact, and losses fall."""

from dataclasses import replace

import pytest
import torch
from families import LANGUAGE_MODELS, language_batches, prune_directory, saved

import iobs
from iobs.core.grids import entries_of
from iobs.core.patterns import NM, Grid, Unstructured
from iobs.pruning.audit import audit
from iobs.pruning.descent.gradients import Masters
from iobs.pruning.layerwise.patterns import free_zeros, rounding_of
from iobs.pruning.network.layers import Layer, find_layers
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.pruning.reconstruction import growing
from iobs.pruning.store import Store

SPARSE = Unstructured(0.5) & Grid(3, 8)
FIT = BlockFit(masks=2, between=5, steps=20, network_steps=10, network_lr=1e-3)
SHOT = Recipe(target="residual", solver="sparsegpt")  # a cheap solver: the fits are tested
LONG = BlockFit(masks=2, between=10, steps=60, network_steps=60)
SHORT = BlockFit(masks=2, between=2, steps=3, lr=1e-3, network_steps=3, network_lr=1e-4)


def llama():
    torch.manual_seed(0)
    model = LANGUAGE_MODELS["llama"][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model, language_batches(count=6)


@pytest.mark.parametrize(
    ("pattern", "shot", "fit"),
    [
        # without zeros a short fit gains nothing
        pytest.param(Grid(3, 8), SHOT, replace(LONG, network_lr=8e-4), marks=pytest.mark.slow),
        (SPARSE, SHOT, FIT),
        pytest.param(Grid(3, 8), Recipe(target="residual"), LONG, marks=pytest.mark.slow),
        pytest.param(NM(2, 4) & Grid(4, 8), Recipe(target="residual"), LONG, marks=pytest.mark.slow),
    ],
    ids=["int3/8", "half on int3/8", "int3/8 by ADMM", "2:4 on int4/8 by ADMM"],
)
def test_reconstruction_keeps_the_grid_and_lowers_the_divergence(pattern, shot, fit):
    model, data = llama()
    before = iobs.prune(model, data, pattern, shot, seed=1)
    model, data = llama()
    report = iobs.prune(model, data, pattern, shot.but(blocks=fit), seed=1)
    audit(model, pattern, [row.name for row in report.audit])
    assert report.best.loss_calibration < before.best.loss_calibration
    assert any("block reconstruction on grids" in note for note in report.notes)
    assert all(row.zeros >= row.asked for row in report.audit)


def test_resumed_reconstruction_on_a_grid_ends_in_the_same_bits(tmp_path):
    results = []
    for _ in range(2):
        model, data = llama()
        iobs.prune(model, data, SPARSE, SHOT.but(blocks=SHORT), checkpoint=tmp_path)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


def test_layer_without_input_stays_dense_beside_layers_on_a_grid():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return x + torch.tanh(self.used(x))

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Sequential(Block(), Block()), torch.nn.Linear(8, 3))
    dense = [block.unused.weight.clone() for block in model[0]]
    data = [torch.randn(8, 8) for _ in range(4)]
    report = iobs.prune(model, data, SPARSE, Recipe(target="residual", blocks=BlockFit(masks=2, between=2, steps=4)))
    assert any("block reconstruction on grids" in note for note in report.notes)
    assert [row.name for row in report.audit] == ["0.0.used", "0.1.used", "1"]
    audit(model, SPARSE, [row.name for row in report.audit])
    assert all(torch.equal(block.unused.weight, weight) for block, weight in zip(model[0], dense, strict=True))


def test_reconstruction_from_files_stores_grid_values(tmp_path):
    saved("llama", tmp_path / "model")
    options = {"target": "residual", "solver": "sparsegpt", "blocks": SHORT}
    report = prune_directory(tmp_path / "model", tmp_path / "out", language_batches(), SPARSE, **options)
    audit(tmp_path / "out", SPARSE, [row.name for row in report.audit])


def test_masters_are_rounded_on_their_way_into_the_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 2, bias=False))
    layer = find_layers(model)[0]
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[7, 0, 1, -2, 3, 0, 0, 0], [0, 7, 1, 1, 1, 1, 1, 1]]) * 0.25)
    pattern = Grid(4, 8)
    masks = free_zeros({"0.weight": model[0].weight != 0}, {layer: pattern})
    assert masks["0.weight"].all()
    store = Store(model)
    masters = Masters.of(store, ["0.weight"], masks, rounding_of(model, {layer: pattern}, store.stored_dtype))
    masters.values["0.weight"][0, 1] += 0.13
    masters.values["0.weight"][0, 2] += 0.12
    masters.values["0.weight"][0, 0] += 9.0
    masters.copy_to_model()
    assert model[0].weight[0].tolist() == [1.75, 0.25, 0.25, -0.5, 0.75, 0, 0, 0]
    assert masters.values["0.weight"][0, 2] == pytest.approx(0.37)
    masters.values["0.weight"][0, 3] -= 0.26
    masters.keep()
    assert model[0].weight[0, 3] == -0.75


def test_zeros_of_sparse_grids_stay():
    model = torch.nn.Sequential(torch.nn.Linear(8, 2))
    layer = find_layers(model)[0]
    mask = torch.zeros(2, 8, dtype=torch.bool)
    assert not free_zeros({"0.weight": mask}, {layer: SPARSE})["0.weight"].any()
    assert rounding_of(model, {layer: Unstructured(0.5)}, Store(model).stored_dtype) is None


def test_intermediate_projections_have_no_grid():
    layer = Layer("x", (10, 10))
    assert growing(Grid(4), layer, 4) == [Grid(4)]
    *earlier, last = growing(SPARSE, layer, 3)
    assert last == SPARSE
    assert earlier == growing(entries_of(SPARSE), layer, 3)[:-1]
