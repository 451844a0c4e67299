"""What runs before a change enters main: the options of tests/conftest.py, and scripts/ci.py."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tally import Tally, rotated

ROOT = Path(__file__).resolve().parents[1]


def test_run_whose_time_is_over_fails_and_says_how_many_tests_ran(tmp_path):
    tally = tmp_path / "tally.jsonl"
    arguments = ["-q", "-p", "no:cacheprovider", "--minutes", "0", "--tally", str(tally), "tests/test_gate.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True)
    count = json.loads(tally.read_text())["collected"]
    assert done.returncode == 1, done.stdout + done.stderr
    assert count > 3
    assert f"incomplete: 0 of {count} tests ran" in done.stdout
    assert " passed" not in done.stdout


def report(name, when, outcome, reason=None):
    longrepr = ("file", 3, f"Skipped: {reason}") if reason else None
    flags = {kind: outcome == kind for kind in ("passed", "failed", "skipped")}
    return SimpleNamespace(nodeid=name, when=when, outcome=outcome, longrepr=longrepr, user_properties=[], **flags)


@pytest.fixture
def tally(tmp_path):
    options = {"--tally": str(tmp_path / "tally.jsonl"), "--minutes": 5, "--rotate": None}
    return Tally(SimpleNamespace(getoption=options.get))


def test_outcome_of_a_test_is_that_of_its_worst_phase(tally, tmp_path):
    for name, *phases in (
        ("passes", ("setup", "passed"), ("call", "passed"), ("teardown", "passed")),
        ("fails", ("setup", "passed"), ("call", "failed"), ("teardown", "passed")),
        ("fails at its end", ("setup", "passed"), ("call", "passed"), ("teardown", "failed")),
        ("has no fixture", ("setup", "failed"), ("teardown", "passed")),
        ("is skipped", ("setup", "skipped", "no GPU"), ("teardown", "passed")),
        ("kills its process", ("???", "failed")),
    ):
        for when, outcome, *reason in phases:
            tally.pytest_runtest_logreport(report(name, when, outcome, *reason))
    records = [json.loads(line) for line in (tmp_path / "tally.jsonl").read_text().splitlines()]
    expected = ["passed", "failed", "failed", "failed", "skipped", "failed"]
    assert [record["outcome"] for record in records] == expected == [*tally.outcomes.values()]
    assert [record["reason"] for record in records if record["reason"]] == ["no GPU"]


def test_run_is_incomplete_until_every_test_has_run(tally):
    tally.pytest_xdist_node_collection_finished(["a", "b"])
    session = SimpleNamespace(exitstatus=0)
    tally.pytest_runtest_logreport(report("a", "call", "passed"))
    tally.pytest_sessionfinish(session)
    assert session.exitstatus == 1
    session.exitstatus = 0
    tally.pytest_runtest_logreport(report("b", "call", "passed"))
    tally.pytest_sessionfinish(session)
    assert session.exitstatus == 0


@pytest.mark.parametrize("distance", [1, 2, 3, 7, 10, 16, 25, 50, 100])
@pytest.mark.parametrize("first", [0, 5000])
def test_ten_runs_that_reach_a_third_of_the_long_set_see_all_of_it(distance, first):
    items, seen = [*range(500)], set()
    for run in range(10):
        order = rotated(items, first + run * distance)
        assert sorted(order) == items
        seen |= set(order[:167])
    assert seen == set(items)


def test_processes_have_one_thread_that_sleeps_while_it_waits():
    code = "import os, torch; print(torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["1", "PASSIVE"]


def load_ci(monkeypatch):
    spec = importlib.util.spec_from_file_location("ci", ROOT / "scripts" / "ci.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ci", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ci(tmp_path, monkeypatch):
    """The script, with commands that end at once: `codes` says how by target, None if their time is over."""
    module = load_ci(monkeypatch)
    module.codes, module.ran, module.outcomes = {}, [], {"test": "pps", "test-long": "pp", "test-vision": "p"}

    def run(command, seconds):
        target = command[1]
        module.ran.append(target)
        if target in module.outcomes:
            file = tmp_path / f"{target}.jsonl"
            words = {"p": "passed", "f": "failed", "s": "skipped"}
            lines = [{"collected": 3 if target == "test" else 4}]
            lines += [{"outcome": words[sign], "reason": "no GPU"} for sign in module.outcomes[target]]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"outcome": "pas')
        return module.codes.get(target, 0)

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "TALLIES", tmp_path)
    return module


def last_lines(capsys, count):
    return capsys.readouterr().out.splitlines()[-count:]


def test_last_lines_say_what_ran_and_what_was_not_reached(ci, capsys):
    ci.outcomes["test-vision"] = "pppp"
    assert ci.main() == 0
    assert ci.ran == ["lint", "test", "package", "docs", "test-vision", "test-long"]
    expected = ["2 of 4 tests of the long set were not reached.", "8 passed, 0 failed, 1 skipped"]
    assert last_lines(capsys, 2) == expected


@pytest.mark.parametrize("target", ["lint", "test", "package", "docs", "test-vision"])
def test_failure_of_any_step_fails_the_run_and_spares_the_long_set(ci, capsys, target):
    ci.outcomes["test-vision"] = "pppp"
    ci.codes[target] = 2
    assert ci.main() == 1
    assert ci.ran == ["lint", "test", "package", "docs", "test-vision"]
    assert f"failed: make {target}" in capsys.readouterr().out


def test_failure_in_the_long_set_fails_the_run(ci, capsys):
    ci.outcomes |= {"test-vision": "pppp", "test-long": "pf"}
    ci.codes["test-long"] = 2
    assert ci.main() == 1
    assert last_lines(capsys, 1) == ["7 passed, 1 failed, 1 skipped"]


@pytest.mark.parametrize("target", ["lint", "test", "package", "docs", "test-vision"])
def test_step_that_does_not_end_in_time_makes_the_run_incomplete(ci, capsys, target):
    ci.outcomes["test-vision"] = "pppp"
    ci.codes[target] = None
    assert ci.main() == 1
    assert any(line.startswith("incomplete: 3 of 3 tests ran") for line in last_lines(capsys, 2))


def test_gate_of_which_a_test_did_not_run_makes_the_run_incomplete(ci, capsys):
    ci.outcomes |= {"test": "pp", "test-vision": "pppp"}
    assert ci.main() == 1
    assert last_lines(capsys, 2)[0].startswith("incomplete: 2 of 3 tests ran")


def test_command_is_ended_with_its_children_when_its_time_is_over(monkeypatch):
    module = load_ci(monkeypatch)
    assert module.run([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3
    assert module.run(["sleep", "600"], 0.1) is None
