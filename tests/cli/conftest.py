import shutil
import sys

import pytest
import torch
from typer.testing import CliRunner

import iobs
from iobs import models
from iobs.cli import app
from iobs.data import sources


@pytest.fixture(autouse=True)
def embedded_text(monkeypatch):
    """The embedded text, shortened so that scoring takes no time."""

    def short(split):
        return [text[:1500] for text in real(split)[:4]]

    real = sources.embedded_text
    monkeypatch.setattr(sources, "embedded_text", short)
    return short


@pytest.fixture
def real_figures():
    """For tests that look at the figures of a report, which `cheap_surroundings` leaves blank otherwise."""


@pytest.fixture(autouse=True)
def cheap_surroundings(request, monkeypatch):
    """Make cheap what every run of a command does beside its work, and what tests of other folders check.

    Continuing texts for many tokens and saving figures took most of the time of the runs on small models.
    """
    monkeypatch.setattr("iobs.evaluate.before_after._MOST_TOKENS", 4)
    if "real_figures" in request.fixturenames:
        return

    from matplotlib.figure import Figure

    def save(figure, file, **options):
        if options.get("format") != "svg":
            return real(figure, file, **options)
        return file.write("<svg></svg>")

    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", save)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A directory with a random language model as small as the tests allow, and the embedded tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small") / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=2048, max_position_embeddings=256, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.EMBEDDED / name, folder)
    return folder


@pytest.fixture
def small_embedded(small_model, monkeypatch):
    """The commands take the small model for the embedded one."""
    monkeypatch.setattr(models, "EMBEDDED", small_model)
    monkeypatch.setattr(sources, "EMBEDDED", small_model)
    return small_model


@pytest.fixture
def run():
    def call(*arguments, code=0):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return call


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """A folder of packed files that are ready to run, by precision; bf16 leaves the embedding dense."""
    directory, loaded = tmp_path_factory.mktemp("packed"), models.load(models.EMBEDDED)
    for name, layer in loaded.module.model.named_modules():
        if name.endswith("_proj"):
            layer.weight.data[layer.weight.abs() < layer.weight.abs().median()] = 0
    for precision in ("bf16", "int8"):
        iobs.save_packed(loaded, directory / precision, precision=precision)
    return directory


@pytest.fixture
def classifier(tmp_path, monkeypatch):
    """A file with a network and its data. Python keeps no compiled form beside it: tests compare what a run leaves."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def net():\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 3))\n\n"
        "def batches():\n"
        "    g = torch.Generator().manual_seed(1)\n"
        "    return [(torch.randn(20, 7, generator=g), torch.randint(3, (20,), generator=g)) for _ in range(3)]\n\n"
        "def spoiled():\n"
        "    good = batches()\n"
        "    good[2][0][4, 1] = float('nan')\n"
        "    return good\n\n"
        "def spoiled_net():\n"
        "    made = net()\n"
        "    made[0].weight.data[1, 1] = float('nan')\n"
        "    return made\n\n"
        "def empty():\n    return []\n"
    )
    return file
