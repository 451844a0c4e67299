"""`iobs inspect`: zeros of a model directory, compared with its report."""

import json
import shutil

import families
import pytest
import torch
from checks import one_error
from safetensors.torch import load_file, save_file
from short_options import ONE_SHOT

import iobs
from iobs import models
from iobs.core.integers import Integers
from iobs.models import skeleton
from iobs.report import read_report, write_report


def test_inspect_checks_an_allocated_sparsity_globally(run, tmp_path, classifier):
    out = tmp_path / "out"
    network = (f"{classifier}:net", "--data", f"{classifier}:batches")
    run("prune", *network, "-o", out, "--sparsity", "0.5", *ONE_SHOT, "--set", "allocation=fisher")
    assert len({row.sparsity for row in read_report(out / "report.json").audit}) > 1
    assert "among which zeros were spread, satisfy" in run("inspect", out, "--pattern", "0.5").output
    assert "asks for" in one_error(run("inspect", out, "--pattern", "0.8", code=1))


def test_inspect_finds_changed_weights(run, classifier, tmp_path):
    out = tmp_path / "out"
    run("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, *ONE_SHOT)
    loaded = models.load(out)
    with torch.no_grad():
        loaded.module[0].weight.add_(1.0)
    shutil.rmtree(tmp_path / "changed", ignore_errors=True)
    loaded.save(tmp_path / "changed")
    shutil.copy(out / "report.json", tmp_path / "changed")
    assert "promises" in one_error(run("inspect", tmp_path / "changed", code=1))


@pytest.mark.parametrize("precision", [(), ("--precision", "int8")])
def test_inspect_counts_the_zeros_of_a_packed_directory(run, classifier, tmp_path, precision):
    """Before, it said to unpack it first."""
    out, packed = tmp_path / "out", tmp_path / "packed"
    run("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--sparsity", "0.5", *ONE_SHOT)
    run("pack", out, "-o", packed, *precision)
    before, found = (json.loads(run("inspect", one, "--json").stdout) for one in (out, packed))
    assert found["weights"] == before["weights"]
    assert found["zeros"] >= before["zeros"] > 0
    assert len(found["checked"]) == 1


@pytest.fixture
def written(run, tmp_path):
    """A pruned network, and a function that changes its stored weights."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def net():\n"
        "    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))\n\n"
        "def batches():\n    return [torch.randn(20, 8)]\n"
    )
    network = f"{tmp_path / 'net.py'}:net"
    data = ("--data", f"{tmp_path / 'net.py'}:batches")
    out = tmp_path / "out"
    run("prune", network, *data, "-o", out, "--pattern", "2:4", "--ignore", "4", "--solver", "magnitude", *ONE_SHOT)

    def change(edit):
        weights = load_file(out / "model.safetensors")
        edit(weights)
        save_file(weights, out / "model.safetensors")

    return out, change


def test_inspect_checks_the_layers_of_the_report(run, written):
    out, change = written
    change(lambda weights: weights["4.weight"][0, 0].zero_())
    for options in ((), ("--pattern", "2:4")):
        text = run("inspect", out, *options).output
        assert "50.00 % zeros: 640 of 1,280 weights in 2 layers" in text
        assert "zeros elsewhere, not counted: 4 (1 of 96)" in text
    change(lambda weights: weights["2.weight"].fill_(1.0))
    assert "'2' keeps 4 of a group of 4" in one_error(run("inspect", out, "--pattern", "2:4", code=1))


def test_inspect_ignores_stray_zeros_without_a_report(run, written):
    out, change = written
    (out / "report.json").unlink()
    change(lambda weights: weights["4.weight"][0, 0].zero_())
    text = run("inspect", out, "--pattern", "2:4").output
    assert "weights in 2 layers" in text
    assert "not counted: 4 (1 of 96)" in text
    change(lambda weights: [weights[f"{layer}.weight"].fill_(1.0) for layer in (0, 2)])
    assert "'4' has most, 1 of 96" in one_error(run("inspect", out, "--pattern", "2:4", code=1))
    change(lambda weights: weights["4.weight"].fill_(1.0))
    assert "the model is dense" in one_error(run("inspect", out, "--pattern", "2:4", code=1))
    assert "this model is dense" in run("inspect", out).output


def test_inspect_ignores_reports_of_other_programs(run, written):
    out, _ = written
    (out.parent / "report.json").write_text('{"tests": 5}')
    result = run("inspect", out)
    assert "promises" in result.output
    assert result.stderr == ""
    for content in ('{"tests": 5}', "[", "[1]"):
        (out / "report.json").write_text(content)
        result = run("inspect", out, "--quiet")  # a warning, which it does not hide
        assert "50.00 % zeros" in result.stdout
        assert "promises" not in result.output
        assert f"{out / 'report.json'} is not a report of iobs" in result.stderr


def test_inspect_refuses_a_folder_without_a_model(run, tmp_path):
    assert "is not a directory" in one_error(run("inspect", tmp_path / "none", code=2))
    assert "no .safetensors" in one_error(run("inspect", tmp_path, code=2))


def test_inspect_reports_a_dense_model(run):
    assert "this model is dense" in run("inspect", models.EMBEDDED).output


def test_inspect_checks_a_pattern_without_the_weights_in_memory(run, tmp_path, monkeypatch):
    """A model of 70B weights takes 141 GB, and its files name every matrix."""
    torch.manual_seed(0)
    model, out = families.LANGUAGE_MODELS["llama"][0](), tmp_path / "out"
    report = iobs.prune(model, families.language_batches(), "2:4", "one-shot", solver="magnitude", holdout=0)
    model.save_pretrained(out)
    write_report(report, out)
    inspected = "inspect", out, "--json", "--pattern", "2:4", "--all"
    with monkeypatch.context() as patch:
        patch.setattr(skeleton, "matrices_in_files", lambda _: None)
        slow = json.loads(run(*inspected).stdout)
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    quick = json.loads(run(*inspected).stdout)
    assert quick == slow


def test_inspect_counts_experts_of_other_names_without_the_embedding(run, tmp_path):
    """A padding row of zeros in the embedding entered the share, so that 50 % were shown as less."""
    torch.manual_seed(0)
    model, out = families.LANGUAGE_MODELS["mixtral"][0](), tmp_path / "out"
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    report = iobs.prune(model, families.language_batches(), 0.5, "one-shot", solver="magnitude", holdout=0)
    model.save_pretrained(out)
    write_report(report, out)
    found = json.loads(run("inspect", out, "--json").stdout)
    assert not {row.name for row in report.audit} <= {layer["layer"] for layer in found["layers"]}  # other names
    assert (found["zeros"], found["weights"]) == (report.zeros, report.weights)
    assert "not counted: model.embed_tokens" in run("inspect", out).output


def test_packed_directory_shows_its_bytes_part_by_part(run, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    codes = (torch.randn(64, 64) * 3).round().to(torch.int16)
    model[0].weight.data = Integers(codes, torch.full((64,), 0.75), torch.ones(64)).weight(torch.float32)
    packed = iobs.save_packed(model, tmp_path / "packed")
    (packed / "tokenizer.json").write_text("{}")
    found = json.loads(run("inspect", packed, "--json").stdout)["bytes"]
    assert found["weights"] == sum(found["parts"].values()) == (packed / "model.safetensors").stat().st_size
    assert found["parts"]["dense"] == 4 * 64 + 2 * 2 * 64  # the bias of the layer, and the norm in bfloat16
    assert (found["tokenizer"], found["others"]) == (2, 0)
    assert "integers: " in run("inspect", packed).stdout
    with (packed / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "is damaged" in run("inspect", packed, code=2).stderr
