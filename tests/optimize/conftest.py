from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from iobs.optimize.minimize import minimize
from iobs.optimize.objectives.linear import LeastSquares


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Use one thread: on small systems threads only wait for each other."""
    with threadpool_limits(1):
        yield


@pytest.fixture(autouse=True, scope="session")
def _compiled(_one_thread):
    """Compile the search before the clock of a limit starts in a test: a slow machine needs minutes for it."""
    minimize(LeastSquares(np.eye(4), np.arange(4.0)), 2)
