import pytest
import torch

import iobs
from iobs import models


def pruned(folder, pattern):
    """The small llama, every layer pruned by magnitude or rounded in one pass, without an effort for accuracy."""
    loaded = models.load(folder)
    batch = {"input_ids": torch.arange(3, 67).reshape(2, 32)}
    iobs.prune(loaded.module, batch, pattern, solver="sparsegpt" if "int4" in str(pattern) else "magnitude", holdout=0)
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
