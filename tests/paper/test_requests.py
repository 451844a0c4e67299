"""Options of `iobs reproduce`: options that an experiment reads, outputs, seeds."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paper_tables import experiments, figure_gaussian
from paper_tables.experiment import OPTIONS
from reproduce import app
from small_requests import PLAIN, TABLES, run_of
from typer.testing import CliRunner

from iobs.errors import DataError

GIVEN = {
    "model": "gpt2",
    "data": ("a",),
    "eval_data": ("a", "b"),
    "questions": "q.jsonl",
    "rounds": 2,
    "limit": 1,
    "resume": True,
}


def test_reproduce_refuses_unread_options_in_one_message():
    command = ["figure-gaussian", "--model", "none", "--rounds", "3", "--limit", "1", "--data", "none.txt"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert "figure-gaussian does not read --model, --data, --rounds, --limit; leave them out" in text
    assert "trial" not in text


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize("entry", experiments(), ids=lambda entry: entry.name)
def test_experiment_accepts_only_the_options_it_reads(entry, stand_in):
    request = replace(PLAIN, stand_in=stand_in, output=Path("folder"))
    entry.check(request)
    for option in OPTIONS:
        one = replace(request, **{option: GIVEN[option]})
        if option in (entry.stand_in_reads if stand_in else entry.reads):
            entry.check(one)
        else:
            with pytest.raises(DataError, match=f"does not read --{option.replace('_', '-')}; leave it out"):
                entry.check(one)


@TABLES
def test_seed_reaches_every_run(module, seeds):
    run_of(module)(replace(PLAIN, stand_in=True, seed=5))
    assert seeds
    assert set(seeds) == {5}


def test_reproduce_lists_experiments_as_json():
    result = CliRunner().invoke(app, ["--json"])
    assert [entry["name"] for entry in json.loads(result.stdout)["experiments"]] == [
        entry.name for entry in experiments()
    ]


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_reproduce_refuses_an_unwritable_output_first(place, tmp_path):
    (tmp_path / "file").write_text("x")
    folder = tmp_path / "file" if place == "a file" else tmp_path / "file" / "out"
    result = CliRunner().invoke(app, ["figure-gaussian", "-o", str(folder)])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    text = " ".join(result.stderr.split())
    assert f"{folder} cannot be the folder of the results" in text
    assert "choose another output directory" in text
    assert "trial" not in text


def test_reproduce_creates_its_output_without_leftovers(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_gaussian, "TRIALS", 1)
    monkeypatch.setattr(figure_gaussian, "STEPS", 100)
    result = CliRunner().invoke(app, ["figure-gaussian", "-o", str(tmp_path / "a" / "b")])
    assert result.exit_code == 0, result.output
    assert {entry.name for entry in (tmp_path / "a" / "b").iterdir()} == {"figure_gaussian.csv", "figure_gaussian.png"}


@pytest.mark.parametrize("name", ["cut.gz", "spoilt.gz", "cut.npz", "empty.npz"])
def test_reproduce_names_damaged_mnist_files(name, tmp_path, monkeypatch):
    packed = gzip.compress(b"\x00\x00\x08\x03" + bytes(12) + np.random.default_rng(0).bytes(784 * 20))
    np.savez(tmp_path / "whole.npz", x_train=np.zeros((20, 28, 28), np.uint8))
    contents = {
        "cut.gz": packed[:-2000],
        "spoilt.gz": packed[:10] + b"\xff" * 50 + packed[60:],
        "cut.npz": (tmp_path / "whole.npz").read_bytes()[:-30],
        "empty.npz": b"",
    }
    (tmp_path / name).write_bytes(contents[name])
    monkeypatch.setenv("IOBS_MNIST", str(tmp_path / name))
    result = CliRunner().invoke(app, ["figure-mnist"])
    assert result.exit_code == 2
    assert f"Cannot read MNIST from {tmp_path / name}" in " ".join(result.stderr.split())
