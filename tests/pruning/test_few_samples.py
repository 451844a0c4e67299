"""Structured: networks whose Hessians are singular or lost in rounding are pruned nevertheless."""

import pytest
import torch
from torch import nn

import iobs
from iobs.core.quadratic import Quadratic
from iobs.pruning.widths.readers import _definite
from iobs.solvers.families import UNIT_SOLVERS
from iobs.solvers.grouped.system import definite_factor


def perceptron(offset=0.0):
    """Two hidden layers; with neurons that are always off, twice the same, and constant up to a small share."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.bias += offset
            layer.weight[1], layer.bias[1] = layer.weight[0], layer.bias[0]
            layer.bias[4:7] = -1e4
    return model


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("sizes", [(1,), (2,), (8,), (1, 1, 1, 1), (40,)], ids=str)
@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_few_samples_and_dead_neurons_are_no_error(recipe, sizes, offset):
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(size, 8, generator=generator) for size in sizes]
    model = perceptron(offset)
    with torch.no_grad():
        dense = model(data[0])
    report = iobs.prune(model, data, iobs.Structured(0.3), recipe)
    assert any(one.after < one.before for one in report.widths)
    with torch.no_grad():
        lost = model(data[0]) - dense
    # Few samples leave freedom, and some neurons are dead or double: outputs on calibration samples are matched.
    assert float(lost.norm()) < 0.2 * float((dense - dense.mean(0)).norm()) + 0.02 * float(dense.norm())


class Block(nn.Module):
    """A residual block as timm's `resnet10t` has it: averages before the shortcut, and a last norm of zero scale."""

    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.second, self.last = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.short = nn.Sequential(
            nn.AvgPool2d(2), nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width)
        )
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        inside = self.last(self.second(torch.relu(self.norm(self.first(x)))))
        return torch.relu(inside + self.short(x))


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_residual_network_with_eight_bright_pictures_is_no_error(recipe):
    """Averages of a picture have means far above their spread, which products in float32 lost."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Block(4), Block(8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    ).eval()
    pictures = 1 + 0.01 * torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        dense = model(pictures)
        iobs.prune(model, [pictures], iobs.Structured(0.25), recipe)
        assert float((model(pictures) - dense).norm()) < 0.5 * float((dense - dense.mean(0)).norm())


@pytest.mark.parametrize("solver", UNIT_SOLVERS)
def test_every_solver_of_units_takes_few_samples(solver):
    data = [torch.randn(3, 8, generator=torch.Generator().manual_seed(2))]
    model = perceptron(100.0)
    iobs.prune(model, data, iobs.Structured(0.3), "one-shot", solver=solver)
    assert bool(torch.isfinite(model(data[0])).all())


def test_hessian_that_rounding_made_indefinite_is_damped_more():
    gram = torch.eye(6, dtype=torch.float64)
    gram[0, 1] = gram[1, 0] = 1.05
    with_more = _definite(gram, 1e-3)
    definite_factor(with_more)
    assert float(with_more[2, 2]) == pytest.approx(1.1, abs=1e-9)  # damping 0.1
    plain = _definite(torch.eye(6, dtype=torch.float64), 1e-3)
    assert float(plain[2, 2]) == pytest.approx(1.001, abs=1e-12)
    assert Quadratic.at(torch.ones(2, 6, dtype=torch.float64), with_more).shape == (2, 6)
