"""Models on a GPU with calibration data on the CPU: tensors of two devices never meet. The GPU is simulated."""

import copy
from dataclasses import replace

import pytest
import torch
from menagerie import SmallTransformer, build, token_batches
from simulated_gpu import GPU, OnGpu, on_gpu

import iobs
from iobs.pruning.layerwise import problem
from iobs.pruning.recipe import BlockFit


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
    there.cpu().zero_()
    assert there.tolist() == [1.0, 1.0, 1.0]
    assert gpu.reads == {"cpu": 2, "tolist": 1}


def test_simulated_gpu_checks_the_kernels_of_a_backward_pass(gpu):
    here = torch.ones(3)

    class Mixing(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value * 2

        @staticmethod
        def backward(context, gradient):
            return gradient + here

    value = torch.ones(3, device="cuda", requires_grad=True)
    assert torch.autograd.grad((value * value).sum(), value)[0].device == GPU
    with pytest.raises(RuntimeError, match="same device"):
        torch.autograd.grad(Mixing.apply(value).sum(), value)


# Every step of the simulated GPU is slow: most runs have a cheap solver and few layers. test_device_paths.py runs each
# solver on it.
SOME = {
    "convolutional": ["stem", "stages.1.*", "depthwise", "head"],
    "perceptron": ["fc2", "fc3"],
    "transformer": ["*.q", "*.down"],
}
SHORT = replace(iobs.Recipe.preset("best").finetune, steps=12, most_steps=None)
CHOICES = {
    "fast": ("convolutional", {"recipe": iobs.Recipe.preset("fast").but(blocks=BlockFit(steps=4, lr=1e-3))}),
    "best": ("perceptron", {"recipe": "best", "finetune": SHORT}),
    "rounds": (
        "convolutional",
        {"rounds": iobs.Rounds(3, "cubic", finetune=iobs.FineTune(lr=1e-3, loss="kl", augment="auto", steps=2))},
    ),
    "block outputs": (
        "transformer",
        {"rounds": iobs.Rounds(2, finetune=iobs.FineTune(lr=1e-3, loss="block", optimizer="adam"))},
    ),
    "fresh data": (
        "perceptron",
        {
            "solver": "sparsegpt",
            "include": SOME["perceptron"],
            "rounds": iobs.Rounds(2, finetune=iobs.FineTune(lr=1e-3, loss="kl"), data="fresh"),
        },
    ),
    "batch norm": (
        "convolutional",
        {
            "solver": "sparsegpt",
            "batch_norm": "update",
            "target": "dense",
            "inputs": "dense",
            "include": SOME["convolutional"],
        },
    ),
    "by Fisher": (
        "perceptron",
        {"solver": "sparsegpt", "allocation": "fisher", "refine": "refit", "include": SOME["perceptron"]},
    ),
    "swaps": ("perceptron", {"solver": "magnitude", "refine": "swap", "include": "fc3"}),
    "searched for": ("perceptron", {"allocation": iobs.Allocation("search", generations=3)}),
    "OBC": ("perceptron", {"solver": "obc"}),
    "SparseGPT": ("transformer", {"solver": "sparsegpt", "target": "dense", "include": SOME["transformer"]}),
    "Wanda": ("transformer", {"solver": "wanda", "include": SOME["transformer"]}),
    "magnitude": ("convolutional", {"solver": "magnitude", "depthwise": True, "include": SOME["convolutional"]}),
    "residual": (
        "transformer",
        {"solver": "sparsegpt", "target": "residual", "bias": "refit", "include": SOME["transformer"]},
    ),
    "blocks": (
        "transformer",
        {
            "solver": "sparsegpt",
            "target": "residual",
            "include": SOME["transformer"],
            "blocks": BlockFit(masks=2, between=1, steps=2, lr=1e-3, network_steps=2, network_lr=1e-4),
        },
    ),
    "last window": ("transformer", {"blocks": BlockFit(steps=4, masks=3, between=2, last="kl")}),
}


# By make test-all. "residual", "Wanda" and "batch norm" run the same networks in the gate.
LONG = {"fast", "rounds", "best", "searched for", "last window", "block outputs", "blocks", "SparseGPT", "magnitude"}


def small(name):
    """The network of a case, the transformer of two narrow blocks, and its batches."""
    if name != "transformer":
        return build(name)
    torch.manual_seed(0)
    return SmallTransformer(width=8, depth=2).eval(), token_batches(count=2, size=6, length=8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*choice, id=label, marks=[pytest.mark.slow] if label in LONG else [])
        for label, choice in CHOICES.items()
    ],
)
def test_prune_on_a_gpu_with_every_option(gpu, name, options):
    model, data = small(name)
    report = iobs.prune(on_gpu(model), data, iobs.Unstructured(0.5), **{"recipe": "one-shot", **options})
    assert report.sparsity == pytest.approx(0.5, abs=0.02)
    assert all(isinstance(value, OnGpu) for value in model.parameters())


def test_paper_recipe_on_a_gpu_resumes_from_a_checkpoint(gpu, tmp_path):
    model, data = build("perceptron")
    second = on_gpu(copy.deepcopy(model))
    paper = iobs.Recipe.preset("paper")
    recipe = paper.but(rounds=replace(paper.rounds, count=2))
    for network in (on_gpu(model), second):  # the second run reads its results from the checkpoint
        iobs.prune(network, data, iobs.Unstructured(0.5), recipe, include=SOME["perceptron"], checkpoint=tmp_path)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("method", ["global-magnitude", "woodfisher", "cbs", "chita"])
def test_prune_by_fisher_on_a_gpu(gpu, method):
    model, data = build("perceptron")
    report = iobs.prune(on_gpu(model), data, 0.5, iobs.Recipe(solver=method), holdout=0.0)
    assert report.sparsity == pytest.approx(0.5, abs=0.01)


def test_coded_integers_on_a_gpu_carry_errors_from_row_to_row(gpu, monkeypatch):
    torch.manual_seed(0)
    model, data = SmallTransformer(width=32, depth=1).eval(), token_batches(count=2, size=6, length=8)
    rounding, shared = problem.SuccessiveRounding, []
    monkeypatch.setattr(problem, "SuccessiveRounding", lambda *given: shared.append(given) or rounding(*given))
    iobs.prune(on_gpu(model), data, iobs.Rate(9.0), "one-shot", include=["*.q", "*.down"])
    assert shared
    assert all(isinstance(value, OnGpu) for value in model.parameters())
