"""Weights keep the dtype of their files, whatever they are computed in."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from checks import same_weights
from safetensors.torch import load_file, save_file

from iobs import models
from iobs.core.outputs import check_output
from iobs.errors import OutputError


def test_load_takes_the_dtype_of_the_files_not_the_config(directory, tmp_path):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    loaded = models.load(directory)
    assert loaded.module.dtype == torch.float32
    loaded.save(tmp_path / "out")
    assert same_weights(models.load(tmp_path / "out").module, loaded.module)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_float16_weights_load_as_float32_and_save_as_float16(directory, tmp_path):
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(directory, dtype=torch.float16).save_pretrained(directory)
    loaded = models.load(directory)
    assert loaded.module.dtype == torch.float32
    loaded.save(tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert loaded.module.dtype == torch.float32
    assert same_weights(models.load(tmp_path / "out").module, loaded.module)


@pytest.mark.parametrize("able", [False, True])
def test_bfloat16_is_computed_in_float32_on_a_cpu_without_instructions(directory, tmp_path, able, monkeypatch):
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": able})
    LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(directory)
    loaded = models.load(directory)
    assert loaded.module.dtype == (torch.bfloat16 if able else torch.float32)
    assert models.load(directory, dtype=torch.bfloat16).module.dtype == torch.bfloat16
    loaded.save(tmp_path / "out")
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert same_weights(models.load(tmp_path / "out").module, loaded.module)


def test_float16_buffers_save_and_count_as_float16(tmp_path, monkeypatch):
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
    ResNetForImageClassification(config).half().save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    loaded = models.load(tmp_path / "model")
    assert loaded.module.resnet.embedder.embedder.normalization.running_var.dtype == torch.float32
    assert models.size_in_bytes(loaded.module) == sum(tensor.nbytes for tensor in before.values())
    loaded.save(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: one.dtype for name, one in before.items()}
    assert loaded.module.resnet.embedder.embedder.normalization.running_var.dtype == torch.float32
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_100_000))
    with pytest.raises(OutputError, match=r"needs about 2 MB .* has 1 MB left"):
        check_output(tmp_path / "other", needed_bytes=1_200_000)


def test_load_warns_of_tensors_in_a_wider_dtype(directory):
    file = directory / "model.safetensors"
    tensors = {name: value if "norm" in name else value.bfloat16() for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.warns(UserWarning, match=r"3 tensors in a wider type.*norm.*--dtype float32"):
        models.load(directory)
