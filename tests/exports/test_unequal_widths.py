"""Layers of unequal widths: nemotron-nas directories and GGUF files of the architecture deci have the same logits."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from reference import from_deci, from_nemotron_nas
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import iobs
from iobs.errors import ModelError
from iobs.exports.source import LayerWidths, widths_of_layers
from iobs.models.modeling_decilm import DeciLMConfig, DeciLMForCausalLM


@pytest.fixture(scope="module")
def unequal(embedded):
    """The embedded model after a removal of units with a width of its own for each layer."""
    loaded = replace(embedded, module=copy.deepcopy(embedded.module))
    loaded.module.model.layers, loaded.module.config.num_hidden_layers = loaded.module.model.layers[:2], 2
    batch = {"input_ids": torch.randint(3, 200, (2, 16), generator=torch.Generator().manual_seed(0))}
    iobs.prune(loaded.module, batch, iobs.Structured(0.35, uniform=False), "one-shot", holdout=0)
    assert len(set(widths_of_layers(loaded.module, loaded.module.config))) > 1
    return loaded


@pytest.fixture
def small(embedded):
    """A function: the embedded model's tokenizer with a random network of two layers, the second one narrower."""

    def make(kind=LlamaConfig, kept=1, neurons=20, **values):
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
        sizes |= {"intermediate_size": 40, "vocab_size": 2048, "head_dim": 8, "initializer_range": 0.3}
        model = AutoModelForCausalLM.from_config(kind(**{**sizes, **values})).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        layer = model.model.layers[1]
        group = layer.self_attn.num_key_value_groups
        cut(layer.self_attn, {"q": 8 * group * kept, "k": 8 * kept, "v": 8 * kept}, "o")
        cut(layer.mlp, {"gate": neurons, "up": neurons}, "down")
        return replace(embedded, module=model)

    return make


def cut(module, writers, reader):
    """Keep the first units of a block."""
    for name, rows in writers.items():
        layer = getattr(module, f"{name}_proj")
        layer.weight.data = layer.weight.data[:rows]
        if layer.bias is not None:
            layer.bias.data = layer.bias.data[:rows]
    layer = getattr(module, f"{reader}_proj")
    layer.weight.data = layer.weight.data[:, : next(iter(writers.values()))]


def nearly_equal(found, loaded, ids):
    with torch.no_grad():
        wanted = loaded.module(ids).logits
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@torch.no_grad()
def test_nemotron_nas_has_the_logits_of_the_narrower_model(unequal, tokens, tmp_path):
    written = iobs.export(unequal, tmp_path / "out", "nemotron-nas")
    assert all(one.exact for one in written.matrices)
    assert "more zeros fill layers up to widths that nemotron-nas has" in str(written)
    nearly_equal(from_nemotron_nas(tmp_path / "out", tokens), unequal, tokens)
    nearly_equal(DeciLMForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits, unequal, tokens)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_deci_has_the_logits_of_the_narrower_model(unequal, tokens, tmp_path):
    pytest.importorskip("gguf")
    written = iobs.export(unequal, tmp_path / "out", "gguf", 32)
    assert not any(one.added for one in written.matrices)
    nearly_equal(from_deci(tmp_path / "out" / "model.gguf", tokens), unequal, tokens)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "values"), [(LlamaConfig, {}), (Qwen2Config, {}), (LlamaConfig, {"mlp_bias": True})])
def test_groups_of_heads_and_biases(small, tokens, kind, values, tmp_path):
    """Two of three heads of keys are left out; Qwen2 has biases of queries, keys and values, but not of outputs."""
    pytest.importorskip("gguf")
    loaded = small(kind, tie_word_embeddings=False, **values)
    iobs.export(loaded, tmp_path / "nas", "nemotron-nas", 32)
    iobs.export(loaded, tmp_path / "gguf", "gguf", 32)
    blocks = json.loads((tmp_path / "nas" / "config.json").read_text(encoding="utf8"))["block_configs"]
    assert [block["attention"]["n_heads_in_group"] for block in blocks] == [2, 6]  # one head of keys serves all
    nearly_equal(from_nemotron_nas(tmp_path / "nas", tokens), loaded, tokens)
    nearly_equal(DeciLMForCausalLM.from_pretrained(tmp_path / "nas").eval()(tokens).logits, loaded, tokens)
    nearly_equal(from_deci(tmp_path / "gguf" / "model.gguf", tokens), loaded, tokens)


