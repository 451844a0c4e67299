import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn


def _language_model():
    """A Llama small enough for a test, with the names of layers that the pages use."""
    from iobs.models import ensure_torchvision

    ensure_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@functools.lru_cache(maxsize=1)
def _models():
    """The models of the pages; copied for each page, because pages change them."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)).eval()
    return {"model": _language_model(), "network": network}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with the files that the pages name: DIR, a model; PRUNED and PRUNED.packed, pruned models; tables."""
    import iobs
    from iobs.report import write_report

    folder = tmp_path_factory.mktemp("pages")
    dense = _language_model()
    dense.save_pretrained(folder / "DIR")
    report = iobs.prune(dense, _text_batches(), 0.5, "one-shot")
    dense.save_pretrained(folder / "PRUNED")
    write_report(report, folder / "PRUNED")
    iobs.save_packed(folder / "PRUNED", folder / "PRUNED.packed")
    return folder


def _text_batches():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (4, 16), generator=generator) for _ in range(5)]
    return [{"input_ids": batch, "labels": batch} for batch in tokens]


@pytest.fixture
def names(files):
    """The namespace that the blocks of a page begin with: a model, its data, a layer, a regression."""
    import iobs

    generator = torch.Generator().manual_seed(2)
    random = np.random.default_rng(0)
    X = random.standard_normal((80, 20))
    y = X[:, :3] @ np.array([3.0, -2.0, 1.0]) + 0.1 * random.standard_normal(80)
    inputs, labels = torch.randn(256, 64, generator=generator), torch.randint(0, 10, (256,), generator=generator)
    models = copy.deepcopy(_models())
    return {
        "iobs": iobs,
        "torch": torch,
        "nn": nn,
        "model": models["model"],
        "batches": _text_batches(),
        "optimizer": torch.optim.AdamW(models["model"].parameters(), lr=1e-3),
        "network": models["network"],
        "image_batches": list(zip(inputs.split(64), labels.split(64), strict=True)),
        "X": X,
        "y": y,
        "labels": np.repeat(np.arange(10), 2),
        "k": 3,
        "objective": iobs.objectives.LeastSquares(X, y),
    }


@pytest.fixture
def layer_names(names):
    """As `names`, where X and W are a layer's inputs and weights."""
    generator = torch.Generator().manual_seed(3)
    W, X = torch.randn(8, 16, generator=generator), torch.randn(64, 16, generator=generator)
    return names | {"W": W, "X": X}
