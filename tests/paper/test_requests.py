"""Options of `iobs reproduce`: options that an experiment reads, outputs, seeds."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_requests import PLAIN, TABLES, run_of
from typer.testing import CliRunner

from iobs.cli import app
from iobs.errors import DataError
from iobs.paper import experiments, figure_gaussian, find
from iobs.paper.registry import OPTIONS

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
    command = ["reproduce", "figure-gaussian", "--model", "none", "--rounds", "3", "--limit", "1", "--data", "none.txt"]
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


def test_options_of_tables_equal_the_documented_options():
    assert find("table-cbs").reads == ("model", "data", "eval_data", "limit")
    assert find("table-vit").stand_in_reads == ("rounds", "resume")
    assert set(find("table-llama2").reads) == set(OPTIONS)
    assert "model" not in find("table-llm").stand_in_reads


@TABLES
def test_seed_reaches_every_run(module, seeds):
    run_of(module)(replace(PLAIN, stand_in=True, seed=5))
    assert seeds
    assert set(seeds) == {5}


def test_reproduce_lists_experiments_as_json():
    result = CliRunner().invoke(app, ["reproduce", "--json"])
    assert [entry["name"] for entry in json.loads(result.stdout)["experiments"]] == [
        entry.name for entry in experiments()
    ]


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/self"])
def test_reproduce_refuses_an_unwritable_output_first(place, tmp_path):
    (tmp_path / "file").write_text("x")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "out"}.get(place, Path(place))
    if place == "/proc/self" and not folder.is_dir():
        pytest.skip("this system has no /proc")
    result = CliRunner().invoke(app, ["reproduce", "figure-gaussian", "-o", str(folder)])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    text = " ".join(result.stderr.split())
    assert f"{folder} cannot be the folder of the results" in text
    assert "choose another output directory" in text
    assert "trial" not in text


def test_reproduce_creates_its_output_without_leftovers(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_gaussian, "TRIALS", 1)
    monkeypatch.setattr(figure_gaussian, "STEPS", 100)
    result = CliRunner().invoke(app, ["reproduce", "figure-gaussian", "-o", str(tmp_path / "a" / "b")])
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
    result = CliRunner().invoke(app, ["reproduce", "figure-mnist"])
    assert result.exit_code == 2
    assert f"Cannot read MNIST from {tmp_path / name}" in " ".join(result.stderr.split())


def test_reproduce_says_that_a_file_has_too_few_images(tmp_path, monkeypatch):
    np.savez(tmp_path / "few.npz", x_train=np.ones((3, 28, 28), np.uint8))
    monkeypatch.setenv("IOBS_MNIST", str(tmp_path / "few.npz"))
    with pytest.raises(DataError, match="3 images, 20 are needed"):
        find("figure-mnist").run(PLAIN)
