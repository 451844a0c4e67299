"""Damaged input, interruption and lack of memory on the command line: one error each, no output."""

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
from iobs.cli.running import Watch

WAYS = {"in memory": (), "low memory": ("--low-memory",)}


QUICK = ("--samples", "8", "--seq-len", "32", "--recipe", "one-shot", "--solver", "magnitude")


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
def place(small_model, tmp_path):
    """A folder with a model and a calibration text."""
    shutil.copytree(small_model, tmp_path / "in" / "model")
    (tmp_path / "in" / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return tmp_path


def arguments(place, *options):
    data = ("--data", str(place / "in" / "text.txt"))
    return ["prune", str(place / "in" / "model"), "-o", str(place / "results" / "out"), *data, *QUICK, *options]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_input_raises_one_error_and_writes_nothing(damage, message, options, place):
    damage(place / "in" / "model")
    before = sorted(file.relative_to(place) for file in place.rglob("*"))
    result = CliRunner().invoke(app, arguments(place, *options))
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    assert re.search(message, lines[0])
    assert sorted(file.relative_to(place) for file in place.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_sigterm_leaves_only_the_checkpoint(options, place):
    """SIGTERM during pruning: the checkpoint for a resumed run is the only file left."""
    # The small model would be pruned before the signal comes.
    shutil.copytree(models.EMBEDDED, place / "in" / "model", dirs_exist_ok=True)
    command = [sys.executable, "-m", "iobs", *arguments(place, *options, "--resume"), "--solver", "obc"]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    checkpoint = place / "results" / "out.checkpoint"
    while not list(checkpoint.glob("*.safetensors")) and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, shown = child.communicate()
    assert child.returncode == 128 + signal.SIGTERM, shown
    assert b"Continue with: iobs prune" in shown
    assert [entry.name for entry in (place / "results").iterdir()] == ["out.checkpoint"]


NETWORK = """
import torch

class Greedy(torch.nn.Linear):
    def forward(self, value):
        if len(value) > 1:  # the first forward pass has one sample
            torch.empty(1 << 60)
        return super().forward(value)

def net():
    return Greedy(4, 4)

def batches():
    return [torch.ones(8, 4)]
"""


def test_out_of_memory_error_names_options_to_lower(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(NETWORK)
    out = tmp_path / "results" / "out"
    result = CliRunner().invoke(app, ["prune", f"{file}:net", "--data", f"{file}:batches", "-o", str(out)])
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, result.output
    assert "Lower --batch-size" in lines[0]
    assert not out.parent.exists()


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_interrupted_run_resumes_to_the_same_bytes(options, place, monkeypatch):
    """Ctrl-C leaves only the checkpoint; the resumed run removes it at the end."""

    def interrupt(watch, record, round_index):
        seen.append(record.name)
        if len(seen) == 5:
            raise KeyboardInterrupt

    whole = arguments(place, *options, "--resume")
    reference = place / "beside" / "whole"  # as deep as the other output: recipe.yaml names data from its own folder
    whole[whole.index("-o") + 1] = str(reference)
    assert CliRunner().invoke(app, whole).exit_code == 0
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "on_layer", interrupt)
        stopped = CliRunner().invoke(app, arguments(place, *options, "--resume"))
    assert stopped.exit_code == 130
    assert "Finished layers and steps are saved in" in stopped.stderr
    assert "Stopped. Nothing half-written" in stopped.stderr
    assert [entry.name for entry in (place / "results").iterdir()] == ["out.checkpoint"]
    other = CliRunner().invoke(app, arguments(place, *options, "--resume", "--set", "damping=0.5"))
    assert other.exit_code == 2
    assert "damping was 0.01 and is 0.5" in other.stderr
    again = CliRunner().invoke(app, arguments(place, *options, "--resume"))
    assert again.exit_code == 0, again.output
    assert [entry.name for entry in (place / "results").iterdir()] == ["out"]
    for name in ("model.safetensors", "recipe.yaml"):
        assert (place / "results" / "out" / name).read_bytes() == (reference / name).read_bytes()
