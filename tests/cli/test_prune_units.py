"""`iobs prune --pattern structured:SHARE`: the written model is narrower and loads unpatched."""

import json
from functools import partial

import pytest
from transformers import AutoModelForCausalLM, GPT2Config

from iobs.models import load
from iobs.pruning.plan import widths
from iobs.pruning.structured_report import StructuredReport
from iobs.report import read_report

QUICK = ("--samples", "10", "--seq-len", "32", "--batch-size", "5")


@pytest.mark.usefixtures("small_embedded")
def test_language_model_is_written_narrower_and_loads_unpatched(run, tmp_path, real_figures):
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


@pytest.mark.usefixtures("small_embedded")
def test_every_layer_of_a_llama_may_have_its_own_width(run, tmp_path):
    out = tmp_path / "out"
    pattern = ("--pattern", "structured:30%,uniform=false")
    shown = run("prune", "-o", out, *pattern, "--recipe", "one-shot", *QUICK).output
    assert "zeros fill layers up to widths that nemotron-nas has" in shown
    assert json.loads((out / "config.json").read_text(encoding="utf8"))["model_type"] == "nemotron-nas"
    loaded = load(out)
    assert loaded.task == "causal-lm"
    assert loaded.module.model.layers[0].mlp.up_proj.out_features % 256 == 0
    loaded.save(tmp_path / "again")  # as every later run does
    assert (tmp_path / "again" / "modeling_decilm.py").is_file()
    assert load(tmp_path / "again").module.config.block_configs == loaded.module.config.block_configs


def test_widths_that_no_directory_can_say_are_refused_before_any_work(run, tmp_path):
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    given = ("prune", tmp_path / "model", "-o", tmp_path / "out", "--pattern", "structured:30%,uniform=false")
    said = " ".join(run(*given, code=2).output.replace("\u2502", " ").split())
    assert "the layout nemotron-nas alone: An export to nemotron-nas knows language models of the kinds llama" in said
    assert not (tmp_path / "out").exists()


def test_network_of_a_function_is_written_narrower(run, classifier, tmp_path):
    out = tmp_path / "out"
    given = ("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--recipe", "one-shot")
    assert "neurons are left" in run(*given, "--pattern", "structured:50%").output
    loaded = load(out).module
    assert loaded[0].out_features == loaded[2].in_features == loaded[2].weight.shape[1] == 8
    assert "8 of 16 neurons are left" in run("inspect", out).output


SLOPES = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.wide = 4, 4
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("slopes", torch.linspace(.1, 1, 4), persistent=False)

    def forward(self, x):
        samples, places, _ = x.shape
        q, k, v = self.qkv(x).view(samples, places, 3, self.heads, self.wide).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT + self.slopes.view(-1, 1, 1) * torch.arange(places).float()
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(samples, places, self.heads * self.wide))

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def net():
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Mlp())

def attention():
    return nn.Sequential(Attention())

def batches():
    return [torch.randn(20, 5, 16, generator=torch.Generator().manual_seed(1))]
"""


def test_heads_in_a_buffer_that_no_file_holds_are_kept(run, tmp_path):
    file, out = tmp_path / "slopes.py", tmp_path / "out"
    file.write_text(SLOPES)
    rest = ("--data", f"{file}:batches", "-o", out, "--pattern", "structured:50%", "--recipe", "one-shot")
    run("prune", f"{file}:net", *rest)
    loaded = load(out).module
    assert (loaded[0].slopes.numel(), loaded[1].up.out_features) == (4, 12)
    assert "0.out keeps all units: 0.slopes has entries of them" in (out / "report.json").read_text()
    refused = run("prune", f"{file}:attention", *rest, "--overwrite", code=2).output
    assert "no file of weights holds" in " ".join(refused.split())


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_time_is_asked_for_on_the_command_line(run, classifier, tmp_path, monkeypatch, runtime):
    if runtime == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")

    def clock(calls):  # widths ascend; times of a machine would make the test depend on it
        return [(number + 1) / len(calls) for number, call in enumerate(calls) if call() or True]

    monkeypatch.setattr(widths, "measure", partial(widths.measure, clock=clock))
    monkeypatch.setattr(widths, "shares_of", lambda *_, **__: (1.0, 0.7))
    out = tmp_path / "out"
    given = ("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--recipe", "one-shot")
    run(*given, "--pattern", "structured:25%", "--of", "latency", "--runtime", runtime)
    seconds = read_report(out / "report.json").costs[-1]
    assert (seconds.name, "ONNX" in seconds.where) == ("seconds", runtime == "onnx")
    assert load(out).module[0].out_features == 12


def test_every_layer_of_a_network_of_a_function_may_have_its_own_width(run, classifier, tmp_path):
    out = tmp_path / "out"
    given = ("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--recipe", "one-shot")
    run(*given, "--pattern", "structured:50%,uniform=false")
    assert load(out).module[0].out_features == 8


def test_what_units_cannot_do_is_said_before_any_work(run, classifier, tmp_path):
    given = ("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", tmp_path / "out")
    assert "torch.save" in run(*given, "--pattern", "structured:30%", "--units", "blocks", code=2).output
    kept = run("prune", "-o", tmp_path / "out", "--pattern", "structured:30%", "--low-memory", code=2).output
    assert "--pattern structured: not with" in kept


def test_dry_run_shows_what_is_left_at_most(run, classifier, tmp_path):
    out = tmp_path / "out"
    given = ("prune", f"{classifier}:net", "--data", f"{classifier}:batches")
    shown = run(*given, "--dry-run", "--pattern", "structured:30%").output
    assert "1 or more" in shown
    assert "macs in all layers: 160 -> at most 112 (70.0%)" in shown
    assert "parameters in all layers: 160; what is left is known after the run" in shown
    assert "measures how many units" in shown
    assert "Estimated time: " in shown
    plan = json.loads(run(*given, "--dry-run", "--pattern", "structured:30%", "--json").stdout)
    assert plan["seconds"] > 0
    layers = {"name": "2", "kind": "neurons", "layers": ["2"], "count": 16}
    assert plan["units"] == [{**layers, "kept": None, "least": 1}]
    run(*given, "--pattern", "structured:30%", "-o", out)
    report = read_report(out / "report.json")
    assert [one.name for one in report.widths] == [one["name"] for one in plan["units"]]
    for one in plan["costs"]:
        (cost,) = (cost for cost in report.costs if (cost.name, cost.where) == (one["name"], one["where"]))
        assert cost.before == one["before"]
        assert one["most"] is None or cost.after <= one["most"]
    assert "in torch" not in str(plan)
    timed = run(*given, "--dry-run", "--pattern", "structured:30%", "--of", "latency").output
    assert "measures times, and removes 30%" in timed
    assert "Estimated time: " in timed
    assert "at most" not in timed


def test_dry_run_knows_equal_shares_exactly(run, classifier, tmp_path):
    out = tmp_path / "out"
    given = ("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "--recipe", "one-shot")
    plan = json.loads(run(*given, "--dry-run", "--pattern", "structured:50%", "--json").stdout)
    assert [one["kept"] for one in plan["units"]] == [8]
    run(*given, "--pattern", "structured:50%", "-o", out)
    costs = {(one.name, one.where): one.after for one in read_report(out / "report.json").costs}
    assert {(one["name"], one["where"]): one["most"] for one in plan["costs"]}.items() <= costs.items()
    out_of_reach = run(*given, "--dry-run", "--pattern", "structured:99%", code=2).output
    assert "cannot" in out_of_reach or "At most" in out_of_reach
    assert "include" in run(*given, "--dry-run", "--pattern", "structured:50%", "--include", "x*", code=2).output
