import json
import os
import time
from collections import Counter
from pathlib import Path

# Compiled kernels are kept between runs and shared by parallel workers; numba reads the variable when it is imported.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".numba_cache"))
# Triton's kernels run in its interpreter on the CPU; the variable is read when triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
# One thread that sleeps while it waits, here and in every process that a test starts: the tests are small and run in
# parallel, and threads that spin while they wait for a core made runs on a busy machine up to 20 times slower.
os.environ.update(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import pytest
import torch

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


def rotated(items, number):
    """The items in the same cyclic order, from another place on for each number.

    Steps of the golden ratio cover a circle evenly whatever the distance of the numbers, here of commits.
    """
    start = int(len(items) * (number * 0.6180339887498949 % 1))
    return [*items[start:], *items[:start]]


def pytest_collection_modifyitems(config, items):
    if config.getoption("--rotate") is not None:
        items[:] = rotated(items, config.getoption("--rotate"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Leave a test out, without a report, once the time is over."""
    minutes = item.config.getoption("--minutes")
    return True if minutes is not None and time.monotonic() - STARTED > 60 * minutes else None


class Tally:
    """Outcomes of the tests: how many ran of how many, and why some were skipped."""

    def __init__(self, config):
        self.config, self.collected = config, 0
        self.outcomes, self.reasons = {}, {}  # of tests, by name
        self.notes = set()  # what tests tell with record_property("note", text)
        self.file = config.getoption("--tally")
        if self.file:
            Path(self.file).write_text("", encoding="utf-8")

    def write(self, **record):
        if self.file:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def pytest_collection_finish(self, session):
        self.found(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.found(len(ids))

    def found(self, count):
        if count != self.collected:
            self.collected = count
            self.write(collected=count)

    def pytest_runtest_logreport(self, report):
        """Keep the outcome of a test, of which each phase sends a report; a process that dies sends one of its own."""
        if report.failed or report.when == "call" or (report.when == "setup" and report.skipped):
            self.outcomes[report.nodeid] = report.outcome
        self.notes |= {text for name, text in report.user_properties if name == "note"}
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[report.nodeid] = reason.removeprefix("Skipped: ")
        if report.when == "teardown" or report.when not in ("setup", "call"):
            self.write(test=report.nodeid, outcome=self.outcomes[report.nodeid], reason=self.reasons.get(report.nodeid))

    @property
    def incomplete(self):
        return self.config.getoption("--minutes") is not None and len(self.outcomes) < self.collected

    def pytest_sessionfinish(self, session):
        if self.incomplete and self.config.getoption("--rotate") is None and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for text in sorted(self.notes):
            terminalreporter.write_line(text)
        for reason, count in Counter(self.reasons.values()).most_common():
            terminalreporter.write_line(f"skipped {count:5d}  {reason}")
        if self.incomplete:
            terminalreporter.write_line(f"incomplete: {len(self.outcomes)} of {self.collected} tests ran")


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
