import pytest
import torch
from torch import nn

import iobs
from iobs import models


def pruned(folder, pattern):
    """The small llama, every layer pruned by magnitude or rounded in one pass, without an effort for accuracy."""
    loaded = models.load(folder)
    batch = {"input_ids": torch.arange(3, 67).reshape(2, 32)}
    solver = "sparsegpt" if "int4" in str(pattern) else "magnitude"
    iobs.prune(loaded.module, batch, pattern, "one-shot", solver=solver, holdout=0)
    return loaded


@pytest.fixture(scope="session")
def half_sparse(shared_data):
    """A llama of 260 thousand parameters with half of its weights zero; tests do not change it."""
    return pruned(shared_data / "llama_stories260K", iobs.Unstructured(0.5))


@pytest.fixture(scope="session")
def four_bits(shared_data):
    """The llama with half of its weights zero, the others on a 4-bit grid; tests do not change it."""
    return pruned(shared_data / "llama_stories260K", iobs.Unstructured(0.5) & iobs.Grid(4))


@pytest.fixture
def tokens():
    return torch.randint(3, 500, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def network():
    """A function: a small network with grouped convolutions and linear layers of so many columns, half of it zero."""

    def make(columns):
        torch.manual_seed(0)
        convolutions = (nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2))
        model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4 * 36, columns), nn.ReLU(), nn.Linear(columns, 5))
        for one in model:
            if isinstance(one, nn.Linear | nn.Conv2d):
                one.weight.data[torch.rand_like(one.weight) < 0.5] = 0
        return model.eval()

    return make
