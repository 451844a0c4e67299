"""One-shot pruning by Fisher blocks on whole networks."""

import pytest
import torch
from menagerie import Unfed
from torch import nn

import iobs


def test_prune_by_fisher_accepts_float64():
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().eval()
    data = [(torch.randn(30, 8).double(), torch.randint(4, (30,)))]
    for method in ("cbs", "chita"):
        report = iobs.prune(network, data, 0.5, iobs.Recipe(solver=method), holdout=0.0)
        assert report.sparsity == pytest.approx(0.5, abs=0.01)


def test_prune_by_fisher_skips_layers_without_inputs():
    model = Unfed()
    model.used.weight.requires_grad_(False)
    data = [(torch.randn(20, 8), torch.randint(4, (20,)))]
    report = iobs.prune(model, data, 0.5, iobs.Recipe(solver="cbs"), holdout=0.0)
    assert report.sparsity == 0.5
