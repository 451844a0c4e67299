from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from iobs.data import tables


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Use one thread: on small systems threads only wait for each other."""
    with threadpool_limits(1):
        yield


@pytest.fixture(params=["pandas", "plain"])
def write(request, tmp_path, monkeypatch):
    """A function that writes bytes or text as a table, which is read with pandas and without."""
    if request.param == "pandas":
        pytest.importorskip("pandas")
        monkeypatch.setattr(tables, "_SMALL", 0)
    else:
        monkeypatch.setattr(tables.importlib.util, "find_spec", lambda name: None)

    def run(content, name="t.csv"):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return run
