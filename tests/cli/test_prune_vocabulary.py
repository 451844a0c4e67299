"""`iobs prune --pattern structured:SHARE --units vocabulary`: fewer tokens, and a directory that loads unpatched."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from iobs.report import read_report

pytestmark = pytest.mark.filterwarnings("ignore:The corpus has")

ARGUMENTS = ("--pattern", "structured:50%", "--units", "vocabulary", "--seq-len", "64")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The statement is executed in the same way.\n" * 600, encoding="utf8")
    return file


@pytest.mark.parametrize("how", [(), ("--low-memory",)])
def test_model_and_tokenizer_are_written_smaller(run, small_model, text, tmp_path, how):
    out = tmp_path / "out"
    shown = run("prune", small_model, "-o", out, *ARGUMENTS, "--data", text, *how).output
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == model.config.vocab_size == len(model.lm_head.weight) == 1024
    assert tokenizer.decode(tokenizer("statement \u00e9")["input_ids"], skip_special_tokens=True) == "statement \u00e9"
    assert "1,024 of 2,048 tokens are left" in shown
    assert "tokens are removed" in shown
    assert ("bits per byte" in shown) is not bool(how)
    report = read_report(out / "report.json")
    assert report.settings["pattern"] == "structured:0.5,units=vocabulary"
    assert "1,024 of 2,048 tokens" in run("inspect", out).output
    again = tmp_path / "again"
    run("prune", small_model, "-o", again, "--recipe", out / "recipe.yaml")
    assert (again / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()


def test_dry_run_shows_what_would_be_removed(run, small_model, text):
    arguments = ("prune", small_model, *ARGUMENTS, "--data", text, "--dry-run")
    assert "2,048" in run(*arguments).output
    plan = json.loads(run(*arguments, "--json").stdout)
    assert plan["seconds"] > 0
    assert (plan["units"][0]["count"], plan["units"][0]["kept"], plan["units"][0]["kind"]) == (2048, 1024, "tokens")


@pytest.mark.parametrize("useless", [("--solver", "greedy"), ("--recipe", "best"), ("--samples", "4"), ("--resume",)])
def test_options_without_meaning_are_refused(run, small_model, tmp_path, useless):
    shown = run("prune", small_model, "-o", tmp_path / "out", *ARGUMENTS, *useless, code=2).output
    assert useless[0] in shown


def test_network_without_a_tokenizer(run, classifier, tmp_path):
    shown = run("prune", f"{classifier}:net", "-o", tmp_path / "out", *ARGUMENTS, code=2).output
    assert "has no tokenizer" in shown
