"""Layers whose class does not multiply its input by its weight stay dense."""

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import LayerSelectionError
from iobs.models import ensure_torchvision
from iobs.pruning.calibration.observe import multiplied_as_they_are
from iobs.pruning.network.selection import select


class Standardised(nn.Conv2d):
    """Standardises the weight: zeros of the stored weight are not zeros of the weight it multiplies by."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class Padded(nn.Conv2d):
    """Pads the input, which is too small for a plain convolution."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (3, 3, 3, 3)))


class Scaled(nn.Linear):
    """Takes an additional argument and scales the product."""

    def forward(self, x, scale):
        return super().forward(x) * scale


class Same(nn.Linear):
    """Multiplies like a linear layer with another order of summation, and overwrites its input."""

    def forward(self, x):
        product = x @ self.weight.T + self.bias
        x.zero_()
        return product


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.standardised, self.padded = Standardised(3, 8, 3), Padded(8, 4, 7)
        self.same, self.scaled, self.head = Same(4 * 36, 8), Scaled(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.padded(torch.relu(self.standardised(x))).flatten(1)
        return self.head(self.scaled(self.same(hidden), scale=2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_change_input_or_weight_stay_dense(dtype):
    torch.manual_seed(0)
    network = Unusual().eval().to(dtype)
    selection = multiplied_as_they_are(network, select(network), torch.randn(6, 3, 8, 8, dtype=dtype))
    assert [layer.name for layer in selection.layers] == ["same", "scaled", "head"]
    assert {name: reason.text.split(" ")[0] for name, reason in selection.skipped.items()} == dict.fromkeys(
        ("standardised", "padded"), "its"
    )
    alone = select(network, include=["standardised", "padded"])
    with pytest.raises(LayerSelectionError, match=r"standardised, padded"):
        multiplied_as_they_are(network, alone, torch.randn(6, 3, 8, 8, dtype=dtype))
    data = [(torch.randn(6, 3, 8, 8, dtype=dtype), torch.randint(3, (6,)))]
    report = iobs.prune(network, data, 0.5, iobs.Recipe(solver="global-magnitude"), holdout=0.0)
    assert [row.name for row in report.audit] == ["same", "scaled", "head", "padded"]  # seen behind the padding


def test_layers_that_stay_dense_take_no_share_of_the_sparsity():
    torch.manual_seed(0)
    network = Unusual().eval()  # it has no gradient: a layer changes its input in place
    report = iobs.prune(network, [torch.randn(40, 3, 8, 8)], 0.5, "one-shot", allocation="auto")
    assert [row.name for row in report.audit] == ["same", "scaled", "head", "padded"]
    assert report.sparsity == 0.5 == pytest.approx(report.best.asked)
    assert bool((network.standardised.weight != 0).all())


def test_linearity_check_runs_no_forward_on_plain_layers():
    network = nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    network.register_forward_pre_hook(lambda *_: pytest.fail("called"))
    selection = select(network)
    assert multiplied_as_they_are(network, selection, torch.randn(4, 8)) is selection


@pytest.mark.parametrize("kind", ["StdConv2d", "ScaledStdConv2d", "Conv2dSame"])
def test_timm_convolutions_that_change_the_weight_stay_dense(kind):
    ensure_torchvision()
    layers = pytest.importorskip("timm.layers")
    network = nn.Sequential(getattr(layers, kind)(3, 8, 3, stride=2), nn.Flatten(), nn.LazyLinear(4)).eval()
    images = torch.randn(4, 3, 8, 8)
    network(images)
    selection = multiplied_as_they_are(network, select(network), images)
    assert [layer.name for layer in selection.layers] == ["2"]
    assert "changes the weight" in selection.skipped["0"].text
