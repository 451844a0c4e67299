"""transformers reads packed directories after `import iobs`, and iobs does not load transformers for that."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import iobs
from iobs.core.integers import Integers
from iobs.errors import ModelError
from iobs.models import packed_files


def integers(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(shape, generator=generator) * 3).round().to(torch.int16)
    return Integers(codes, torch.full((shape[1],), 0.01171875), torch.ones(shape[0])).weight(torch.float32)


def with_integers(model):
    for seed, weight in enumerate(model.parameters()):
        if weight.ndim == 2 and min(weight.shape) > 16:
            weight.data = integers(weight.shape, seed)
        elif weight.ndim == 3:  # experts
            weight.data = torch.stack([integers(weight.shape[1:], seed + number) for number in range(len(weight))])
    return model.eval()


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = transformers.LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=1, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = with_integers(transformers.LlamaForCausalLM(config))
    return model, iobs.save_packed(model, tmp_path_factory.mktemp("llama") / "packed")


@pytest.mark.parametrize(
    "settings", [{}, {"device_map": "cpu"}, {"device_map": "auto", "dtype": torch.bfloat16}], ids=str
)
def test_from_pretrained_reads_a_packed_directory(llama, settings, tmp_path):
    model, packed = llama
    assert (packed / "model.safetensors").stat().st_size < 0.5 * sum(value.nbytes for value in model.parameters())
    again, info = transformers.AutoModelForCausalLM.from_pretrained(packed, output_loading_info=True, **settings)
    assert not any(info.values())
    assert again.dtype is settings.get("dtype", torch.float32)
    state = again.state_dict()
    assert all(torch.equal(state[name], value.to(again.dtype)) for name, value in model.state_dict().items())
    again.save_pretrained(tmp_path / "dense")  # a dense model as any other
    assert load_file(tmp_path / "dense" / "model.safetensors")["model.norm.weight"].dtype is again.dtype
    assert not hasattr(transformers.AutoConfig.from_pretrained(tmp_path / "dense"), "quantization_config")


def test_a_configuration_that_does_not_name_the_quantiser_is_one_clear_error(llama, tmp_path):
    packed = shutil.copytree(llama[1], tmp_path / "packed")
    settings = json.loads((packed / "config.json").read_text())
    stated = settings.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match='add "quantization_config": '):
        iobs.load_packed(packed)
    (packed / "config.json").write_text(json.dumps({**settings, "quantization_config": stated}))
    assert torch.equal(iobs.load_packed(packed).lm_head.weight, llama[0].lm_head.weight)


def test_offloaded_weights_are_decoded_the_tied_head_too(llama, tmp_path):
    model, packed = llama
    read = transformers.AutoModelForCausalLM.from_pretrained
    assert all(value.is_meta for value in read(packed, device_map="meta").parameters())
    offloaded = read(packed, device_map={"": "disk"}, offload_folder=tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(offloaded(ids).logits, model(ids).logits)


def test_encoders_and_merged_experts_come_back(tmp_path):
    bert = transformers.BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=16)
    experts = {"num_local_experts": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    mixtral = transformers.MixtralConfig(**SIZES, **experts)
    for name, network in (("bert", transformers.BertModel(bert)), ("experts", transformers.MixtralModel(mixtral))):
        model = with_integers(network)
        packed = iobs.save_packed(model, tmp_path / name)
        state = transformers.AutoModel.from_pretrained(packed).state_dict()
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        loaded = iobs.load(packed)
        loaded.save(tmp_path / f"{name}.dense")
        again = transformers.AutoModel.from_pretrained(tmp_path / f"{name}.dense").state_dict()
        assert all(torch.equal(again[key], value) for key, value in model.state_dict().items())


def test_a_changed_file_is_one_clear_error(llama, tmp_path):
    model, _ = llama
    packed = iobs.save_packed(model, tmp_path / "packed")
    file = packed / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match="is truncated or damaged"):
        transformers.AutoModelForCausalLM.from_pretrained(packed)
    save_file({"model.norm.weight": torch.ones(32)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="no packed file of iobs"):
        transformers.AutoModelForCausalLM.from_pretrained(packed)


def test_a_killed_write_leaves_nothing(llama, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(packed_files, "pack_code", stop)
    with pytest.raises(KeyboardInterrupt):
        iobs.save_packed(llama[0], tmp_path / "packed")
    assert not [*tmp_path.iterdir()]


# The processes of all other tests load iobs first.
@pytest.mark.parametrize("first", [pytest.param("iobs", marks=pytest.mark.slow), "transformers.quantizers.auto"])
def test_the_quantiser_is_registered_in_either_order(first):
    code = f"""
import sys, {first}, iobs
assert ("transformers" in sys.modules) == {first != "iobs"}
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
assert "iobs" in AUTO_QUANTIZER_MAPPING and "iobs.models" not in sys.modules
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
