"""compressed-tensors: transformers loads the directory, and computes the outputs of the rounded weights."""

import copy
import json
import warnings

import pytest
import torch

import iobs
from iobs.errors import ModelError

pytest.importorskip("compressed_tensors")


def loaded(folder, dtype=torch.float32):
    """The model that transformers loads, its codes as weights again."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the other libraries
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        model(torch.ones(1, 2, dtype=torch.long))  # its first forward pass unpacks the codes
    return model


def test_grid_of_four_bits_gives_the_same_logits(four_bits, tokens, tmp_path):
    written = iobs.export(four_bits, tmp_path / "out", "compressed-tensors")
    forms = [one.form for one in written.matrices]
    assert (forms.count("int4"), forms.count("float32")) == (30, 5)  # 172 columns are no multiple of 128
    assert all(one.exact for one in written.matrices)
    assert written.zeros == written.kept_zeros > 100_000
    again = loaded(tmp_path / "out")
    for one in written.matrices:
        assert torch.equal(again.get_parameter(one.name), four_bits.module.get_parameter(one.name)), one.name
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, four_bits.module(tokens).logits, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12)])
def test_rounded_weights_keep_their_zeros(half_sparse, tokens, tmp_path, bits, error):
    written = iobs.export(half_sparse, tmp_path / "out", "compressed-tensors", bits)
    assert {one.form for one in written.matrices} == {f"int{bits}"}
    assert written.zeros == written.kept_zeros > 100_000
    again, rounded = loaded(tmp_path / "out"), copy.deepcopy(half_sparse.module)
    for one in written.matrices:
        weight, before = again.get_parameter(one.name), half_sparse.module.get_parameter(one.name)
        assert bool((weight[before == 0] == 0).all()), one.name
        assert float((weight - before).norm()) <= error * float(before.norm()), one.name
        rounded.get_parameter(one.name).data = weight.data
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, rounded(tokens).logits, atol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf8"))
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert (tmp_path / "out" / "tokenizer.json").exists()


@torch.no_grad()
def test_half_precision_stays_half_precision(half_sparse, tmp_path):
    model = copy.deepcopy(half_sparse.module).to(torch.bfloat16)
    written = iobs.export(model, tmp_path / "out", "compressed-tensors", 8)
    again = loaded(tmp_path / "out", "auto")
    for one in written.matrices:
        weight, before = again.get_parameter(one.name), model.get_parameter(one.name)
        assert weight.dtype == torch.bfloat16
        assert float((weight - before).float().norm()) <= 0.01 * float(before.float().norm()), one.name


def test_models_without_codes_are_refused(half_sparse, tmp_path):
    with pytest.raises(ModelError, match="--bits"):
        iobs.export(half_sparse, tmp_path / "out", "compressed-tensors")
    with pytest.raises(ModelError, match="transformers"):
        iobs.export(torch.nn.Linear(4, 4), tmp_path / "out", "compressed-tensors", 8)
    assert not (tmp_path / "out").exists()
