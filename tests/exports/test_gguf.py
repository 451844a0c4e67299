"""GGUF files: read by gguf, by transformers, and run by llama.cpp where it is installed."""

import copy
from dataclasses import replace

import pytest
import torch

import iobs
from iobs.errors import ModelError
from iobs.pruning.network.layers import find_layers

gguf = pytest.importorskip("gguf")

ERROR = {4: 0.12, 8: 0.01, 16: 1e-3, None: 1e-3, 32: 0.0}  # largest difference of weights, relative, by bits


def weights_of(file):
    """Values of all tensors by name, as gguf reads them: (rows, columns) arrays."""
    read = gguf.GGUFReader(file)
    return {one.name: torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type)) for one in read.tensors}


def types_of(file):
    return {one.name: one.tensor_type.name for one in gguf.GGUFReader(file).tensors}


def from_file(folder):
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    return found.eval()


def zeros(module):
    return sum(int((layer.read(module) == 0).sum()) for layer in find_layers(module) if "lm_head" not in layer.name)


@pytest.mark.parametrize("bits", [None, 4, 8, 16, 32])
def test_transformers_reads_the_same_zeros_and_weights(half_sparse, bits, tmp_path):
    found = iobs.export(half_sparse, tmp_path / "out", "gguf", bits)
    again = from_file(tmp_path / "out")
    before = half_sparse.module.state_dict()
    assert found.zeros == found.kept_zeros == zeros(half_sparse.module) > 100_000
    for name, weight in again.state_dict().items():
        assert bool((weight[before[name] == 0] == 0).all()), name
        assert float((weight - before[name]).norm()) <= ERROR[bits] * float(before[name].norm()), name


def test_grid_of_four_bits_is_written_without_rounding(four_bits, tokens, tmp_path):
    found = iobs.export(four_bits, tmp_path / "out", "gguf")
    kinds = {one.form: one.exact for one in found.matrices if one.form == "Q4_0"}
    assert kinds == {"Q4_0": True}
    assert sum(one.form == "Q4_0" for one in found.matrices) == 30  # 5 matrices have 172 columns: no blocks of 32
    again = from_file(tmp_path / "out")
    for layer in find_layers(four_bits.module):
        if "down_proj" not in layer.name and "lm_head" not in layer.name:
            assert torch.equal(layer.read(again), layer.read(four_bits.module)), layer.name
    with torch.no_grad():
        difference = again(tokens).logits - four_bits.module(tokens).logits
    assert float(difference.abs().max()) < 0.02  # embedding and 5 matrices are float16


def test_file_holds_the_zeros_in_its_own_bytes(half_sparse, tmp_path):
    found = iobs.export(half_sparse, tmp_path / "out", "gguf", 4)
    held = weights_of(tmp_path / "out" / "model.gguf")
    count = sum(
        int((weight == 0).sum()) for name, weight in held.items() if name.startswith("blk.") and weight.ndim > 1
    )
    assert count >= found.zeros
    kinds = types_of(tmp_path / "out" / "model.gguf")
    assert kinds["blk.0.attn_q.weight"] == "Q4_0"
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["output_norm.weight"] == "F32"
    assert "output.weight" not in kinds  # tied to the embedding


@pytest.mark.parametrize("bits", [None, 8])
def test_llama_cpp_computes_the_same_logits_and_tokens(four_bits, bits, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    found = iobs.export(four_bits, tmp_path / "out", "gguf", bits)
    assert found.kept_zeros == found.zeros
    runner = llama_cpp.Llama(
        str(tmp_path / "out" / "model.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=1, n_gpu_layers=0
    )
    text = "Once upon a time, there was a little girl named Lily. She said: \u00fcber 17!"
    ids = four_bits.tokenizer([text])["input_ids"][0]
    assert runner.tokenize(text.encode(), add_bos=True) == ids
    runner.eval(ids)
    with torch.no_grad():
        wanted = four_bits.module(torch.tensor([ids])).logits[0]
    logits = torch.tensor(runner.scores[: len(ids)].copy())
    # llama.cpp rounds activations to 8 bits in products with quantised weights.
    assert float((logits - wanted).norm() / wanted.norm()) < 0.03


def test_order_of_rows_is_that_of_llama_cpp(half_sparse, tmp_path):
    iobs.export(half_sparse, tmp_path / "out", "gguf", 32)
    held = weights_of(tmp_path / "out" / "model.gguf")
    weight = half_sparse.module.model.layers[0].self_attn.q_proj.weight.detach()
    width = half_sparse.module.config.head_dim
    first, half = weight[:width], width // 2
    assert torch.equal(held["blk.0.attn_q.weight"][:4], first[[0, half, 1, half + 1]])


def test_model_of_another_kind_is_refused_before_any_work(tmp_path):
    with pytest.raises(ModelError, match="try onnx"):
        iobs.export(torch.nn.Linear(4, 4), tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_scaled_positions_are_refused(half_sparse, tmp_path):
    other = copy.copy(half_sparse.module.config)
    other.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4}
    config, half_sparse.module.config = half_sparse.module.config, other
    try:
        with pytest.raises(ModelError, match="llama3"):
            iobs.export(half_sparse, tmp_path / "out", "gguf")
    finally:
        half_sparse.module.config = config


def test_another_activation_is_refused(half_sparse, tmp_path):
    other = replace(half_sparse, module=copy.deepcopy(half_sparse.module))
    other.module.config.hidden_act = "gelu"
    with pytest.raises(ModelError, match="compute silu in such a model, not gelu"):
        iobs.export(other, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_a_module_without_its_tokenizer_is_refused_with_the_remedy(half_sparse, tmp_path):
    with pytest.raises(ModelError, match=r"give the directory, or the LoadedModel of iobs\.load"):
        iobs.export(half_sparse.module, tmp_path / "out", "gguf")
