"""Moments of inputs whose mean is far larger than their spread."""

from types import SimpleNamespace

import pytest
import torch

from iobs.pruning.calibration.gram import Gram


def moments(left, right):
    return left.transpose(1, 2) @ right / left.shape[1]


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("far", [0.0, 100.0, 900.0])
def test_centred_moments_keep_variances_far_below_the_mean(far, count):
    generator = torch.Generator().manual_seed(0)
    offset = far * torch.linspace(0.5, 1, 6)
    inputs = [torch.randn(1, count, 6, generator=generator) + offset for _ in range(20)]
    dense = [one + 0.1 * torch.randn(1, count, 6, generator=generator) for one in inputs]
    outputs = [torch.randn(1, count, 4, generator=generator) + offset[:4] for _ in inputs]
    found, other = (
        Gram.empty(SimpleNamespace(shape=(4, 6), groups=1), torch.device("cpu"), True, True, flag)
        for flag in (False, True)
    )
    for x, d, y in zip(inputs, dense, outputs, strict=True):
        found.add(x, d)
        other.add(x, y)
    found.finish()
    other.finish()
    x, d, y = (torch.cat(one, 1).double() for one in (inputs, dense, outputs))
    whole = [found.own, found.cross, found.dense, other.own, other.cross]
    for one, (left, right) in zip(whole, [(x, x), (d, x), (d, d), (x, x), (y, x)], strict=True):
        torch.testing.assert_close(one, moments(left, right), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other.outputs, y.square().sum() / y.shape[1])
    centred, centred_other = found.centred(), other.centred()
    x, d, y = (one - one.mean(1, keepdim=True) for one in (x, d, y))
    parts = [centred.own, centred.cross, centred.dense, centred_other.own, centred_other.cross]
    for one, (left, right) in zip(parts, [(x, x), (d, x), (d, d), (x, x), (y, x)], strict=True):
        torch.testing.assert_close(one, moments(left, right), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(centred_other.outputs, y.square().sum() / y.shape[1], rtol=1e-4, atol=1e-5)
