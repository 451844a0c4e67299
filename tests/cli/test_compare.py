"""`iobs compare` on a small classifier: table, files, figure, failures of single methods."""

import errno
import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from iobs.cli import app
from iobs.cli import compare as compare_command
from iobs.cli.compare import PEERS, PRESETS, SOLVERS
from iobs.pruning.baselines import METHODS
from iobs.pruning.recipe import CBS, WoodFisher

CLASSIFIER = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def batches():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(20, 8, generator=g), torch.randint(4, (20,), generator=g)) for _ in range(3)]

def others():
    return batches()[:1]
"""


@pytest.fixture
def call(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CLASSIFIER)

    def run(*arguments):
        sources = ["--data", f"{file}:batches", "--eval-data", f"{file}:others"]
        return CliRunner().invoke(app, ["compare", f"{file}:net", *sources, *map(str, arguments)])

    return run


EVERY = [name for name in (*PRESETS, *SOLVERS, *PEERS) if name not in ("best", "paper", "chita++")]


@pytest.mark.parametrize(
    "methods",
    [["one-shot", "sparsegpt", *PEERS[:1]], pytest.param(EVERY, marks=pytest.mark.slow)],
    ids=["a few", "every"],
)
def test_compare_runs_methods_at_two_patterns(methods, call, tmp_path, real_figures):
    result = call("--methods", ",".join(methods), "--patterns", "0.5,2:4", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "out" / "comparison.json").read_text())
    found = {(trial["method"], trial["pattern"]): trial for trial in values["trials"]}
    assert {name for name, pattern in found if pattern == "0.5"} == set(methods)
    assert {name for name, pattern in found if pattern == "2:4"} == {name for name in methods if name not in PEERS}
    assert all(trial["sparsity"] == pytest.approx(0.5, abs=0.01) for trial in values["trials"])
    assert (tmp_path / "out" / "comparison.svg").read_text().lstrip().startswith("<?xml")
    assert all(name in result.output for name in methods)


def test_compare_prints_json(call):
    result = call("--methods", "fast", "--patterns", "0.5", "--json")
    assert json.loads(result.stdout)["trials"][0]["method"] == "fast"


def test_compare_refuses_equal_calibration_and_eval_data(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CLASSIFIER)
    result = CliRunner().invoke(app, ["compare", f"{file}:net", "--data", f"{file}:batches"])
    assert result.exit_code == 2
    assert "--eval-data" in result.output


def test_compare_checks_patterns_first(call):
    result = call("--methods", "fast", "--patterns", "0.5,3:5")
    assert result.exit_code != 0
    assert "3:5" in result.output or "3:5" in str(result.exception)


def test_compare_refuses_a_file_as_output_first(call, tmp_path, monkeypatch):
    monkeypatch.setattr("iobs.cli.loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "out").write_text("x")
    result = call("--methods", "fast", "--patterns", "0.5", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "cannot be the folder of the results" in result.output


def test_compare_refuses_an_unwritable_output_first(call, monkeypatch):
    if not Path("/proc/self").is_dir():
        pytest.skip("this system has no /proc")
    monkeypatch.setattr("iobs.cli.loading.load_model", lambda *_: pytest.fail("the model was loaded"))
    result = call("--methods", "fast", "--patterns", "0.5", "-o", "/proc/self")
    assert result.exit_code == 2
    assert "/proc/self cannot be the folder of the results" in result.output


def test_compare_keeps_results_of_another_comparison(call, tmp_path):
    assert call("--methods", "magnitude", "--patterns", "0.5", "-o", tmp_path).exit_code == 0
    result = call("--methods", "wanda", "--patterns", "0.5", "-o", tmp_path)
    assert result.exit_code == 2
    assert "comparison.json exists" in result.output
    assert "magnitude" in (tmp_path / "comparison.json").read_text()


def test_compare_prints_results_it_cannot_write(call, tmp_path, monkeypatch):
    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = call("--methods", "magnitude,wanda", "--patterns", "0.5", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.output.count("No space left on device") == 2


def test_compare_runs_a_repeated_method_once(call):
    result = call("--methods", "magnitude, magnitude", "--patterns", "0.5", "--json")
    assert len(json.loads(result.stdout)["trials"]) == 1


def test_compare_scores_all_methods_on_the_same_data(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        CLASSIFIER + "\n\ndef fresh():\n"
        "    from pathlib import Path\n"
        "    with Path(__file__).with_name('calls').open('a') as calls:\n"
        "        calls.write('x')\n"
        "    return others()\n"
    )
    arguments = ["--data", f"{file}:batches", "--eval-data", f"{file}:fresh", "--methods", "magnitude,wanda"]
    result = CliRunner().invoke(app, ["compare", f"{file}:net", *arguments, "--patterns", "0.5,0.6"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "calls").read_text() == "x"


def test_compare_refuses_an_unknown_method(call):
    result = call("--methods", "fastest")
    assert result.exit_code != 0
    assert "fastest" in result.output


def test_compare_continues_after_a_method_that_fails(call, tmp_path, monkeypatch):
    def recipe_of(name):
        return real(name).but(damping=-1.0) if name == "wanda" else real(name)

    real = compare_command.recipe_of
    monkeypatch.setattr(compare_command, "recipe_of", recipe_of)
    result = call("--methods", "fast,wanda,magnitude", "--patterns", "0.5", "-o", tmp_path / "out")
    assert result.exit_code == 1, result.output  # fails at the end; table and files hold the other methods
    assert "perplexity" in result.output or "accuracy" in result.output
    assert (tmp_path / "out" / "comparison.svg").is_file()
    assert "wanda at 0.5 failed: damping must not be negative" in " ".join(result.output.split())
    values = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [trial["method"] for trial in values["trials"]] == ["fast", "magnitude"]


def test_compare_continues_after_methods_that_give_nan_or_have_no_memory(call, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB.\nA table.")

    monkeypatch.setitem(METHODS, CBS, lambda weights, *_: weights * math.nan)
    monkeypatch.setitem(METHODS, WoodFisher, full)
    result = call("--methods", "cbs,woodfisher,magnitude", "--patterns", "0.5", "-o", tmp_path / "out")
    assert result.exit_code == 1, result.output
    shown = " ".join(result.output.split())
    assert "cbs at 0.5 failed: The pruned weight of layer" in shown
    assert "woodfisher at 0.5 failed: The memory is not enough (CUDA out of memory. Tried to allocate 3 TiB.)" in shown
    values = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [trial["method"] for trial in values["trials"]] == ["magnitude"]


def test_compare_runs_magnitude_without_targets(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CLASSIFIER + "\ndef bare():\n    return [batch[0] for batch in batches()]\n")
    arguments = ["--data", f"{file}:bare", "--eval-data", f"{file}:others", "--methods", "global-magnitude,magnitude"]
    result = CliRunner().invoke(app, ["compare", f"{file}:net", *arguments, "--patterns", "0.5", "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["trials"]) == 2


def test_compare_checks_for_targets_first(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CLASSIFIER + "\ndef bare():\n    return [batch[0] for batch in batches()]\n")
    arguments = ["--data", f"{file}:bare", "--eval-data", f"{file}:others", "--methods", "fast,chita"]
    result = CliRunner().invoke(app, ["compare", f"{file}:net", *arguments, "--patterns", "0.5"])
    assert result.exit_code != 0
    assert "needs targets" in str(result.exception) + result.output
    assert "pruning" not in result.output
