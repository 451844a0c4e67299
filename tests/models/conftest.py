import shutil

import pytest
import torch

from iobs import models
from iobs.models.vision_shim import ensure_torchvision

ensure_torchvision()

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A small random language model with the embedded tokenizer's files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama") / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.EMBEDDED / name, folder)
    return folder


@pytest.fixture(scope="session")
def with_words(pristine, tmp_path_factory):
    """The small model with a row of its embedding for each token of its tokenizer; tests do not change it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = shutil.copytree(pristine, tmp_path_factory.mktemp("words") / "model")
    words = models.load().tokenizer.get_vocab()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL | {"vocab_size": len(words)})).save_pretrained(folder)
    return folder


@pytest.fixture
def directory(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture
def factory(tmp_path):
    """A file with a function that builds two layers with one weight, and functions that fail."""
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def build():\n"
        "    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))\n"
        "    net[2].weight = net[0].weight\n"
        "    return net.train()\n\n"
        "def number():\n    return 3\n\n"
        "def broken():\n    raise RuntimeError('mine')\n"
    )
    return file
