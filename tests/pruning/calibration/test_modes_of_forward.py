"""Forwards in inference mode and inside `torch.vmap`."""

import pytest
import torch
from torch import nn

import iobs


class InInferenceMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    @torch.inference_mode()
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


class InVmap(InInferenceMode):
    """The same network, mapped over samples."""

    def forward(self, x):
        return torch.vmap(lambda one: self.head(torch.relu(self.body(one))))(x)


class Plain(InInferenceMode):
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def pruned(kind, recipe):
    torch.manual_seed(0)
    model = kind()
    report = iobs.prune(model, list(torch.randn(6, 16, 6)), 0.5, recipe)
    assert report.zeros == 36
    return model.state_dict()


@pytest.mark.parametrize("kind", [InInferenceMode, InVmap])
def test_results_equal_those_of_a_plain_forward(kind):
    recipe = iobs.Recipe(target="residual")
    expected, found = pruned(Plain, recipe), pruned(kind, recipe)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
