"""`iobs prune --pattern structured:SHARE`: the written model is narrower and loads unpatched."""

from transformers import AutoModelForCausalLM

from iobs.models import load
from iobs.pruning.structured_report import StructuredReport
from iobs.report import read_report

QUICK = ("--samples", "10", "--seq-len", "32", "--batch-size", "5")


def test_language_model_is_written_narrower_and_loads_unpatched(run, tmp_path):
    out = tmp_path / "out"
    arguments = ("--pattern", "structured:30%", "--of", "parameters", "--recipe", "one-shot")
    shown = run("prune", "-o", out, *arguments, *QUICK).output
    assert "neurons are left" in shown
    report = read_report(out / "report.json")
    assert isinstance(report, StructuredReport)
    after = {one.after for one in report.widths if one.kind == "neurons"}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {model.config.intermediate_size} == after == {model.model.layers[0].mlp.up_proj.out_features}
    page = (out / "report.html").read_text(encoding="utf8")
    assert "Widths before and after" in page
    assert "of its units" in page
    assert "of its units" in (out / "README.md").read_text(encoding="utf8")
    counted = run("inspect", out).output
    assert "No zeros" in counted
    assert "neurons are left" in counted
    assert "promises" not in counted


def test_network_of_a_function_is_written_narrower(run, classifier, tmp_path):
    out = tmp_path / "out"
    given = ("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--recipe", "one-shot")
    assert "neurons are left" in run(*given, "--pattern", "structured:50%").output
    loaded = load(out).module
    assert loaded[0].out_features == loaded[2].in_features == loaded[2].weight.shape[1] == 8
    assert "8 of 16 neurons are left" in run("inspect", out).output


def test_what_units_cannot_do_is_said_before_any_work(run, classifier, tmp_path):
    given = ("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", tmp_path / "out")
    assert "torch.save" in run(*given, "--pattern", "structured:30%", "--units", "blocks", code=2).output
    assert "whole units" in run("prune", "--dry-run", "--pattern", "structured:30%", code=2).output
    own = run("prune", "-o", tmp_path / "out", "--pattern", "structured:30%,uniform=false", code=2).output
    assert "uniform=false gives every layer" in own
    kept = run("prune", "-o", tmp_path / "out", "--pattern", "structured:30%", "--low-memory", code=2).output
    assert "--pattern structured: not with" in kept
