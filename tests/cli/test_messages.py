"""--json prints one JSON object on stdout, --quiet prints no progress, and the report keeps the command."""

import inspect
import json

import pytest
from short_options import ONE_SHOT

from iobs.cli import app, running
from iobs.report import read_report


@pytest.fixture
def talkative(classifier):
    """A network whose file prints to stdout."""
    classifier.write_text(classifier.read_text() + "\n\ndef loud():\n    print('made a network')\n    return net()\n")
    return classifier


def values(result):
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_every_command_takes_json_and_quiet():
    named = {one.name: inspect.signature(one.callback).parameters for one in app.registered_commands}
    assert [name for name, options in named.items() if not {"as_json", "quiet"} <= options.keys()] == []


def test_prune_prints_only_the_report_as_json(run, talkative, tmp_path):
    arguments = (f"{talkative}:loud", "--data", f"{talkative}:batches", *ONE_SHOT, "-o", tmp_path / "out", "--json")
    plan = values(run("prune", *arguments, "--dry-run"))
    assert [row["zeros"] for row in plan["layers"]] == [56, 24]
    result = run("prune", *arguments)
    found = values(result)
    assert found["output"] == str(tmp_path / "out")
    assert sum(row["zeros"] for row in found["audit"]) == 80
    assert "made a network" in result.stderr


def test_inspect_and_pack_print_json(run, classifier, tmp_path):
    run("prune", f"{classifier}:net", "--data", f"{classifier}:batches", *ONE_SHOT, "-o", tmp_path / "out", "--quiet")
    found = values(run("inspect", tmp_path / "out", "--json"))
    assert (found["zeros"], found["weights"], found["pruned"]) == (80, 160, ["0", "2"])
    assert values(run("pack", tmp_path / "out", "--json"))["output"] == str(tmp_path / "out.packed")
    assert values(run("pack", "--unpack", tmp_path / "out.packed", "--json"))["output"].endswith(".packed.dense")


def test_solve_prints_only_json(run, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("a,b,y\n" + "".join(f"{i},{i * i % 7},{2 * i}\n" for i in range(20)))
    assert values(run("solve", file, "-k", 1, "--json"))["features"][0]["name"] == "a"


def test_quiet_prints_no_progress(run, classifier, tmp_path):
    arguments = (f"{classifier}:net", "--data", f"{classifier}:batches", "--samples", 1000, *ONE_SHOT)
    assert "samples to calibrate on" in run("prune", *arguments, "-o", tmp_path / "loud").stderr
    quiet = run("prune", *arguments, "-o", tmp_path / "quiet", "-q")
    assert quiet.stderr == ""
    assert "Written" in quiet.stdout
    assert "none" in run("prune", tmp_path / "none", "-o", tmp_path / "out", "-q", code=2).stderr


def test_report_keeps_the_command(run, classifier, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["iobs", "prune", f"{classifier}:net", "-o", "/far/away/out"])
    run("prune", f"{classifier}:net", "--data", f"{classifier}:batches", *ONE_SHOT, "-o", tmp_path / "out")
    kept = read_report(tmp_path / "out" / "report.json").settings["command"]
    assert kept == "iobs prune mine.py:net -o out"
    assert kept in (tmp_path / "out" / "report.html").read_text(encoding="utf8")


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["prune", "{here}/model", "-o{here}/out"], "iobs prune model -oout"),
        (["prune", "a/b", "--data=/else/where/text file.txt"], "iobs prune a/b '--data=text file.txt'"),
        (["prune", "--include", "re:/x", "--set", "a=/b"], "iobs prune --include re:/x --set a=/b"),
    ],
)
def test_shown_command_has_no_folder_of_the_machine(typed, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["iobs", *(word.format(here=tmp_path) for word in typed)])
    assert running.shown_command() == kept
