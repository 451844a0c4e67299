import numpy as np
import pytest
import torch
from torch import nn


def _language_model(blocks=1):
    """A Llama small enough for a test, with the names of layers that the pages use.

    Most pages prune it by a recipe that solves each layer many times: every layer, row and column costs.
    """
    from iobs.models import ensure_torchvision

    ensure_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=blocks, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with the files that the pages name: DIR, a model; PRUNED and PRUNED.packed, pruned models; tables."""
    import iobs
    from iobs.report import write_report

    folder = tmp_path_factory.mktemp("pages")
    dense = _language_model()
    dense.save_pretrained(folder / "DIR")
    report = iobs.prune(dense, _text_batches(), 0.5, "one-shot", solver="magnitude")
    dense.save_pretrained(folder / "PRUNED")
    write_report(report, folder / "PRUNED")
    iobs.save_packed(folder / "PRUNED", folder / "PRUNED.packed")
    return folder


def _text_batches():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (4, 8), generator=generator) for _ in range(3)]
    return [{"input_ids": batch, "labels": batch} for batch in tokens]


@pytest.fixture
def names(files):
    """The namespace that the blocks of a page begin with: a model, its data, a layer, a regression."""
    import iobs

    random = np.random.default_rng(0)
    X = random.standard_normal((80, 20))
    y = X[:, :3] @ np.array([3.0, -2.0, 1.0]) + 0.1 * random.standard_normal(80)
    model = _language_model()
    return {
        "iobs": iobs,
        "torch": torch,
        "nn": nn,
        "model": model,
        "network": _language_model,
        "batches": _text_batches(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "X": X,
        "y": y,
        "labels": np.repeat(np.arange(10), 2),
        "k": 3,
        "objective": iobs.objectives.LeastSquares(X, y),
    }


@pytest.fixture
def pruned_names(names):
    """The names of a page whose model is pruned already: half of every matrix of its layers is zero."""
    with torch.no_grad():
        for name, parameter in names["model"].named_parameters():
            if "_proj" in name:
                parameter[:, ::2] = 0
    return names


@pytest.fixture
def layer_names(names):
    """The names of a page about one layer: its inputs X, weights W and bias b, its problem, the mean of its inputs."""
    generator = torch.Generator().manual_seed(3)
    W, X = torch.randn(4, 144, generator=generator), torch.randn(400, 144, generator=generator)
    problem = names["iobs"].Quadratic.at(W, X.T @ X / len(X))
    return names | {"W": W, "X": X, "b": torch.zeros(4), "mean": X.mean(0), "problem": problem}
