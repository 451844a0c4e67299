"""Audit of the zeros of a model or its files against a pattern or a report."""

from dataclasses import replace
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from menagerie import build
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import iobs
from iobs.errors import AuditError, LayerSelectionError, ModelError, PatternError
from iobs.pruning.audit import audit_layers, require_promised
from iobs.pruning.network.layers import find_layers


def test_audit_counts_zeros_of_a_model_and_of_its_files(tmp_path):
    model, data = build("perceptron")
    iobs.prune(model, data, iobs.Unstructured(0.7), iobs.Recipe())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    of_model = {row.name: row.zeros for row in iobs.audit(model)}
    of_files = {row.name: row.zeros for row in iobs.audit(tmp_path, iobs.Unstructured(0.7))}
    assert of_model == of_files
    assert of_model["fc1"] == 192 - 58


def test_the_example_of_prune_runs_to_its_audit():
    network, loader = build("perceptron")
    example = cleandoc(iobs.prune.__doc__).partition("with a report::")[2].partition("Other patterns")[0]
    names = {"iobs": iobs, "network": network, "loader": loader}
    exec(dedent(example), names)  # the docstring's own code
    assert sum(row.zeros for row in names["rows"]) >= sum(row.zeros for row in names["report"].audit) > 0


def test_audit_finds_a_weight_that_is_not_zero_again():
    model, data = build("perceptron")
    pattern = iobs.NM(2, 4)
    iobs.prune(model, data, pattern, "one-shot")
    with torch.no_grad():
        model.fc2.weight[0, :4] = 1.0
    with pytest.raises(AuditError, match="'fc2' keeps 4 of a group of 4"):
        iobs.audit(model, pattern)
    with pytest.raises(AuditError, match="'fc2' keeps 4"):
        audit_layers(model, dict.fromkeys(find_layers(model), pattern))


def test_audit_reads_patterns_as_prune_does():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model[0].weight.data[:, ::2] = 0
    asked = [iobs.audit(model, pattern)[0].asked for pattern in (iobs.NM(2, 4), "2:4", 0.5, "50%")]
    assert asked == [32, 32, 32, 32]
    with pytest.raises(iobs.errors.PatternError):
        iobs.audit(model, "half")


def test_audit_takes_a_layer_with_a_stray_zero_for_dense():
    model, data = build("perceptron")
    pattern = iobs.NM(2, 4)
    with pytest.raises(AuditError, match="the model is dense, and 2:4 holds nowhere"):
        iobs.audit(model, pattern)
    with torch.no_grad():
        model.fc2.weight[0, 0] = 0.0
    with pytest.raises(AuditError, match="'fc2' has most, 1 of"):
        iobs.audit(model, pattern)
    iobs.prune(model, data, pattern, "one-shot", ignore="fc2")
    assert {row.name for row in iobs.audit(model, pattern) if row.asked} == {"fc1", "fc3"}
    with pytest.raises(AuditError, match="'fc2' keeps 4 of a group of 4"):
        iobs.audit(model, pattern, layers=["fc1", "fc2"])


def test_audit_raises_if_pattern_does_not_divide_a_layer():
    model, data = build("perceptron")
    iobs.prune(model, data, iobs.Unstructured(0.75), "one-shot")
    with pytest.raises(PatternError, match=r"'fc1' \(\d+ x \d+\)"):  # a table of zeros counts as pruned: which one?
        iobs.audit(model, iobs.NM(5, 7))


def test_audit_counts_each_row_and_layer_separately():
    model, data = build("perceptron")
    pattern = iobs.Unstructured(0.5, per="row")
    before = iobs.prune(model, data, pattern, "one-shot").audit
    with torch.no_grad():
        model.fc1.weight[0].fill_(1.0)
        model.fc1.weight[1:4].zero_()
    with pytest.raises(AuditError, match="'fc1' keeps 12 of 12"):
        audit_layers(model, dict.fromkeys(find_layers(model), pattern))
    require_promised(iobs.audit(model), before, Path("here"))
    with torch.no_grad():
        model.fc2.weight.fill_(1.0)
    with pytest.raises(AuditError, match="here has 0 zeros in layer 'fc2'"):
        require_promised(iobs.audit(model), before, Path("here"))
    renamed = [replace(row, name=f"model.{row.name}") for row in before]
    with pytest.raises(AuditError, match="files call otherwise"):
        require_promised(iobs.audit(model), renamed, Path("here"))


def test_audit_reads_transposed_layers_of_files_as_the_model_does(tmp_path):
    weight = torch.ones(8, 12)  # (inputs, outputs)
    weight.view(2, 4, 12)[:, :2] = 0.0
    save_file({"h.0.attn.c_attn.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(AuditError):
        iobs.audit(tmp_path, "2:4")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (row,) = iobs.audit(tmp_path, "2:4")
    assert (row.shape, row.zeros, row.asked) == ((12, 8), 48, 48)


def test_audit_refuses_unreadable_files(tmp_path):
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        iobs.audit(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(ModelError, match="truncated"):
        iobs.audit(tmp_path)


def test_failed_audit_leaves_computed_weights_as_they_were():
    model = torch.nn.Sequential(parametrizations.weight_norm(torch.nn.Linear(8, 8)), torch.nn.Linear(8, 8))
    with pytest.raises(AuditError) as error:
        iobs.audit(model, 0.5, layers=["0"])
    assert parametrize.is_parametrized(model[0])  # while the error, and its frames, are kept
    assert "'0' keeps" in str(error.value)


@pytest.mark.parametrize("pattern", [0.5, iobs.Rate(3.0), None])
def test_audit_refuses_names_of_no_matrix(pattern):
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.view(-1)[::2] = 0
            layer.weight.sign_()
    with pytest.raises(LayerSelectionError, match=r"\['first'\] are names of no matrix; the matrices are 0, 2"):
        iobs.audit(model, pattern, ["0", "first"])
    assert [row.name for row in iobs.audit(model, 0.5, "2") if row.asked] == ["2"]
