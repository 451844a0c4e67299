"""Mistakes of the user end in one line and an exit code, before any work, and leave no files."""

import re

import numpy as np
import pytest
from checks import one_error
from short_options import ONE_SHOT, QUICK, SMALL

from iobs.errors import NonFiniteError
from iobs.report import read_report

pytestmark = pytest.mark.usefixtures("small_embedded")


def test_dry_run_checks_that_data_exists(run, tmp_path):
    for option in ("--data", "--eval-data"):
        message = one_error(run("prune", "--dry-run", *SMALL, option, tmp_path / "none.txt", code=2))
        assert "none.txt is not a file" in message


def test_eval_data_is_checked_before_pruning(run, classifier, tmp_path, monkeypatch):
    np.savez(tmp_path / "wide.npz", images=np.zeros((9, 1, 50, 50), np.float32), labels=np.arange(9))
    monkeypatch.setattr("iobs.cli.in_memory._run", lambda *_: pytest.fail("the work began"))
    options = ("--data", f"{classifier}:batches", "--eval-data", tmp_path / "wide.npz", "-o", tmp_path / "out")
    assert "cannot take batch 1, tensors of shape (8, 1, 50, 50)" in one_error(
        run("prune", f"{classifier}:net", *options, code=2)
    )


@pytest.mark.parametrize(
    ("options", "message"), [(("--include", "nothing*"), "matches none"), (("--pattern", "3:7"), "divisible by 7")]
)
@pytest.mark.parametrize("dry", [True, False])
def test_layer_patterns_are_checked_before_scoring(run, tmp_path, monkeypatch, options, message, dry):
    monkeypatch.setattr("iobs.cli.running.evaluate", lambda *_, **__: pytest.fail("the dense model was scored"))
    assert message in one_error(run("prune", "-o", tmp_path / "out", *options, *(["--dry-run"] * dry), code=2))


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "holdout=1.5"), "holdout must lie"),
        (("--set", "rounds.schedule=cubic"), "needs three rounds or more"),
        (("--eval-data", "none.txt"), "none.txt"),
    ],
)
def test_impossible_options_raise_before_calibration(run, tmp_path, monkeypatch, options, message, dry):
    monkeypatch.setattr("iobs.cli.loading.batches_of_run", lambda *_: pytest.fail("samples were drawn"))
    assert message in one_error(run("prune", "-o", tmp_path / "out", *options, *(["--dry-run"] * dry), code=2))


@pytest.mark.parametrize(
    ("network", "data", "options", "message"),
    [
        ("net", "spoiled", (), "batch 2"),
        ("spoiled_net", "batches", (), "NaN"),
        ("net", "empty", (), "no batch"),
        ("net", "batches", ("--ignore", "nothing*"), "matches none"),
        ("net", "batches", ("--sparsity", "1.0"), r"\[0, 1\)"),
        ("net", "batches", ("--pattern", "2:4"), "divisible by 4, got 7"),
        ("net", "batches", ("--pattern", "x"), "Cannot read the pattern"),
        ("net", "batches", ("--recipe", "wish"), "wish"),
        ("absent", "batches", (), "no function"),
    ],
)
def test_mistakes_print_one_error_line(run, classifier, tmp_path, network, data, options, message):
    folder = tmp_path / "folder"
    arguments = (f"{classifier}:{network}", "--data", f"{classifier}:{data}", "-o", folder / "out", *options)
    assert re.search(message, one_error(run("prune", *arguments, code=2)))
    assert not folder.exists()


def test_existing_output_is_refused_before_loading(run, tmp_path):
    (tmp_path / "mine").write_text("x")
    assert "not empty" in one_error(run("prune", "no/such-model", "-o", tmp_path, code=2))


def test_text_shorter_than_a_window_is_refused(run, tmp_path):
    (tmp_path / "a.txt").write_text("few words")
    message = one_error(run("prune", "-o", tmp_path / "out", "--data", tmp_path / "a.txt", code=2))
    assert "less than one window of 256" in message


def test_wrong_usage_exits_with_2(run, tmp_path):
    run("prune", code=2)
    run("prune", "-o", tmp_path / "out", "--sparsity", "0.5", "--pattern", "2:4", code=2)
    run("prune", "-o", tmp_path / "out", "--samples", 0, code=2)
    run("prune", "-o", tmp_path / "out", "--batch-size", 0, code=2)
    run("prune", "-o", tmp_path / "out", "--rounds", "many", code=2)
    run("prune", "-o", tmp_path / "out", "--lr", 0.01, code=2)
    run("evaluate", "--dtype", "float3", code=2)
    run("evaluate", "--device", "nonsense", code=2)
    run("evaluate", "--device", "meta", code=2)  # torch makes tensors there, which hold no numbers


def test_interruption_leaves_no_files(run, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("iobs.cli.running.write_report", interrupted)
    result = run("prune", "-o", tmp_path / "out", *ONE_SHOT, *QUICK, code=130)
    assert "Nothing half-written" in result.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NonFiniteError("The model gives NaN on batch 2."), 1, "The model gives NaN on batch 2."),
        (RuntimeError("can't allocate memory\nmany lines"), 1, "can't allocate memory"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
    ],
)
def test_pruned_model_is_written_if_scoring_fails(run, classifier, tmp_path, monkeypatch, error, code, said):
    def evaluate(*_, **options):
        if "length" not in options:  # a few samples, before any work
            return {}
        if scored:
            raise error
        scored.append(1)
        return {"accuracy": 50.0}

    scored = []
    monkeypatch.setattr("iobs.cli.running.evaluate", evaluate)
    sources = ("--data", f"{classifier}:batches", "--eval-data", f"{classifier}:batches")
    result = run("prune", f"{classifier}:net", *sources, *ONE_SHOT, "-o", tmp_path / "out", code=code)
    note = f"The pruned model could not be scored: {said}"
    assert note in result.stderr.splitlines()
    report = read_report(tmp_path / "out" / "report.json")
    assert report.notes[-1] == note
    assert not any(metric == "accuracy" for values in report.scores.values() for metric in values)
    assert "50.00 % zeros" in run("inspect", tmp_path / "out").output


@pytest.mark.parametrize("arguments", [("demo",), ("compare",), ("prune", "--dry-run")])
def test_seed_that_torch_does_not_take_is_one_error(run, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "seed must lie between" in one_error(run(*arguments, "--seed", 2**64, code=2))
    assert not [*tmp_path.iterdir()]
