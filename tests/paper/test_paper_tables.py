"""Tables of the paper: settings, published numbers, whole runs; perplexity and MMLU against short references."""

import json
import math
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from iobs.cli import app
from iobs.data import Question, prompt, read_questions
from iobs.errors import DataError
from iobs.evaluate import answer
from iobs.models import EMBEDDED, load
from iobs.paper import Request, find, llama, table_cbs, table_llm, table_vit
from iobs.paper.rounds import Measured, Row, Settings, settings_for, starred

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


def test_mmlu_prompt_equals_the_original():
    example = Question("high_school_physics", "What falls?", ("up", "down", "left", "right"), 1)
    question = Question("high_school_physics", "What rises? ", ("w", "x", "y", "z"), 0)
    assert prompt(question, [example]) == (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        "What falls?\nA. up\nB. down\nC. left\nD. right\nAnswer: B\n\n"
        "What rises?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    )


@pytest.mark.slow
def test_mmlu_of_a_small_model_is_at_chance(shared_data):
    from iobs.models import load

    questions = read_questions(shared_data / "mmlu" / "mmlu.jsonl.gz", subjects=5, each=12)
    assert all(len(examples) == 5 for examples in questions.examples.values())
    table, cut = answer(load(shared_data / "llama_stories260K"), questions)
    assert len(table) == 6
    assert cut > 0  # five examples do not fit into 512 tokens of this tokenizer
    count = len(questions.test)
    assert abs(table["average"] - 0.25) < 4 * math.sqrt(0.25 * 0.75 / count)


@pytest.mark.slow
def test_mmlu_command_prints_every_subject(shared_data):
    command = ["evaluate", str(shared_data / "llama_stories260K"), "--limit", "1", "--shots", "1"]
    result = CliRunner().invoke(app, [*command, "--questions", str(shared_data / "mmlu" / "mmlu.jsonl.gz"), "--json"])
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert len(table) == 57 + 1
    assert "mmlu.jsonl.gz: high_school_physics" in table
    shares = [share for name, share in table.items() if not name.endswith("average")]
    assert table["mmlu.jsonl.gz: average"] == pytest.approx(sum(shares) / 57)
    assert "of 57 prompts" in result.stderr


@torch.no_grad()
def test_mmlu_sums_the_tokens_of_a_letter(shared_data):
    loaded = load(shared_data / "llama_stories260K")
    questions = read_questions(shared_data / "mmlu" / "mmlu.jsonl.gz", subjects=2, each=5)
    expected = defaultdict(list)
    for question in questions.test:
        likelihoods = []
        for letter in "ABCD":
            text = prompt(question, [])
            before, whole = loaded.tokenizer([text, f"{text} {letter}"])["input_ids"]
            logs = loaded.module(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
            likelihoods.append(sum(float(logs[i - 1, whole[i]]) for i in range(len(before), len(whole))))
        expected[question.subject].append(max(range(4), key=likelihoods.__getitem__) == question.answer)
    table, _ = answer(loaded, questions, shots=0)
    assert {subject: table[subject] for subject in expected} == {s: sum(r) / len(r) for s, r in expected.items()}


@pytest.mark.slow
def test_mmlu_agrees_with_lm_eval(shared_data, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    loaded = load(shared_data / "llama_stories260K")
    questions = read_questions(shared_data / "mmlu" / "mmlu.jsonl.gz", subjects=2, each=25)
    subjects = sorted({question.subject for question in questions.test})
    for subject in subjects:
        sets = {"dev": questions.examples[subject], "test": [q for q in questions.test if q.subject == subject]}
        for split, entries in sets.items():
            rows = [{"question": q.question, "choices": q.choices, "answer": q.answer} for q in entries]
            (tmp_path / f"{subject}.{split}.json").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / f"{subject}.yaml").write_text(
            f"task: mine_{subject}\n"
            f"include: {Path(lm_eval.__file__).parent}/tasks/mmlu/default/_default_template_yaml\n"
            "dataset_path: json\ndataset_name: null\n"
            "dataset_kwargs:\n  data_files:\n"
            f"    dev: {tmp_path}/{subject}.dev.json\n    test: {tmp_path}/{subject}.test.json\n"
            "description: 'The following are multiple choice questions (with answers) about "
            f"{subject.replace('_', ' ')}.\n\n\n\n'\n"
        )
    found = lm_eval.simple_evaluate(
        HFLM(pretrained=loaded.module, tokenizer=loaded.tokenizer),
        tasks=[f"mine_{subject}" for subject in subjects],
        num_fewshot=5,
        task_manager=TaskManager(include_path=[str(tmp_path)]),
        bootstrap_iters=0,
    )
    table, _ = answer(loaded, questions)
    for subject in subjects:
        theirs = found["results"][f"mine_{subject}"]["acc,none"]
        assert table[subject] == pytest.approx(theirs)


def test_perplexity_of_the_shared_model_equals_a_reference(shared_data):
    from iobs.data import open_source
    from iobs.evaluate import evaluate
    from iobs.models import load

    loaded = load(shared_data / "llama_stories260K")
    file = shared_data / "tinystories" / "validation.txt"
    tokens = []
    for story in file.read_text(encoding="utf8").split("<|endoftext|>"):
        if story.strip():
            tokens += loaded.tokenizer([story.strip("\n")], verbose=False)["input_ids"][0]
    total = count = 0
    for start in range(0, 16 * 512, 512):
        window = torch.tensor([tokens[start : start + 512]])
        with torch.no_grad():
            logits = loaded.module(window).logits[0, :-1].double().log_softmax(-1)
        total -= float(logits.gather(1, window[0, 1:, None]).sum())
        count += 511
    found = evaluate(loaded, open_source([str(file)], "evaluation", loaded), length=512, limit=16)["perplexity"]
    assert found == pytest.approx(math.exp(total / count), rel=1e-6)