@torch.no_grad()
def test_scaled_positions_and_equal_widths_are_kept(small, tokens, tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    loaded = small(kept=3, neurons=40, rope_parameters={**rope, "original_max_position_embeddings": 8})
    assert set(widths_of_layers(loaded.module, loaded.module.config)) == {LayerWidths(6, 3, 40)}
    iobs.export(loaded, tmp_path / "out", "nemotron-nas")
    again = DeciLMForCausalLM.from_pretrained(tmp_path / "out").eval()
    nearly_equal(again(tokens).logits, loaded, tokens)
    again.save_pretrained(tmp_path / "again")  # and once more, from the configuration that its own class writes
    nearly_equal(DeciLMForCausalLM.from_pretrained(tmp_path / "again").eval()(tokens).logits, loaded, tokens)


def test_configuration_is_what_vllm_asks_for(unequal, tmp_path):
    iobs.export(unequal, tmp_path / "out", "nemotron-nas")
    config = pickle.loads(pickle.dumps(copy.deepcopy(DeciLMConfig.from_pretrained(tmp_path / "out"))))
    for block in config.block_configs:
        assert (block.attention.no_op, block.ffn.no_op) == (False, False)
        assert config.num_attention_heads % block.attention.n_heads_in_group == 0
        assert block.ffn.ffn_mult > 0
        assert not hasattr(block.ffn, "hidden_act")  # vLLM then asks the configuration
    assert config.architectures == ["DeciLMForCausalLM"]
    assert config.head_dim * config.num_attention_heads == config.hidden_size
    assert json.loads(config.to_json_string())["block_configs"][0]["ffn"]["no_op"] is False


@pytest.mark.parametrize(("bits", "dtype"), [(None, torch.float32), (16, torch.bfloat16), (32, torch.float32)])
def test_bits_of_nemotron_nas(unequal, bits, dtype, tmp_path):
    written = iobs.export(unequal, tmp_path / "out", "nemotron-nas", bits)
    assert {one.form for one in written.matrices} == {str(dtype).removeprefix("torch.")}
    assert all(one.exact for one in written.matrices) == (bits != 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_half_precision_that_holds_all_weights_is_taken(unequal, dtype, tmp_path):
    loaded = replace(unequal, module=copy.deepcopy(unequal.module).half().to(dtype))
    written = iobs.export(loaded, tmp_path / "out", "nemotron-nas")
    assert {(one.form, one.exact) for one in written.matrices} == {("float16", True)}


@pytest.mark.parametrize(
    ("kind", "values", "change", "message"),
    [
        (Qwen3Config, {}, None, "knows language models of the kinds llama, mistral, qwen2, nemotron-nas, not 'qwen3'"),
        (LlamaConfig, {"hidden_act": "gelu"}, None, "compute silu in such a model, not gelu"),
        (LlamaConfig, {"head_dim": 10}, None, r"hidden_size / 10 query heads in all layers, hidden_size is 48"),
        (LlamaConfig, {"head_dim": 16}, None, "hidden_size is 48, and this model has 6"),
        (LlamaConfig, {}, lambda m: m.model.register_parameter("x", nn.Parameter(torch.ones(2))), "no place for"),
        (LlamaConfig, {}, lambda m: setattr(m.model.layers[1], "mlp", nn.Linear(48, 48)), "layers.1 is no layer of ll"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, None, "'linear'"),
    ],
)
def test_models_that_nemotron_nas_cannot_hold_are_refused(embedded, kind, values, change, message, tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = AutoModelForCausalLM.from_config(kind(**sizes, intermediate_size=40, vocab_size=2048, **values))
    if change is not None:
        change(model)
    with pytest.raises(ModelError, match=message):
        iobs.export(replace(embedded, module=model), tmp_path / "out", "nemotron-nas")
    assert not (tmp_path / "out").exists()


def test_layers_without_attention_need_the_code_of_their_model(unequal, tmp_path):
    iobs.export(unequal, tmp_path / "out", "nemotron-nas")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf8"))
    config["block_configs"][1]["attention"] |= {"no_op": True, "n_heads_in_group": None}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config), encoding="utf8")
    with pytest.raises(ModelError, match="layer 1 has no attention or no MLP; --trust-remote-code"):
        iobs.models.load(tmp_path / "out")


def test_unequal_widths_beside_norms_of_queries_are_refused_for_gguf(small, tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(ModelError, match=r"uniform=True"):
        iobs.export(small(Qwen3Config), tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_mlx_lm_computes_the_same_logits(unequal, tokens, tmp_path):
    mlx, utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    mlx.set_default_device(mlx.cpu)
    iobs.export(unequal, tmp_path / "out", "nemotron-nas")
    model, _ = utils.load_model(tmp_path / "out")
    nearly_equal(torch.tensor(model(mlx.array(tokens.numpy())).tolist()), unequal, tokens)
