"""Pruning a trained language model from the command line, as in the README."""

import json

import pytest
import torch
from typer.testing import CliRunner

from iobs.cli import app
from iobs.report import read_report


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def pruned(shared_data, out, rounds, *options):
    run(
        "prune", shared_data / "llama_stories260K", "--data", shared_data / "tinystories/calibration.txt",
        "-o", out, "--sparsity", 0.5, "--rounds", rounds, *options,
    )  # fmt: skip


def perplexity(shared_data, model, *options):
    data = shared_data / "tinystories/validation.txt"
    return json.loads(run("evaluate", model, "--data", data, "--json", *options).stdout)["perplexity"]


def check(shared_data, out):
    """Check that transformers loads the model and that half of each pruned matrix is zero."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    report = read_report(out / "report.json")
    assert len(report.audit) == 5 * 7
    for row in report.audit:
        weight = model.get_submodule(row.name).weight
        assert int((weight == 0).sum()) == row.zeros >= row.asked
    assert report.sparsity == pytest.approx(0.5, abs=1e-3)
    assert "50.00 % zeros" in run("inspect", out).output
    tokens = torch.arange(12)[None]
    assert bool(torch.isfinite(model(input_ids=tokens).logits).all())


def test_prune_reload_inspect_and_evaluate(shared_data, tmp_path):
    out = tmp_path / "out"
    pruned(shared_data, out, 2, "--recipe", "paper", "--solver", "admm", "--samples", 32, "--seq-len", 64)
    check(shared_data, out)
    few = ("--seq-len", 128, "--limit", 16)
    dense, sparse = (perplexity(shared_data, model, *few) for model in (shared_data / "llama_stories260K", out))
    assert dense < sparse < 3.5 * dense


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_readme_command_gives_the_documented_perplexity(shared_data, tmp_path):
    dense = perplexity(shared_data, shared_data / "llama_stories260K")
    assert dense == pytest.approx(4.644, abs=5e-4)
    pruned(shared_data, tmp_path / "out", 3, "--recipe", "best")
    check(shared_data, tmp_path / "out")
    assert perplexity(shared_data, tmp_path / "out") < 1.25 * dense
