"""Zeros survive training after `iobs.keep_sparse`."""

import pytest
import torch
from menagerie import two_sparse_layers
from simulated_gpu import GPU
from torch import nn

import iobs
from iobs.errors import LayerSelectionError, ModelError, ProblemError


def zeros(model):
    return {name: value == 0 for name, value in model.named_parameters() if value.ndim > 1}


@pytest.mark.parametrize("wrapped", ["adam", "sgd"])
def test_keep_sparse_holds_zeros_until_removed(wrapped):
    model, data = two_sparse_layers()
    before = zeros(model)
    options = {
        "adam": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    }
    optimizer = options[wrapped]()
    handle = iobs.keep_sparse(model, optimizer)
    start = model[0].weight.detach().clone()
    for _ in range(50):
        optimizer.zero_grad()
        (model(data) - data).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model[0].weight, start)
    assert all((value[mask] == 0).all() for (_, value), mask in _pairs(model, before))
    handle.remove()
    optimizer.zero_grad()
    (model(data) - data).square().mean().backward()
    optimizer.step()
    assert any((value[mask] != 0).any() for (_, value), mask in _pairs(model, before))


def _pairs(model, masks):
    return [((name, value), masks[name]) for name, value in model.named_parameters() if name in masks]


def test_keep_sparse_refuses_a_dense_model():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(LayerSelectionError, match="no zeros"):
        iobs.keep_sparse(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_keep_sparse_holds_zeros_in_a_line_search():
    model, data = two_sparse_layers()
    before = zeros(model)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    iobs.keep_sparse(model, optimizer)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = (model(data) - data).square().mean()
        loss.backward()
        seen.append(all((value[mask] == 0).all() for (_, value), mask in _pairs(model, before)))
        return loss

    optimizer.step(closure)
    assert len(seen) > 2
    assert all(seen)


def test_keep_sparse_ignores_nan_gradients_of_zeros():
    model, _ = two_sparse_layers()
    before = zeros(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iobs.keep_sparse(model, optimizer)
    for (_, value), mask in _pairs(model, before):
        value.grad = torch.where(mask, torch.nan, 0.1)
    optimizer.step()
    assert all((value[mask] == 0).all() for (_, value), mask in _pairs(model, before))


def test_keep_sparse_accepts_frozen_and_sparse_gradients():
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4, padding_idx=0, sparse=True), torch.nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[:2] = 0
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iobs.keep_sparse(model, optimizer)
    model(torch.arange(6)).square().mean().backward()
    optimizer.step()
    assert not model[0].weight[0].any()
    assert not model[1].weight[:2].any()


def test_keep_sparse_leaves_out_all_zero_matrices():
    model, data = two_sparse_layers()
    adapter = torch.nn.Linear(model[0].in_features, model[0].in_features, bias=False)
    torch.nn.init.zeros_(adapter.weight)
    whole = torch.nn.Sequential(adapter, *model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"0\.weight: all zeros"):
        handle = iobs.keep_sparse(whole, optimizer)
    assert adapter.weight not in handle.masks
    (whole(data) - data).square().mean().backward()
    optimizer.step()
    assert adapter.weight.any()


@pytest.mark.parametrize("solver", ["magnitude", "wanda", "sparsegpt", "obc", "admm"])
def test_prune_with_keep_zeros_holds_old_zeros(solver):
    model, data = two_sparse_layers()
    before = zeros(model)
    report = iobs.prune(model, data, iobs.Unstructured(0.7), "one-shot", solver=solver, keep_zeros=True)
    assert report.sparsity == pytest.approx(0.7, abs=1e-3)
    for (_, value), mask in _pairs(model, before):
        assert (value[mask] == 0).all()


class Wrapper(torch.optim.Optimizer):
    """A wrapper without hooks of its own, such as the one of accelerate."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


def test_keep_sparse_finds_the_optimizer_in_its_wrappers():
    model, data = two_sparse_layers()
    before = zeros(model)
    optimizer = Wrapper(Wrapper(torch.optim.AdamW(model.parameters(), lr=1e-2)))
    iobs.keep_sparse(model, optimizer)
    for _ in range(3):
        (model(data) - data).square().mean().backward()
        optimizer.step()
    assert all((value[mask] == 0).all() for (_, value), mask in _pairs(model, before))


def test_keep_sparse_holds_zeros_of_a_model_that_moves_afterwards(gpu):
    model, data = torch.nn.Linear(6, 4), torch.randn(8, 6)
    model.weight.data[:, ::2] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)
    handle = iobs.keep_sparse(model, optimizer)
    weight = model.weight
    assert model.to(GPU).weight is weight
    for _ in range(2):
        optimizer.zero_grad()
        model(data.to(GPU)).square().mean().backward()
        optimizer.step()
    assert not model.weight[:, ::2].any()
    assert all(mask.device == GPU for mask in handle.masks.values())


def test_masks_follow_a_further_prune():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    data = [torch.randn(32, 16)]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    iobs.prune(model, data, 0.3, "one-shot", include="0")
    kept = iobs.keep_sparse(model, optimizer)
    for sparsity, include in ((0.6, None), (0.2, "2")):  # more zeros, in another layer too; then fewer there
        iobs.prune(model, data, sparsity, "one-shot", include=include)
        before = [model[i].weight == 0 for i in (0, 2)]
        model(data[0]).pow(2).mean().backward()
        optimizer.step()
        assert all(torch.equal(model[i].weight == 0, zero) for i, zero in zip((0, 2), before, strict=True))
    kept.remove()
    model(data[0]).pow(2).mean().backward()
    optimizer.step()
    assert not (model[0].weight == 0).any()


def test_units_are_not_removed_under_a_live_handle():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    data = [torch.randn(32, 16)]
    iobs.prune(model, data, 0.3, "one-shot")
    kept = iobs.keep_sparse(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ModelError, match=r"keep_sparse is live .* remove\(\) .* new optimizer"):
        iobs.prune(model, data, iobs.Structured(0.3), "one-shot")
    kept.remove()
    iobs.prune(model, data, iobs.Structured(0.3), "one-shot")


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        (iobs.Grid(3), "and the grid in one run"),
        (0.2, "keep_zeros=True"),
        (iobs.Structured(0.3), "Remove units first"),
    ],
    ids=str,
)
def test_a_run_that_loses_zeros_says_so(pattern, advice):
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)), [torch.randn(128, 16)]
    assert not any("zeros that" in note for note in iobs.prune(model, data, 0.5, "one-shot").notes)
    notes = iobs.prune(model, data, pattern, "one-shot").notes
    assert any("zeros that the matrices had hold values now" in note and advice in note for note in notes)
    if pattern == 0.2:
        iobs.prune(model, data, 0.5, "one-shot")
        notes = iobs.prune(model, data, pattern, "one-shot", keep_zeros=True).notes
        assert not any("zeros that" in note for note in notes)


def test_swapped_arguments_are_refused_in_a_line():
    model = nn.Linear(2, 2)
    with pytest.raises(ProblemError, match="a model and its optimizer, in this order; got SGD and Linear"):
        iobs.keep_sparse(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(ModelError, match="audit takes a model or a directory, got Tensor"):
        iobs.audit(torch.zeros(2))
