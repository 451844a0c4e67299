"""`iobs demo`: its output, and which folders it replaces."""

import json
import re
from dataclasses import replace

import pytest
from checks import one_error
from typer.testing import CliRunner

import iobs
from iobs import models
from iobs.cli import app, benching
from iobs.cli import demo as demo_command
from iobs.pruning.coverage import Coverage
from iobs.pruning.report import ComparisonLoss, Report
from iobs.report import read_report


def test_demo_writes_a_model_and_a_report(run, tmp_path, monkeypatch):
    """The demo with magnitude pruning and the rounds only, on few windows."""
    real, workload = demo_command.methods, benching.Workload

    def two(rounds):
        (first, plain), *_, (last, iterated) = real(rounds).items()
        step = replace(iterated.rounds.finetune, steps=1, batch_size=2)
        others_dense = iobs.Rule(r"re:(?!model\.layers\.0\.mlp\.).*", dense=True)
        few = replace(iterated.rounds, finetune=step)
        recipe = iterated.but(solver="magnitude", rounds=few, rules=(others_dense,))
        return {first: plain, last: recipe}

    monkeypatch.setattr(demo_command, "methods", two)
    monkeypatch.setattr(benching, "Workload", lambda *names, **sizes: workload(*names, **sizes | {"tokens": 8}))
    out = tmp_path / "iobs-demo"
    text = run("demo", "-o", out, "--samples", 8, "--rounds", 2).output
    assert "magnitude" in text
    assert "Reloaded" in text
    last = r"^Packed as int8: 3\.1 -> [12]\.\d MB, [\d,]+ -> [\d,]+ tokens/s \(iobs pack, iobs run\)\.$"
    assert re.match(last, text.splitlines()[-1])
    assert {entry.name for entry in out.iterdir()} == {"report.html", "report.json", "recipe.yaml", "model"}
    report = read_report(out / "report.json")
    assert [*report.scores] == ["dense", "magnitude", "I-OBS, 2 rounds"]
    assert "is not empty" not in run("inspect", out).output
    assert demo_command._is_demo(out)  # and so may be replaced
    (out / "mine.txt").write_text("x")
    assert "not empty" in one_error(run("demo", "-o", out, code=2))


def test_demo_refuses_a_folder_with_another_model(run, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_text("mine")
    assert "not empty" in one_error(run("demo", "-o", tmp_path, code=2))
    (tmp_path / "report.json").write_text('{"tests": 5}')
    assert "not empty" in one_error(run("demo", "-o", tmp_path, code=2))
    assert weights.read_text() == "mine"


def test_demo_compares_the_documented_methods():
    assert [*demo_command.methods(3)] == ["magnitude", "Wanda", "SparseGPT", "ADMM", "I-OBS, 3 rounds"]


def test_demo_replaces_only_an_earlier_demo(tmp_path, monkeypatch):
    """A folder of another kind with the same file names is refused first."""
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("the work has begun"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious.safetensors").write_text("mine")
    for content in (None, "{}", "[1]", json.dumps(as_report("mine").as_dict())):
        if content is not None:
            (tmp_path / "report.json").write_text(content)
        result = CliRunner().invoke(app, ["demo", "-o", str(tmp_path)])
        assert "not empty" in result.stderr, result.output
    (tmp_path / "report.json").write_text(json.dumps(as_report("embedded").as_dict()))
    with pytest.raises(pytest.fail.Exception, match="the work has begun"):
        CliRunner().invoke(app, ["demo", "-o", str(tmp_path)], catch_exceptions=False)


def as_report(model):
    return Report({"model": model}, ComparisonLoss("task loss"), [], 0, Coverage(0, 0, 0, 0), [], 1.0, 1)
