"""Models on a GPU with calibration data on the CPU: tensors of two devices never meet. The GPU is simulated."""

import copy
from dataclasses import replace

import pytest
import torch
from menagerie import build
from simulated_gpu import OnGpu, SimulatedGpu, on_gpu

import iobs


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    with SimulatedGpu():
        yield


def test_simulated_gpu_refuses_what_a_gpu_refuses(gpu):
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


SHORT = replace(iobs.Recipe.preset("best").finetune, steps=12, most_steps=None)
CHOICES = {
    "fast": ("convolutional", {"recipe": "fast"}),
    "best": ("perceptron", {"recipe": "best", "finetune": SHORT}),
    "rounds": (
        "convolutional",
        {"rounds": iobs.Rounds(3, "cubic", finetune=iobs.FineTune(lr=1e-3, loss="kl", augment="auto", steps=2))},
    ),
    "block outputs": (
        "transformer",
        {"rounds": iobs.Rounds(2, finetune=iobs.FineTune(lr=1e-3, loss="block", optimizer="adam"))},
    ),
    "fresh data": ("perceptron", {"rounds": iobs.Rounds(2, finetune=iobs.FineTune(lr=1e-3, loss="kl"), data="fresh")}),
    "batch norm": ("convolutional", {"batch_norm": "update", "target": "dense", "inputs": "dense"}),
    "by Fisher": ("perceptron", {"allocation": "fisher", "refine": "swap"}),
    "searched for": ("perceptron", {"allocation": iobs.Allocation("evolve", generations=3)}),
    "OBC": ("perceptron", {"solver": "obc"}),
    "SparseGPT": ("transformer", {"solver": "sparsegpt", "target": "dense"}),
    "Wanda": ("transformer", {"solver": "wanda"}),
    "magnitude": ("convolutional", {"solver": "magnitude", "depthwise": True}),
}


@pytest.mark.parametrize(("name", "options"), CHOICES.values(), ids=CHOICES)
def test_prune_on_a_gpu_with_every_option(gpu, name, options):
    model, data = build(name)
    report = iobs.prune(on_gpu(model), data, iobs.Unstructured(0.5), **{"recipe": "one-shot", **options})
    assert report.sparsity == pytest.approx(0.5, abs=0.02)
    assert all(isinstance(value, OnGpu) for value in model.parameters())


def test_paper_recipe_on_a_gpu_resumes_from_a_checkpoint(gpu, tmp_path):
    model, data = build("perceptron")
    second = on_gpu(copy.deepcopy(model))
    for network in (on_gpu(model), second):  # the second run reads its results from the checkpoint
        iobs.prune(network, data, iobs.Unstructured(0.5), "paper", checkpoint=tmp_path)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("method", ["global-magnitude", "woodfisher", "cbs", "chita"])
def test_prune_by_fisher_on_a_gpu(gpu, method):
    model, data = build("perceptron")
    report = iobs.prune(on_gpu(model), data, 0.5, iobs.Recipe(solver=method), holdout=0.0)
    assert report.sparsity == pytest.approx(0.5, abs=0.01)
