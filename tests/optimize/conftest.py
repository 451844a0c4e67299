from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Use one thread: on small systems threads only wait for each other."""
    with threadpool_limits(1):
        yield
