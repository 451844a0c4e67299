import os
import time
from pathlib import Path

import environment  # noqa: F401 - before torch is loaded

# isort: split
import pytest
import torch
from tally import Tally, rotated

STARTED = time.monotonic()


def pytest_addoption(parser):
    group = parser.getgroup("iobs")
    group.addoption(
        "--minutes", type=float, help="start no test after this many minutes; the run is then incomplete, and fails"
    )
    group.addoption(
        "--rotate", type=int, metavar="N", help="begin at another place for each N; an incomplete run does not fail"
    )
    group.addoption("--tally", metavar="FILE", help="write the outcome of each test to this file, as JSON lines")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the process that prints the summary
        config.pluginmanager.register(Tally(config))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--rotate") is not None:
        items[:] = rotated(items, config.getoption("--rotate"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Leave a test out, without a report, once the time is over."""
    minutes = item.config.getoption("--minutes")
    return True if minutes is not None and time.monotonic() - STARTED > 60 * minutes else None


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _speeds_of_small_products():
    """Measure the speed of the machine by few entries: most runs and plans measure it, for half a second or more."""
    from iobs.pruning.cost import prices

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_SIDE": 32, "_ENTRIES": 32, "_TOKENS": 32, "_CALLS": 1, "_MOST_CALLS": 1}.items():
            patch.setattr(prices, name, value)
        yield


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
