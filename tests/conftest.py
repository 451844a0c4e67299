import os
from pathlib import Path

import pytest
import torch

# Tests are small and run side by side: one thread each, or they wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real pretrained networks and data; tests that need it skip where it is not."""
    folder = Path(os.environ.get("IOBS_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (folder / "zoo.py").exists():
        pytest.skip("the shared networks and data are not here (set IOBS_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session")
def zoo(shared_data):
    """The loaders of the shared networks."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("zoo", shared_data / "zoo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
