"""Networks on a GPU, calibration data on the CPU: nothing meets what lies elsewhere. The GPU is a pretended one."""

import copy
from dataclasses import replace

import pytest
import torch
from networks import build
from pretended_gpu import OnGpu, PretendedGpu, on_gpu

import iobs
from iobs.prune.peers import prune_by_fisher
from iobs.prune.settings import RECIPES
from iobs.prune.steps import GradientStep


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    with PretendedGpu():
        yield


def test_the_pretence_refuses_what_a_gpu_refuses(gpu):
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    assert there.device.type == "cuda"
    assert (there + 1).device == there.device
    assert there.cpu().device.type == "cpu"
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


SHORT = RECIPES["best"]["polish"]
CHOICES = {
    "fast": ("convolutional", {"recipe": "fast"}),
    "best": ("perceptron", {"recipe": "best", "polish": replace(SHORT, steps=12, most_steps=None)}),
    "rounds": (
        "convolutional",
        {"rounds": 3, "schedule": "cubic", "step": GradientStep(lr=1e-3, loss="kl", augment="auto", steps=2)},
    ),
    "block outputs": ("transformer", {"rounds": 2, "step": GradientStep(lr=1e-3, loss="block", optimizer="adam")}),
    "fresh data": ("perceptron", {"rounds": 2, "data": "fresh", "step": GradientStep(lr=1e-3, loss="kl")}),
    "batch norm": ("convolutional", {"batch_norm": "update", "target": "dense", "inputs": "dense"}),
    "by Fisher": ("perceptron", {"allocation": "fisher", "refine": "swap"}),
    "searched for": ("perceptron", {"allocation": iobs.Allocation("evolve", generations=3)}),
    "OBC": ("perceptron", {"solver": "obc"}),
    "SparseGPT": ("transformer", {"solver": "sparsegpt", "target": "dense"}),
    "Wanda": ("transformer", {"solver": "wanda"}),
    "magnitude": ("convolutional", {"solver": "magnitude", "depthwise": True}),
}


@pytest.mark.parametrize(("name", "options"), CHOICES.values(), ids=CHOICES)
def test_what_can_be_chosen(gpu, name, options):
    model, data = build(name)
    report = iobs.prune(on_gpu(model), data, iobs.Unstructured(0.5), **options)
    assert report.sparsity == pytest.approx(0.5, abs=0.02)
    assert all(isinstance(value, OnGpu) for value in model.parameters())


def test_the_paper_and_a_checkpoint(gpu, tmp_path):
    model, data = build("perceptron")
    twin = on_gpu(copy.deepcopy(model))
    for network in (on_gpu(model), twin):  # the second is read from the journal
        iobs.prune(network, data, iobs.Unstructured(0.5), recipe="paper", checkpoint=tmp_path)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("method", ["magnitude", "woodfisher", "cbs", "chita"])
def test_peers(gpu, method):
    model, data = build("perceptron")
    assert prune_by_fisher(on_gpu(model), data, 0.5, method=method).sparsity == pytest.approx(0.5, abs=0.01)
