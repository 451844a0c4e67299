"""What ran of the tests and in which order: parts of tests/conftest.py that tests/test_gate.py tests."""

import json
from collections import Counter
from pathlib import Path

import pytest


def rotated(items, number):
    """The items in the same cyclic order, from another place on for each number.

    Steps of the golden ratio cover a circle evenly whatever the distance of the numbers, here of commits.
    """
    start = int(len(items) * (number * 0.6180339887498949 % 1))
    return [*items[start:], *items[:start]]


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
