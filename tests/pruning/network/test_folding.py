"""Weights that a module computes anew in every pass: pruned as plain weights, and kept as what they were."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm

import iobs
from iobs.errors import ProblemError


def old_weight_norm(module, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module, **options)


def masked(module):
    return prune.l1_unstructured(module, "weight", 0.25)


class Doubled(nn.Module):
    """A parametrisation that can be inverted."""

    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def doubled(module):
    nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    return module


NORMS = {
    "weight norm": parametrizations.weight_norm,
    "weight norm of inputs": lambda one: parametrizations.weight_norm(one, dim=1),
    "old weight norm": old_weight_norm,
    "doubled": doubled,
    "mask": masked,
}


def data(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(40, 12, generator=generator) for _ in range(count)]


def network(norm):
    torch.manual_seed(0)
    return nn.Sequential(norm(nn.Linear(12, 10)), nn.ReLU(), nn.Linear(10, 4)).eval()


def plain(model):
    """The same network with the present weight as a parameter."""
    other = network(lambda one: one)
    other[0].weight.data, other[0].bias.data = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    other[2].load_state_dict(model[2].state_dict())
    return other


@pytest.mark.parametrize("name", NORMS)
def test_computed_weight_is_pruned_as_the_equal_plain_weight(name):
    model = network(NORMS[name])
    names, kind = [*model.state_dict()], type(model[0])
    parameters = {id(one) for one in model.parameters()}
    other = plain(model)
    report = iobs.prune(model, data(), 0.5, "one-shot")
    expected = iobs.prune(other, data(), 0.5, "one-shot")
    model(data()[0])
    assert report.zeros == expected.zeros
    assert report.coverage.share == 1
    assert [*model.state_dict()] == names
    assert type(model[0]) is kind
    assert {id(one) for one in model.parameters()} == parameters
    assert torch.equal(model[0].weight == 0, other[0].weight == 0)
    torch.testing.assert_close(model[0].weight, other[0].weight, atol=1e-6, rtol=1e-5)
    assert [row.zeros for row in iobs.audit(model)] == [row.zeros for row in report.audit]


@pytest.mark.parametrize("name", NORMS)
def test_failed_run_leaves_the_parameters_unchanged(name):
    class Stop(iobs.Callback):
        def on_layer(self, record, index):
            raise KeyboardInterrupt

    model = network(NORMS[name])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        iobs.prune(model, data(), 0.5, "one-shot", callbacks=[Stop()])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    iobs.audit(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def twice(norm, *shared):
    """A network whose first two layers share parameters."""
    torch.manual_seed(0)
    first, second = norm(nn.Linear(12, 12)), norm(nn.Linear(12, 12))
    for name in shared:
        path, _, last = name.rpartition(".")
        setattr(second.get_submodule(path), last, first.get_parameter(name))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(12, 4)).eval()


def test_weights_that_are_computed_from_the_same_parameters_are_pruned_as_one():
    model = twice(parametrizations.weight_norm, *(f"parametrizations.weight.original{place}" for place in (0, 1)))
    other = twice(lambda one: one, "weight")
    other[0].weight.data = model[0].weight.detach().clone()
    for place in (0, 2):
        other[place].bias.data = model[place].bias.detach().clone()
    other[4].load_state_dict(model[4].state_dict())
    report, expected = (iobs.prune(one, data(), 0.5, "one-shot") for one in (model, other))
    assert [(row.name, row.zeros) for row in report.audit] == [(row.name, row.zeros) for row in expected.audit]
    assert torch.equal(model[2].weight, model[0].weight)
    torch.testing.assert_close(model[0].weight, other[0].weight, atol=1e-6, rtol=1e-5)


def test_weights_that_share_a_part_of_their_parameters_stay_dense():
    model = twice(parametrizations.weight_norm, "parametrizations.weight.original1")
    report = iobs.prune(model, data(), 0.5, "one-shot")
    assert [row.name for row in report.audit] == ["4"]


@pytest.mark.parametrize("name", ["weight norm", "old weight norm"])
def test_weight_norm_of_a_row_of_zeros_is_finite(name):
    model = network(NORMS[name])
    iobs.prune(model, data(), "97%", "one-shot", solver="magnitude")
    model(data()[0])
    assert bool(torch.isfinite(model[0].weight).all())
    assert bool((model[0].weight == 0).all(1).any())


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, old_spectral_norm])
def test_weight_that_cannot_be_given_back_stays_dense_with_its_reason(norm):
    model = network(norm)
    report = iobs.prune(model, data(), 0.5, "one-shot")
    assert [row.name for row in report.audit] == ["2"]
    assert "computed from it in every forward pass" in next(iter(report.skipped.values()))


@pytest.mark.parametrize("name", ["weight norm", "old weight norm"])
def test_a_grid_needs_weights_without_weight_norm(name):
    model = network(NORMS[name])
    with pytest.raises(ProblemError, match=r"'0' has a weight norm.*iobs\.fold"):
        iobs.prune(model, data(), iobs.Grid(4), "one-shot")
    iobs.fold(model)
    iobs.prune(model, data(), iobs.Grid(4), iobs.Recipe(solver="magnitude"))
    assert all(row.bits for row in iobs.audit(model, iobs.Grid(4), ["0", "2"]))
