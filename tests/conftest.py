import hashlib
import os
import time
from pathlib import Path

# Compiled kernels are kept between runs and shared by parallel workers; numba reads the variable when it is imported.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".numba_cache"))
# Triton's kernels run in its interpreter on the CPU; the variable is read when triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

# One thread for each test process: the tests are small, and parallel processes would compete for the cores.
torch.set_num_threads(1)

_STARTED = pytest.StashKey[float]()
_FIRST = ("test_floors.py", "test_limits.py")  # under a limit of time


def pytest_addoption(parser):
    help_text = "start no test after this many minutes of tests; those left are skipped and counted (default: no limit)"
    parser.addoption("--minutes", type=float, default=None, help=help_text)


def pytest_collection_modifyitems(config, items):
    """Mix the files under a limit of time, so that what is left out is a part of every room and not the last rooms.

    The quick tests of the order of rooms and of the sizes of files come first: they are never left out.
    """
    if config.getoption("--minutes") is not None:
        items.sort(key=lambda item: (item.path.name not in _FIRST, hashlib.sha256(item.path.name.encode()).digest()))


def pytest_collection_finish(session):
    session.config.stash[_STARTED] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - item.config.stash[_STARTED] > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of this run are over")


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def embedded():
    """The language model that comes with the package; tests do not change it."""
    from iobs import models

    return models.load()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of pretrained networks and data; tests that need it are skipped if it does not exist."""
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
