"""The joint curvature: weights of rows against gradients by hand, against enumeration, and in whole runs."""

from dataclasses import replace
from itertools import combinations

import families
import pytest
import torch
from torch import nn

import iobs
from iobs import Unstructured
from iobs.errors import ProblemError
from iobs.pruning.allocation.output_fisher import output_fisher
from iobs.pruning.calibration.gram import Gram, Statistics
from iobs.pruning.calibration.importance import SHARE, row_importance
from iobs.pruning.layerwise.problem import Task, solve_layer, solve_together
from iobs.pruning.network.layers import find_layers
from iobs.pruning.samples.subsets import Samples


def network(convolution=False):
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1) if convolution else nn.Linear(6, 8)
    last = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 if convolution else 8, 4))
    return nn.Sequential(first, last).eval()


def data(convolution=False):
    shape = (12, 3, 4, 4) if convolution else (12, 6)
    return list(torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("convolution", [False, True])
def test_weights_of_rows_mix_ones_with_relative_squared_gradients(convolution, frozen):
    model, batches = network(convolution).requires_grad_(not frozen), data(convolution)
    layer = find_layers(model)[0]
    found = row_importance(model, [layer], Samples.of(batches), 3)[layer]
    generator, total = torch.Generator().manual_seed(3), 0.0
    for batch in batches:
        hidden = model[0](batch).detach().requires_grad_()
        logs = model[1](hidden).log_softmax(-1)
        labels = torch.multinomial(logs.detach().exp(), 1, generator=generator)
        logs.gather(1, labels).sum().backward()
        total = total + hidden.grad.double().square().movedim(1, -1).flatten(0, -2).sum(0)
    torch.testing.assert_close(found, 1 - SHARE + SHARE * total / total.mean(), rtol=1e-5, atol=0)


def enumerated(weight, hessian, rows, keep):
    """The least weighted error over all masks of a layer, each with exact weights."""
    least = torch.inf
    for mask in combinations(range(weight.numel()), keep):
        kept, error = torch.zeros(weight.numel(), dtype=torch.bool), 0.0
        kept[list(mask)] = True
        for row, dense, own in zip(rows, weight, kept.view(weight.shape), strict=True):
            rest = dense * ~own
            if own.any():  # the best change of the kept entries, given that the others become zero
                rest = rest.clone()
                rest[own] = -torch.linalg.solve(hessian[own][:, own], hessian[own][:, ~own] @ dense[~own])
            error += float(row * (rest @ hessian @ rest))
        least = min(least, error)
    return least


@pytest.mark.parametrize("seed", range(3))
def test_the_weighted_error_of_the_rows_is_least(seed):
    torch.manual_seed(seed)
    inputs, weight = torch.randn(200, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    layer = find_layers(nn.Linear(3, 3))[0]
    gram = Gram.empty(layer, torch.device("cpu"), False)
    gram.add(inputs[None])
    gram.finish()
    rows = torch.tensor([0.1, 1.0, 1.9], dtype=torch.float64)
    task = Task(layer, Unstructured(keep=4), weight, None, iobs.Recipe(solver="exact", damping=0.0), importance=rows)
    least = enumerated(weight, gram.own[0], rows, 4)
    for solutions in (solve_layer(task, Statistics(gram)), solve_together([task], Statistics(gram))):
        change = solutions[0].weight - weight
        assert int(solutions[0].mask.sum()) == 4
        assert bool((solutions[0].weight[~solutions[0].mask] == 0).all())
        assert float((rows * ((change @ gram.own[0]) * change).sum(1)).sum()) == pytest.approx(least, rel=1e-9)
    equal = solve_layer(replace(task, pattern=Unstructured(keep=1, per="row")), Statistics(gram))[0]
    plain = solve_layer(replace(task, pattern=Unstructured(keep=1, per="row"), importance=None), Statistics(gram))[0]
    assert torch.equal(equal.weight, plain.weight)  # rows that do not compete


@pytest.mark.parametrize("solver", ["sparsegpt", "obr"])
def test_rows_that_matter_more_keep_more_entries_on_a_grid(solver):
    torch.manual_seed(0)
    inputs, weight = torch.randn(200, 16, dtype=torch.float64), torch.randn(4, 16, dtype=torch.float64)
    layer = find_layers(nn.Linear(16, 4))[0]
    gram = Gram.empty(layer, torch.device("cpu"), False)
    gram.add(inputs[None])
    gram.finish()
    rows = torch.tensor([0.01, 0.01, 1.99, 1.99], dtype=torch.float64)
    pattern = Unstructured(0.5) & iobs.Grid(4, 8)
    task = Task(layer, pattern, weight, None, iobs.Recipe(solver=solver), importance=rows)
    for (found,) in (solve_layer(task, Statistics(gram)), solve_together([task], Statistics(gram))):
        kept = found.mask.sum(1)
        assert int(kept.sum()) == 32
        assert int(kept[:2].max()) < int(kept[2:].min())
        codes = found.weight / found.stats["scales"].repeat_interleave(8, 1)
        torch.testing.assert_close(codes, codes.round())
        assert float(codes.abs().max()) <= 7.01
        assert not codes[~found.mask].any()


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
@pytest.mark.parametrize("convolution", [False, True])
def test_zeros_are_exact_and_the_curvature_changes_the_result(convolution, recipe):
    found = []
    for curvature in ("layer", "joint"):
        model = network(convolution)
        report = iobs.prune(model, data(convolution), 0.5, recipe, curvature=curvature)
        assert report.zeros == sum(int((one.weight == 0).sum()) for one in (model[0], model[1][2]))
        assert report.zeros == round(0.5 * report.weights)
        found.append(model[0].weight.clone())
    assert not torch.equal(*found)


def test_a_language_model_with_padding_is_pruned():
    model, batches = families.LANGUAGE_MODELS["llama"][0]().eval(), families.language_batches()
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -2:] = 0
    report = iobs.prune(model, batches, "2:4", "one-shot", curvature="joint")
    assert report.zeros == report.weights // 2


def test_the_joint_curvature_needs_the_whole_model():
    from iobs.pruning.blockwise.store import require_streamable

    with pytest.raises(ProblemError, match="curvature"):
        require_streamable(iobs.Recipe.preset("one-shot").but(curvature="joint"))
    with pytest.raises(ProblemError, match="curvature"):
        iobs.Recipe(curvature="fisher")


def test_batches_that_reach_no_module_of_the_layers_give_no_weights():
    model = nn.LSTM(6, 8).eval()  # its matrices are not the weights of called modules
    layers, data = tuple(find_layers(model)), Samples.of([torch.randn(5, 12, 6)])
    assert not row_importance(model, layers, data, 0)
    assert not output_fisher(model, layers, data, 0)


def test_a_model_without_gradients_is_refused_by_name():
    model = network()
    model.forward = torch.no_grad()(model.forward)
    with pytest.raises(ProblemError, match=r"no gradient.*torch\.no_grad"):
        row_importance(model, find_layers(model), Samples.of(data()), 0)
