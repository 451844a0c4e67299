"""The compiled step of Llama-like networks gives the logits of the modules."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import iobs
from iobs.errors import ProblemError
from iobs.inference import choices, cpu
from iobs.inference.decodable import CODES, undecodable
from iobs.inference.decoder import Decoder, generated

transformers = pytest.importorskip("transformers")
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True}),
    "mistral": (transformers.MistralConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


def model_of(family, **changes):
    torch.manual_seed(0)
    kind, own = FAMILIES[family]
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 100}
    config = kind(**sizes, num_attention_heads=4, num_key_value_heads=2, **own | changes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
        if parameter.ndim == 2:
            parameter.data[torch.rand_like(parameter) < 0.5] = 0
    return model


@pytest.fixture
def needs_step():
    if cpu.level() == "none":
        pytest.skip("the compiled step needs AVX-512 or AVX2")


@pytest.fixture
def smallest(monkeypatch):
    """Timings are replaced: the stored form with the fewest bytes is always the fastest."""
    monkeypatch.setattr(
        choices, "_best_seconds", lambda calls: {key: 1.0 + (getattr(key, "format", "") == "dense") for key in calls}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_each_step_are_those_of_the_modules(needs_step, smallest, family):
    model = model_of(family)
    iobs.accelerate(model, precision="bf16", threads=1)
    for module in model.modules():
        if type(module) is torch.nn.Linear:  # the compiled step stores these in bfloat16
            module.weight.data = module.weight.data.bfloat16().float()
    ids = torch.randint(0, 100, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0].numpy()
    decoder = Decoder(model, longest=16)
    keys, values, logits = decoder._prefill(ids[:, :5])
    np.testing.assert_allclose(logits, wanted[4], rtol=1e-3, atol=1e-3)
    for position in range(5, 12):
        found = decoder.step(int(ids[0, position]), position, keys, values)
        np.testing.assert_allclose(found, wanted[position], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_generated_tokens_are_those_of_the_accelerated_modules(needs_step, smallest, precision):
    model = model_of("llama")
    iobs.accelerate(model, precision=precision, threads=1)
    ids = torch.randint(0, 100, (1, 4), generator=torch.Generator().manual_seed(2))
    modules = list(generated(model, ids, 10))
    step = list(generated(model, ids, 10, form="bf16"))
    # Rounding in another order may change a token; from there on the texts differ.
    assert modules[:3] == step[:3]
    assert len(modules) == len(step) == 10


def test_an_empty_prompt_is_refused_by_modules_too():
    with pytest.raises(ProblemError, match="shape"):
        next(generated(model_of("llama"), torch.zeros(1, 0, dtype=torch.long), 3))


def test_generation_ends_at_a_stop_token():
    model = model_of("llama")
    ids = torch.randint(0, 100, (1, 4), generator=torch.Generator().manual_seed(2))
    whole = list(generated(model, ids, 6))
    assert list(generated(model, ids, 6, (whole[2],)))[-1] == whole[2]
    assert len(list(generated(model, ids, 6, (whole[0],)))) == 1


def test_other_networks_are_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(cpu, "level", lambda: "avx512")
    assert undecodable(model_of("llama")) is None
    assert "not Linear" in undecodable(torch.nn.Linear(2, 2))
    assert "silu, not gelu" in undecodable(model_of("llama", hidden_act="gelu"))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "dynamic" in undecodable(model_of("llama", rope_parameters=dynamic))
    monkeypatch.setattr(cpu, "level", lambda: "none")
    with pytest.raises(ProblemError, match="needs an x86 CPU with AVX-512"):
        Decoder(model_of("llama"))


def test_a_format_that_the_step_does_not_multiply_goes_through_the_modules(needs_step, smallest, monkeypatch):
    model = model_of("llama")
    iobs.accelerate(model, precision="bf16", threads=1)
    name = model.model.layers[0].mlp.gate_proj.format
    monkeypatch.delitem(CODES, name)
    assert f"stored as {name}" in undecodable(model)
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert len(list(generated(model, ids, 3, form="bf16"))) == 3


def test_texts_that_are_empty_or_too_long_are_refused(needs_step):
    decoder = Decoder(model_of("llama"), longest=8)
    with pytest.raises(ProblemError, match="exceed 8 tokens"):
        next(decoder.generate(torch.zeros(1, 6, dtype=torch.long), 3))
    with pytest.raises(ProblemError, match="shape"):
        next(decoder.generate(torch.zeros(1, 0, dtype=torch.long), 3))
    with pytest.raises(ProblemError, match="attends to at most"):
        Decoder(model_of("llama"), longest=1 << 20)


def wider_second(model, which):
    """Make a part of the second layer, or the head, wider than the first layer or the configuration says."""
    layer = model.model.layers[1]
    if which == "mlp":
        layer.mlp.gate_proj, layer.mlp.up_proj = torch.nn.Linear(128, 5000), torch.nn.Linear(128, 5000)
        layer.mlp.down_proj = torch.nn.Linear(5000, 128)
    elif which == "heads":
        for name, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            setattr(layer.self_attn, name, torch.nn.Linear(128, rows))
        layer.self_attn.o_proj = torch.nn.Linear(256, 128)
    else:
        model.lm_head = torch.nn.Linear(128, 5000)
    return model


@pytest.mark.parametrize("which", ["mlp", "heads", "head of text"])
def test_layers_of_other_widths_go_through_the_modules(needs_step, smallest, which):
    """The compiled step has one vector for all layers; it wrote behind it."""
    model = wider_second(model_of("llama"), which)
    assert "width" in undecodable(model)
    with pytest.raises(ProblemError, match="width"):
        Decoder(model)
    iobs.accelerate(model, precision="bf16", threads=1)
    assert "forward" not in vars(model)
    ids = torch.randint(0, 100, (1, 4), generator=torch.Generator().manual_seed(2))
    assert len(list(generated(model, ids, 1, form="bf16"))) == 1


def test_parts_that_are_missing_are_a_reason(needs_step):
    assert "no head for text" in undecodable(model_of("llama").model)


@pytest.mark.parametrize("config", [dataclass(type("Settings", (), {"width": 4}))(), {"width": 4}, None])
def test_networks_with_a_configuration_of_their_own_are_accelerated(smallest, config):
    """`accelerate` asked it for `model_type`, after the layers were replaced."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256)).eval()
    model.config = config
    assert iobs.accelerate(model, threads=1).choices
    assert "not Sequential" in undecodable(model) or cpu.level() == "none"
