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
    drift = [torch.randn(1, count, 4, generator=generator) for _ in inputs]
    found = Gram.empty(SimpleNamespace(shape=(4, 6), groups=1), torch.device("cpu"), True, True, True)
    for x, d, e in zip(inputs, dense, drift, strict=True):
        found.add(x, d, e)
    found.finish()
    x, d, e = (torch.cat(one, 1).double() for one in (inputs, dense, drift))
    whole = [found.own, found.cross, found.dense, found.drift.own, found.drift.dense]
    for one, (left, right) in zip(whole, [(x, x), (d, x), (d, d), (e, x), (e, d)], strict=True):
        torch.testing.assert_close(one, moments(left, right), rtol=1e-6, atol=1e-6)
    centred = found.centred()
    x, d, e = (one - one.mean(1, keepdim=True) for one in (x, d, e))
    parts = [centred.own, centred.cross, centred.dense, centred.drift.own, centred.drift.dense]
    for one, (left, right) in zip(parts, [(x, x), (d, x), (d, d), (e, x), (e, d)], strict=True):
        torch.testing.assert_close(one, moments(left, right), rtol=1e-4, atol=1e-5)
