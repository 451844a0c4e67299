"""Files that hold the weights: shards, indices, pickles."""

import json
import shutil

import pytest
import torch
from checks import same_weights
from safetensors.torch import load_file

from iobs import load_packed, models, save_packed
from iobs.errors import ModelError
from iobs.pruning.audit import audit


def test_pickled_weights_load_only_if_allowed(directory):
    expected = models.load(directory).module
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    assert same_weights(models.load(directory, allow_pickle=True).module, expected)


def test_load_names_a_missing_shard(directory):
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        models.load(directory)
    (directory / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="is damaged"):
        models.load(directory)


def test_load_ignores_other_safetensors_files(directory, tmp_path):
    """A single file takes precedence over an index; files that an index does not name are ignored."""
    expected = models.load(directory).module
    (directory / "model.safetensors.index.json").write_text("{")
    assert same_weights(models.load(directory).module, expected)
    shards = shutil.copytree(directory, tmp_path / "shards")
    (shards / "model.safetensors").unlink()
    expected.save_pretrained(shards, max_shard_size="5KB")
    (shards / "model-00009-of-00009.safetensors").write_bytes(b"of an earlier run")
    (shards / "consolidated.safetensors").write_bytes(b"in another format")
    assert same_weights(models.load(shards).module, expected)
    assert {row.name for row in audit(shards)} == {row.name for row in audit(directory)}
    save_packed(shards, tmp_path / "packed")
    assert same_weights(load_packed(tmp_path / "packed"), expected)
    assert same_weights(models.load(tmp_path / "packed").module, expected)
