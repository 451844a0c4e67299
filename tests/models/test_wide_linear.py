"""Linear layers in 16 bits whose products are in float32."""

import copy

import pytest
import torch
from torch import nn

from iobs.models import sixteen_bits
from iobs.models.sixteen_bits import WideLinear


def widened(bias, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(24, 70, bias).to(dtype).requires_grad_(False)
    twin = copy.deepcopy(layer)
    twin.__class__ = WideLinear
    return layer, twin


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", [1, 24 * 16, 10**6])
def test_outputs_and_gradients_are_those_of_a_linear_layer(bias, dtype, part, monkeypatch):
    monkeypatch.setattr(sixteen_bits, "_PART", part)
    layer, twin = widened(bias, dtype)
    given = torch.randn(2, 5, 24).to(dtype)
    pull = torch.randn(2, 5, 70).to(dtype)
    results = []
    for one in (layer.double(), twin):
        own = given.to(one.weight.dtype).requires_grad_(True)
        output = one(own)
        output.backward(pull.to(output.dtype))
        results.append((output.detach(), own.grad))
    for exact, found in zip(*results, strict=True):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def test_a_copy_reads_its_own_weight():
    _, twin = widened(False, torch.bfloat16)
    other = copy.deepcopy(twin)
    with torch.no_grad():
        other.weight.zero_()
    given = torch.randn(3, 24).bfloat16()
    assert not other(given).any()
    assert twin(given).any()
