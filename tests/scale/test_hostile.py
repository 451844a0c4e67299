"""Hostile and broken input through the command line: one clear error each, nothing written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from iobs import models
from iobs.cli import app
from iobs.models import output
from iobs.prune.record import Report

WAYS = {"in memory": (), "low memory": ("--low-memory",)}
QUICK = ("--samples", "8", "--seq-len", "32", "--solver", "magnitude")


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def wrong_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(7, 160)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def missing(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def remote_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mystery", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def climbing(folder):
    weights = {"weight_map": {"model.norm.weight": "../../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    (folder / "model.safetensors").unlink()


def no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")


def short_text(folder):
    (folder.parent / "text.txt").write_text("few words")


DAMAGE = {
    "truncated shard": (truncate, "cut short|damaged"),
    "wrong shape": (wrong_shape, "shape"),
    "missing weight": (missing, "lacks"),
    "pickled weights": (pickled, "pickled"),
    "remote code": (remote_code, "mystery|remote code|code"),
    "path that climbs": (climbing, "outside"),
    "no tokenizer": (no_tokenizer, "has no tokenizer"),
    "damaged tokenizer": (damaged_tokenizer, "tokenizer of .* cannot be loaded"),
    "text shorter than a window": (short_text, "less than one window of 32"),
}


@pytest.fixture
def place(tmp_path):
    """A folder with a model, and a text to calibrate on."""
    shutil.copytree(models.EMBEDDED, tmp_path / "in" / "model")
    (tmp_path / "in" / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return tmp_path


def arguments(place, *options):
    data = ("--data", str(place / "in" / "text.txt"))
    return ["prune", str(place / "in" / "model"), "-o", str(place / "results" / "out"), *data, *QUICK, *options]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_clear_error_and_nothing_is_written(damage, message, options, place):
    damage(place / "in" / "model")
    before = sorted(file.relative_to(place) for file in place.rglob("*"))
    result = CliRunner().invoke(app, arguments(place, *options))
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    assert re.search(message, lines[0])
    assert sorted(file.relative_to(place) for file in place.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_request_to_end_leaves_nothing(options, place):
    """SIGTERM while weights are pruned; a resumed run finds its checkpoint and nothing else."""
    command = [sys.executable, "-m", "iobs", *arguments(place, *options, "--resume"), "--solver", "obc"]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    checkpoint = place / "results" / "out.checkpoint"
    while not list(checkpoint.glob("*.safetensors")) and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, shown = child.communicate()
    assert child.returncode == 128 + signal.SIGTERM, shown
    assert [entry.name for entry in (place / "results").iterdir()] == ["out.checkpoint"]


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(tmp_path):
    with output.output_directory(tmp_path / "out") as living:
        abandoned = tmp_path / ".out.abc.partial"
        abandoned.mkdir()
        (abandoned / "model.safetensors").write_bytes(b"half")
        other = tmp_path / ".other.abc.partial"
        other.mkdir()
        with output.output_directory(tmp_path / "out") as temporary:
            assert living.exists()
            assert not abandoned.exists()
            assert other.exists()
            (temporary / "file").write_text("x")
        shutil.rmtree(tmp_path / "out")
        (living / "file").write_text("y")
    assert (tmp_path / "out" / "file").read_text() == "y"


NETWORK = """
import torch

class Greedy(torch.nn.Linear):
    def forward(self, value):
        if len(value) > 1:  # the first look at the data is one sample
            torch.empty(1 << 60)
        return super().forward(value)

def net():
    return Greedy(4, 4)

def batches():
    return [torch.ones(8, 4)]
"""


def test_too_little_memory_is_one_clear_error_that_says_what_to_lower(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(NETWORK)
    out = tmp_path / "results" / "out"
    result = CliRunner().invoke(app, ["prune", f"{file}:net", "--data", f"{file}:batches", "-o", str(out)])
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, result.output
    assert "Lower --batch-size" in lines[0]
    assert not out.parent.exists()


def test_the_demo_replaces_an_earlier_demo_only(tmp_path, monkeypatch):
    """A folder of another kind that has the same names is refused before any work."""
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
    return Report({"model": model}, "task loss", None, [], 0, {}, [], 1.0, 1)
