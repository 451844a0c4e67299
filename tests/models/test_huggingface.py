"""Models in Hugging Face format: loading, damaged files, hub names, tokenizers."""

import json
import shutil
import sys

import pytest
import torch
from checks import same_weights
from huggingface_hub import constants as hub
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from iobs import models
from iobs.data import embedded_text, token_windows
from iobs.errors import ModelError
from iobs.evaluate import perplexity


def test_embedded_model_matches_its_recipe():
    loaded = models.load()
    recipe = json.loads((models.EMBEDDED / "recipe.json").read_text())
    assert (loaded.task, loaded.context, loaded.module.dtype) == ("causal-lm", 256, torch.float32)
    assert models.parameter_count(loaded.module) == recipe["parameters"]
    windows = token_windows(loaded.tokenizer, embedded_text("heldout"), 256, limit=8)
    assert perplexity(loaded.module, windows) < recipe["heldout_perplexity_bigram"]
    assert recipe["heldout_perplexity"] < recipe["heldout_perplexity_bigram"] / 2
    assert sum(file.stat().st_size for file in models.EMBEDDED.iterdir()) < 5e6


def test_directory_loads_in_eval_mode_and_round_trips(directory, tmp_path):
    loaded = models.load(directory)
    assert not loaded.module.training
    assert loaded.window_length(2048) == 64
    loaded.save(tmp_path / "copy")
    again = models.load(tmp_path / "copy")
    assert same_weights(loaded.module, again.module)
    assert again.tokenizer is not None
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()

    from transformers import AutoModelForCausalLM

    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "copy"), loaded.module)


def test_load_converts_to_the_requested_dtype(directory):
    assert models.load(directory, dtype=torch.bfloat16).module.dtype == torch.bfloat16
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert models.load(directory).module.dtype == torch.float32


def test_image_classifier_loads_as_its_own_class(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    loaded = models.load(tmp_path / "vit")
    assert type(loaded.module).__name__ == "ViTForImageClassification"
    assert loaded.task == "image-classification"
    assert loaded.tokenizer is None


def test_context_of_roberta_leaves_out_the_positions_before_the_first_token(tmp_path):
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=34,
    )
    RobertaForMaskedLM(config).save_pretrained(tmp_path / "roberta")
    loaded = models.load(tmp_path / "roberta")
    assert loaded.context == 32
    loaded.module(input_ids=torch.full((1, loaded.window_length(2048)), 5))


def test_missing_and_damaged_files_are_named(directory, tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        models.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        models.load(tmp_path / "empty")
    with pytest.raises(ModelError, match="is a file"):
        models.load(directory / "config.json")
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="damaged or cut short"):
        models.load(directory)
    weights.unlink()
    with pytest.raises(ModelError, match="no weights"):
        models.load(directory)
    torch.save({}, directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="can run any code"):
        models.load(directory)


def test_load_warns_of_tensors_the_network_lacks(directory):
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "draft.weight": torch.ones(2)}, directory / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"1 tensors .* draft\.weight"):
        models.load(directory)


def test_hub_name_loads_from_the_cache_and_saves_companions(directory, tmp_path, monkeypatch, caplog):
    (directory / "preprocessor_config.json").write_text("{}")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    folder = tmp_path / "hub" / "models--someone--small"
    shutil.copytree(directory, folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    loaded = models.load("someone/small")
    loaded.save(tmp_path / "out")
    assert loaded.module.dtype == torch.float32
    assert "no directory someone/small here" in caplog.text  # said before the wait for the hub
    assert {"preprocessor_config.json", "tokenizer.json"} <= {file.name for file in (tmp_path / "out").iterdir()}


def test_remote_code_loads_by_its_own_auto_class(tmp_path, monkeypatch):
    from transformers import ViTConfig, ViTForImageClassification, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    folder = tmp_path / "vit"
    ViTForImageClassification(config).save_pretrained(folder)
    (folder / "own_code.py").write_text(
        "from transformers import ViTConfig, ViTForImageClassification, ViTModel\n\n"
        "class Mine(ViTForImageClassification):\n    config_class = ViTConfig\n\n"
        "class Bare(ViTModel):\n    config_class = ViTConfig\n"
    )
    written = json.loads((folder / "config.json").read_text())
    written["architectures"] = ["Mine"]
    written["auto_map"] = {"AutoModel": "own_code.Bare", "AutoModelForImageClassification": "own_code.Mine"}
    (folder / "config.json").write_text(json.dumps(written))
    loaded = models.load(folder, trust_remote_code=True)
    assert (type(loaded.module).__name__, loaded.task) == ("Mine", "image-classification")


def test_missing_weights_are_named_not_initialised(directory):
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the weights .* model\.layers\.0\.mlp\.up_proj\.weight"):
        models.load(directory)


def test_unknown_classes_and_model_types_are_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(ModelError, match="no model class 'NoSuchModel'"):
        models.load(directory)
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.load(directory)


def test_missing_tokenizer_raises_only_if_text_is_needed(directory):
    (directory / "tokenizer.json").unlink()
    loaded = models.load(directory)
    with pytest.raises(ModelError, match=r"no tokenizer.*tokenizer\.json"):
        loaded.require_tokenizer()


def test_damaged_tokenizer_is_named(directory):
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        models.load(directory)


def test_encoder_of_sentence_transformers_is_loaded_without_the_head_that_its_configuration_names(tmp_path):
    config = BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=6)
    BertModel(config).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["BertForMaskedLM"]}))
    (tmp_path / "modules.json").write_text("[]")
    loaded = models.load(tmp_path)
    assert isinstance(loaded.module, BertModel)
    (tmp_path / "out").mkdir()
    loaded.write(tmp_path / "out")
    assert (tmp_path / "out" / "modules.json").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertModel"]
