"""Tables of the paper: settings, published numbers, whole runs."""

import math
import shutil
from dataclasses import replace

import pytest
from paper_tables import Request, find, llama, table_cbs, table_llm, table_vit
from paper_tables.rounds import Measured, Row, Settings, settings_for, starred

from iobs.errors import DataError
from iobs.models import EMBEDDED

NAMES = [
    "table-vit",
    "table-llm",
    "table-llama2",
    "table-llama3",
    "figure-llama2",
    "figure-llama3",
    "table-cbs",
]
# Settings stated in appendix A of the paper.
STATED = [
    (table_vit.SETTINGS["DeiT-Tiny"], {"lr": 0.01, "damping": 0.01, "sparsity": 0.5, "rounds": 100, "samples": 128}),
    (table_vit.SETTINGS["DeiT-Base"], {"lr": 0.01, "damping": 0.01, "sparsity": 0.5, "rounds": 100, "samples": 128}),
    (
        table_llm.SETTINGS["OPT-125M"],
        {
            "lr": 0.01,
            "damping": 0.01,
            "sparsity": 0.5,
            "rounds": 3,
            "samples": 128,
            "length": 2048,
            "data": "wikitext2",
        },
    ),
    (
        table_llm.SETTINGS["Phi-1.5"],
        {
            "lr": 1e-5,
            "damping": 0.01,
            "sparsity": 0.5,
            "rounds": 3,
            "samples": 128,
            "length": 2048,
            "data": "redpajama",
        },
    ),
    (
        llama.SETTINGS["Llama-2"],
        {"lr": 1e-5, "optimizer": "adam", "batch_size": 16, "samples": 2000, "length": 4096, "every_parameter": True},
    ),
    (
        llama.SETTINGS["Llama-3"],
        {"lr": 1e-5, "optimizer": "adam", "batch_size": 8, "samples": 1000, "length": 8192, "every_parameter": True},
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_registered_with_a_stand_in(name):
    assert find(name).stand_in


@pytest.mark.parametrize(("settings", "stated"), STATED, ids=[settings.model for settings, _ in STATED])
def test_settings_equal_appendix_a(settings, stated):
    assert {name: getattr(settings, name) for name in stated} == stated


def test_published_numbers_have_the_right_shape_and_best():
    assert all(len(values) == 7 for values in table_vit.PUBLISHED.values())
    assert all(len(values) == 11 for values in llama.PUBLISHED.values())
    assert max(llama.PUBLISHED["Llama-2"][1:]) == 0.3950
    assert max(llama.PUBLISHED["Llama-3"][1:]) == 0.5605
    assert [settings.sparsity for settings in table_cbs.SETTINGS] == [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    for index, best in enumerate(["CBS", "CBS", "I-OBS", "I-OBS", "I-OBS", "I-OBS"]):
        assert max(table_cbs.PUBLISHED, key=lambda name: table_cbs.PUBLISHED[name][index]) == best


def test_starred_marks_the_best_round():
    rows = [Row("a", "dense", 1.0, 1.0), Row("a", "round 1", None, 3.0), Row("a", "round 2", None, 2.0)]
    assert [row.method for row in starred(rows, lowest=True)] == ["dense", "round 1", "round 2 *"]
    assert [row.method for row in starred(rows, lowest=False)] == ["dense", "round 1 *", "round 2"]


def test_measured_does_not_repeat_stored_rows(tmp_path):
    request = Request(stand_in=True, seed=0, output=tmp_path, say=lambda text: None)
    settings = Settings("m", "d", 1, 1, 0.5, 1, 0.1)
    assert Measured(request, "t").get("a", settings, lambda: [{"x": 1.0}]) == [{"x": 1.0}]
    assert Measured(request, "t").get("a", settings, lambda: pytest.fail("measured again")) == [{"x": 1.0}]
    for other in (replace(request, seed=1), replace(request, limit=3), replace(request, eval_data=("b",))):
        assert Measured(other, "t").get("a", settings, lambda: [{"x": 2.0}]) == [{"x": 2.0}]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_stand_in_of_every_table_completes(name, tmp_path, monkeypatch):
    monkeypatch.delenv("IOBS_SHARED_DATA", raising=False)
    results = find(name).run(Request(stand_in=True, seed=0, output=tmp_path, say=lambda text: None))
    measured = [row.measured for row in results.rows if row.measured is not None]
    assert len(measured) >= 7
    assert all(map(math.isfinite, measured))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table-llm", "table-llama2"])
def test_stand_ins_use_the_shared_networks_if_present(name, shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("IOBS_SHARED_DATA", str(shared_data))
    results = find(name).run(Request(stand_in=True, seed=0, output=tmp_path, say=lambda text: None, rounds=1, limit=2))
    assert str(shared_data / "llama_stories260K") in next(tmp_path.glob("*.json")).read_text()
    assert all(math.isfinite(row.measured) for row in results.rows)


NETWORKS = """
import timm

def vit():
    return timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2,
        num_classes=2, pretrained_cfg_overlay={"input_size": (3, 32, 32)},
    )

def mobilenet():
    return timm.create_model(
        "mobilenetv1_100", pretrained=False, num_classes=2, pretrained_cfg_overlay={"input_size": (3, 32, 32)}
    )
"""


@pytest.fixture
def pictures(tmp_path):
    """A folder of images in two classes and several sizes, and a file with networks for them."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("timm")
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for index in range(4):
            shape = (40 + 3 * index, 50 - 2 * index)
            image.new("RGB", shape, (60 * index, 10, 90)).save(tmp_path / "pictures" / label / f"{index}x.png")
    (tmp_path / "mine.py").write_text(NETWORKS)
    return str(tmp_path / "pictures")


@pytest.mark.parametrize(("name", "network", "rows"), [("table-vit", "vit", 3), ("table-cbs", "mobilenet", 13)])
def test_tables_run_a_timm_network_on_images_of_the_user(name, network, rows, pictures, tmp_path):
    request = Request(False, 0, None, lambda text: None, f"{tmp_path / 'mine.py'}:{network}", (pictures,), (pictures,))
    results = find(name).run(replace(request, rounds=2))
    assert sum(row.measured is not None for row in results.rows) == rows


@pytest.mark.parametrize("name", ["table-vit", "table-cbs"])
def test_tables_name_the_option_of_missing_images(name):
    with pytest.raises(DataError, match="--eval-data"):
        find(name).run(Request(False, 0, None, lambda text: None))


def test_table_llm_runs_a_language_model_of_the_user(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    model, text = tmp_path / "model", tmp_path / "text.txt"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=2048, max_position_embeddings=32)
    LlamaForCausalLM(config).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, model)
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    request = Request(False, 0, None, lambda text: None, str(model), (str(text),), (str(text),) * 2)
    results = find("table-llm").run(replace(request, rounds=2, limit=2))
    assert [row.method.removesuffix(" *") for row in results.rows] == ["dense", "SparseGPT", "I-OBS, round 2"] * 2
    assert all(row.measured > 1 and row.published is None for row in results.rows)
    with pytest.raises(DataError, match="one --eval-data for each"):
        find("table-llm").run(replace(request, eval_data=(str(text),)))


def test_model_name_selects_the_settings():
    request = Request(False, 0, None, lambda text: None, "/models/opt-125m", rounds=1)
    ((name, settings),) = settings_for(table_llm.SETTINGS, request).items()
    assert (name, settings.model, settings.rounds, settings.lr) == ("OPT-125M", "/models/opt-125m", 1, 0.01)

    for model, label in {
        "meta-llama/Llama-2-7b-chat": "Llama-2",
        "/models/llama_2": "Llama-2",
        "meta-llama/Llama-2-13b-hf": "meta-llama/Llama-2-13b-hf",
        "meta-llama/Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    }.items():
        assert [*settings_for(llama.SETTINGS, replace(request, model=model))] == [label]
