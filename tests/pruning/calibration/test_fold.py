"""`iobs.fold`: computed weights become plain parameters, and the outputs stay the same."""

import families
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from use_models import data, zeros

import iobs
from iobs.errors import CalibrationError


class Standardised(nn.Conv2d):
    """The weight is standardised, and the input padded on two sides, in every forward pass."""

    def forward(self, x):
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        padded = functional.pad(x, (0, 1, 0, 1))
        return functional.conv2d(padded, centred / centred.norm(), self.bias, self.stride, 0, 1, self.groups)


def test_standardised_convolution_is_pruned_after_the_fold():
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(4, 6, 2, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1))
    pictures = data(3, 4, 6, 6)
    before = model(pictures[0])
    assert [
        row.name for row in iobs.prune(nn.Sequential(*model), pictures, 0.0, iobs.Recipe(target="residual")).audit
    ] == ["2"]
    assert iobs.fold(model, pictures[0]) == ["0"]
    torch.testing.assert_close(model(pictures[0]), before)
    report = iobs.prune(model, pictures, 0.5, iobs.Recipe(target="residual"))
    assert report.coverage.share == 1
    assert zeros(model[0].weight) == model[0].weight.numel() // 2


@pytest.mark.parametrize(
    "norm",
    [
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        nn.utils.spectral_norm,
        lambda one: nn.utils.prune.random_unstructured(one, "weight", 0.3),
    ],
)
def test_norms_and_masks_are_folded_into_the_weight(norm):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(12, 10)), nn.Linear(10, 4)).train()
    model(data()[0])  # the first estimate of the spectral norm
    before = model.eval()(data()[0])
    assert iobs.fold(model.train()) == ["0"]
    assert model.training
    assert sorted(dict(model[0].named_parameters())) == ["bias", "weight"]
    torch.testing.assert_close(model.eval()(data()[0]), before)
    assert iobs.prune(model, data(), 0.5, iobs.Recipe(target="residual")).coverage.share == 1


def test_norm_free_network_is_covered_after_the_fold():
    model = families._timm("test_nfnet")().eval()
    pictures = [torch.randn(2, 3, 64, 64) for _ in range(2)]
    before = model(pictures[0])
    assert len(iobs.fold(model, pictures[0])) > 10
    torch.testing.assert_close(model(pictures[0]), before, atol=1e-4, rtol=1e-4)
    assert iobs.prune(model, pictures, 0.5, iobs.Recipe(target="residual"), solver="magnitude").coverage.share > 0.95


def test_fold_refuses_a_batch_that_the_model_does_not_take():
    with pytest.raises(CalibrationError, match="cannot take"):
        iobs.fold(nn.Sequential(Standardised(4, 6, 2)), torch.randn(2, 3, 6, 6))


def test_a_refused_batch_leaves_the_model_unchanged():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(CalibrationError, match="cannot take"):
        iobs.fold(model, torch.randn(2, 5))
    assert nn.utils.parametrize.is_parametrized(model[0])


def test_folded_convolutions_stay_frozen_and_keep_their_bias():
    model = nn.Sequential(Standardised(3, 6, 2)).requires_grad_(False)
    bias = model[0].bias
    assert iobs.fold(model, torch.randn(2, 3, 6, 6)) == ["0"]
    assert model[0].bias is bias
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_is_a_convolution_itself_is_not_named_as_changed():
    model = Standardised(3, 6, 2)
    assert iobs.fold(model, torch.randn(2, 3, 6, 6)) == []
    assert [*model.children()] == []


class Named(nn.Sequential):
    def forward(self, pictures):
        return self[0](x=pictures)


def test_a_convolution_whose_input_has_a_name_stays_as_it_is():
    model, pictures = Named(Standardised(3, 6, 2)), torch.randn(2, 3, 6, 6)
    before = model(pictures)
    assert iobs.fold(model, pictures) == []
    assert torch.equal(model(pictures), before)
