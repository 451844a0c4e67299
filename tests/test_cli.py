"""The command line as a user meets it: commands, errors as one line, nothing half-written."""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import iobs
from iobs import models
from iobs.cli import COMMANDS, app, console
from iobs.cli import demo as demo_command
from iobs.cli.progress import Steps
from iobs.cli.watch import Watch
from iobs.data import sources
from iobs.errors import ModelError, NonFiniteError
from iobs.paper import Experiment, Results, Row
from iobs.prune import distributed
from iobs.prune.record import LayerRecord, RoundRecord
from iobs.report import read_report

# Two prunable matrices of the embedded model: enough to see everything happen.
SMALL = ("--include", "model.layers.0.mlp.up_proj", "--include", "model.layers.3.mlp.down_proj")
QUICK = (*SMALL, "--samples", "10", "--seq-len", "32", "--batch-size", "5")


@pytest.fixture(autouse=True)
def embedded_text(monkeypatch):
    """The embedded text cut short, so that scoring it takes no time."""

    def short(split):
        return [text[:1500] for text in real(split)[:4]]

    real = sources.embedded_text
    monkeypatch.setattr(sources, "embedded_text", short)
    return short


@pytest.fixture
def run():
    def call(*arguments, code=0):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return call


@pytest.fixture
def classifier(tmp_path):
    """A file with a network and its data."""
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


def one_error(result):
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, result.stderr
    return lines[0]


# ---- help and version
def test_help_names_every_command(run):
    text = run("--help").output
    assert all(command in text for command in COMMANDS)
    for command in COMMANDS:
        assert "Usage" in run(command, "--help").output
    assert "*.mlp.*" in run("prune", "--help").output, "markdown takes lone stars away"
    assert run("--version").output.strip() == f"iobs {iobs.__version__}"


# ---- prune, evaluate, inspect
def test_prune_a_language_model_then_evaluate_and_inspect(run, tmp_path, embedded_text):
    out = tmp_path / "out"
    shown = run("prune", "-o", out, *QUICK).output
    assert "50.00 % zeros" in shown
    names = {file.name for file in out.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "report.json", "report.html", "README.md"} <= names

    from transformers import AutoModelForCausalLM

    reloaded = AutoModelForCausalLM.from_pretrained(out)
    pruned = reloaded.model.layers[0].mlp.up_proj.weight
    assert int((pruned == 0).sum()) == pruned.numel() // 2
    assert int((reloaded.model.layers[1].mlp.up_proj.weight == 0).sum()) == 0

    report = read_report(out / "report.json")
    assert report.scores["pruned"]["perplexity"] > report.scores["dense"]["perplexity"]
    source = tmp_path / "text.txt"
    source.write_text("\n<|endoftext|>\n".join(embedded_text("heldout")), encoding="utf8")
    again = json.loads(run("evaluate", out, "--data", source, "--seq-len", 32, "--json").stdout)
    assert again["perplexity"] == pytest.approx(report.scores["pruned"]["perplexity"], rel=1e-5)
    text = run("inspect", out).output
    assert "50.00 % zeros: 69,120 of 138,240 weights in 2 layers" in text
    assert "27 matrices have no zero" in text
    assert len(json.loads(run("inspect", out, "--json").stdout)) == 29


def test_prune_a_network_of_the_users_own_with_rounds(run, classifier, tmp_path):
    out = tmp_path / "out"
    shown = run(
        "prune", f"{classifier}:net", "--data", f"{classifier}:batches", "--eval-data", f"{classifier}:batches",
        "-o", out, "--sparsity", 0.4, "--rounds", 2,
    ).output  # fmt: skip
    assert "Rounds" in shown
    assert "accuracy" in shown
    assert {file.name for file in out.iterdir()} == {
        "model.safetensors", "iobs.json", "report.json", "report.html", "README.md"
    }  # fmt: skip
    run("evaluate", out, "--data", f"{classifier}:batches")
    assert "zeros" in run("inspect", out).output


def test_both_scores_are_on_the_same_data(run, classifier, tmp_path):
    classifier.write_text(
        classifier.read_text() + "\n"
        "def fresh():\n"
        "    from pathlib import Path\n"
        "    with Path(__file__).with_name('calls').open('a') as calls:\n"
        "        calls.write('x')\n"
        "    return batches()\n"
    )
    options = ("--data", f"{classifier}:batches", "--eval-data", f"{classifier}:fresh", "-o", tmp_path / "out")
    run("prune", f"{classifier}:net", *options)
    assert (tmp_path / "calls").read_text() == "x"


def test_every_choice_of_the_rounds_has_an_option(run, classifier, tmp_path):
    out = tmp_path / "out"
    run(
        "prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--rounds", 3, "--steps", 2,
        "--lr", 0.02, "--optimizer", "adam", "--loss", "kl", "--schedule", "cubic", "--inputs", "dense",
        "--target", "dense", "--fresh-data",
    )  # fmt: skip
    settings = read_report(out / "report.json").settings
    assert (settings["rounds"], settings["schedule"]) == (3, "cubic")
    assert (settings["inputs"], settings["target"], settings["data"]) == ("dense", "dense", "fresh")
    step = settings["step"]
    assert (step["steps"], step["lr"], step["optimizer"], step["loss"]) == (2, 0.02, "adam", "kl")


def test_a_pruned_network_is_pruned_further(run, classifier, tmp_path):
    data = ("--data", f"{classifier}:batches")
    run("prune", f"{classifier}:net", *data, "-o", tmp_path / "first", "--sparsity", 0.4, "--solver", "magnitude")
    run("prune", tmp_path / "first", *data, "-o", tmp_path / "second", "--sparsity", 0.6, "--keep-zeros")
    first, second = (models.load(tmp_path / name).module[0].weight for name in ("first", "second"))
    assert not bool(second[first == 0].any())
    assert int((second == 0).sum()) == 67


def test_a_recipes_steps_are_changed_where_asked(run, classifier, tmp_path):
    out = tmp_path / "out"
    network = (f"{classifier}:net", "--data", f"{classifier}:batches")
    run("prune", *network, "-o", out, "--recipe", "paper", "--rounds", 2, "--lr", 0.05, "--solver", "magnitude")
    step = read_report(out / "report.json").settings["step"]
    assert (step["lr"], step["optimizer"], step["loss"]) == (0.05, "sgd", "task")


def test_the_other_options_reach_the_run(run, classifier, tmp_path):
    out = tmp_path / "out"
    run(
        "prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--recipe", "best", "--rounds", 3,
        "--lr", 0.02, "--polish", 5, "--refine", "swap", "--budget", "fast", "--damping", 0.02, "--holdout", 0.2,
        "--batch-norm", "update", "--depthwise", "--resume",
    )  # fmt: skip
    settings = read_report(out / "report.json").settings
    told = [settings[name] for name in ("refine", "budget", "damping", "holdout", "batch_norm", "depthwise")]
    assert told == ["swap", "fast", 0.02, 0.2, "update", True]
    assert settings["polish"]["steps"] == 5
    assert (settings["step"]["optimizer"], settings["step"]["lr"]) == ("adam", 0.02)
    assert {file.name for file in tmp_path.iterdir()} == {"mine.py", "out"}, "the checkpoint goes at the end"


@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_prune_to_a_pattern_and_check_it(run, tmp_path, pattern):
    out = tmp_path / "out"
    run("prune", "-o", out, "--pattern", pattern, "--solver", "magnitude", *QUICK)
    assert pattern in run("inspect", out, "--pattern", pattern).output
    assert "1:4 allows 1" in one_error(run("inspect", out, "--pattern", "1:4", code=1))


def test_a_share_that_was_spread_over_layers_is_checked_of_all_together(run, tmp_path, classifier):
    out = tmp_path / "out"
    network = (f"{classifier}:net", "--data", f"{classifier}:batches")
    run("prune", *network, "-o", out, "--sparsity", "0.5", "--allocation", "kl")
    assert len({row.sparsity for row in read_report(out / "report.json").audit}) > 1
    assert "among which zeros were spread, satisfy" in run("inspect", out, "--pattern", "0.5").output
    assert "asks for" in one_error(run("inspect", out, "--pattern", "0.8", code=1))


def test_dry_run_writes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run("prune", "--dry-run", *SMALL).output
    assert "model.layers.0.mlp.up_proj" in text
    assert "left dense" in text
    assert not [*tmp_path.iterdir()]


def test_inspect_notices_weights_that_changed(run, classifier, tmp_path):
    out = tmp_path / "out"
    run("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out)
    loaded = models.load(out)
    with torch.no_grad():
        loaded.module[0].weight.add_(1.0)
    shutil.rmtree(tmp_path / "changed", ignore_errors=True)
    loaded.save(tmp_path / "changed")
    shutil.copy(out / "report.json", tmp_path / "changed")
    assert "promises" in one_error(run("inspect", tmp_path / "changed", code=1))


@pytest.fixture
def written(run, tmp_path):
    """A pruned network, and what changes its stored weights."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def net():\n"
        "    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))\n\n"
        "def batches():\n    return [torch.randn(20, 8)]\n"
    )
    network = f"{tmp_path / 'net.py'}:net"
    data = ("--data", f"{tmp_path / 'net.py'}:batches")
    out = tmp_path / "out"
    run("prune", network, *data, "-o", out, "--pattern", "2:4", "--skip", "4", "--solver", "magnitude")

    def change(edit):
        weights = load_file(out / "model.safetensors")
        edit(weights)
        save_file(weights, out / "model.safetensors")

    return out, change


def test_inspect_counts_the_layers_of_the_report(run, written):
    out, change = written
    change(lambda weights: weights["4.weight"][0, 0].zero_())
    for options in ((), ("--pattern", "2:4")):
        text = run("inspect", out, *options).output
        assert "50.00 % zeros: 640 of 1,280 weights in 2 layers" in text
        assert "zeros elsewhere, not counted: 4 (1 of 96)" in text
    change(lambda weights: weights["2.weight"].fill_(1.0))
    assert "'2' keeps 4 of a group of 4" in one_error(run("inspect", out, "--pattern", "2:4", code=1))


def test_inspect_without_a_report_tells_stray_zeros_from_pruned_layers(run, written):
    out, change = written
    (out / "report.json").unlink()
    change(lambda weights: weights["4.weight"][0, 0].zero_())
    text = run("inspect", out, "--pattern", "2:4").output
    assert "weights in 2 layers" in text
    assert "not counted: 4 (1 of 96)" in text
    change(lambda weights: [weights[f"{layer}.weight"].fill_(1.0) for layer in (0, 2)])
    assert "'4' has most, 1 of 96" in one_error(run("inspect", out, "--pattern", "2:4", code=1))
    change(lambda weights: weights["4.weight"].fill_(1.0))
    assert "the model is dense" in one_error(run("inspect", out, "--pattern", "2:4", code=1))
    assert "this model is dense" in run("inspect", out).output


def test_inspect_passes_over_reports_of_others(run, written):
    out, _ = written
    (out.parent / "report.json").write_text('{"tests": 5}')
    result = run("inspect", out)
    assert "promises" in result.output
    assert result.stderr == ""
    for content in ('{"tests": 5}', "[", "[1]"):
        (out / "report.json").write_text(content)
        result = run("inspect", out)
        assert "50.00 % zeros" in result.stdout
        assert "promises" not in result.output
        assert f"{out / 'report.json'} is not a report of iobs" in result.stderr


def test_dry_run_looks_for_the_data_too(run, tmp_path):
    for option in ("--data", "--eval-data"):
        message = one_error(run("prune", "--dry-run", *SMALL, option, tmp_path / "none.txt", code=1))
        assert "none.txt is not a file" in message


def test_evaluation_data_that_does_not_fit_is_known_before_any_work(run, classifier, tmp_path, monkeypatch):
    np.savez(tmp_path / "wide.npz", images=np.zeros((9, 1, 50, 50), np.float32), labels=np.arange(9))
    monkeypatch.setattr("iobs.cli.prune._run", lambda *_: pytest.fail("the work began"))
    options = ("--data", f"{classifier}:batches", "--eval-data", tmp_path / "wide.npz", "-o", tmp_path / "out")
    assert "cannot take batch 1, tensors of shape (8, 1, 50, 50)" in one_error(
        run("prune", f"{classifier}:net", *options, code=1)
    )


@pytest.mark.parametrize(
    ("options", "message"), [(("--include", "nothing*"), "matches none"), (("--pattern", "3:7"), "divisible by 7")]
)
@pytest.mark.parametrize("dry", [True, False])
def test_wrong_layers_are_found_before_the_dense_model_is_scored(run, tmp_path, monkeypatch, options, message, dry):
    monkeypatch.setattr("iobs.cli.results.evaluate", lambda *_, **__: pytest.fail("the dense model was scored"))
    assert message in one_error(run("prune", "-o", tmp_path / "out", *options, *(["--dry-run"] * dry), code=1))


def test_fewer_windows_than_asked_are_said_and_the_real_length_kept(run, tmp_path):
    (tmp_path / "a.txt").write_text("some words about nothing at all " * 80)
    out = tmp_path / "out"
    options = (*SMALL, "--solver", "magnitude", "--data", tmp_path / "a.txt", "--samples", 4000)
    assert "of 4000 windows to calibrate on: the text has no more." in run("prune", "-o", out, *options).stderr
    assert read_report(out / "report.json").settings["seq_len"] == 256


# ---- evaluate
def test_missing_questions_and_libraries_are_found_before_any_scoring(run, tmp_path, monkeypatch):
    monkeypatch.setattr("iobs.evaluate.evaluate", lambda *_, **__: pytest.fail("the model was scored"))
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "a.txt").write_text("some text")
    text = ("evaluate", "--data", tmp_path / "a.txt")
    assert "none.jsonl" in one_error(run(*text, "--questions", tmp_path / "none.jsonl", code=1))
    assert "pip install" in one_error(run(*text, "--tasks", "mmlu", code=1))


def test_letters_that_cannot_be_told_apart_are_found_before_any_scoring(run, tmp_path, monkeypatch):
    def confused(_):
        raise ModelError("no letters")

    monkeypatch.setattr("iobs.evaluate.evaluate", lambda *_, **__: pytest.fail("the model was scored"))
    monkeypatch.setattr("iobs.evaluate.answers.letter_tokens", confused)
    question = {"split": "test", "subject": "s", "question": "q", "choices": [*"abcd"], "answer": 0}
    (tmp_path / "a.jsonl").write_text(json.dumps(question))
    (tmp_path / "a.txt").write_text("some text")
    options = ("--data", tmp_path / "a.txt", "--questions", tmp_path / "a.jsonl")
    assert "no letters" in one_error(run("evaluate", *options, code=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shots", 3), "examples come before questions"),
        (("--batch-size", 3, "--tasks", "mmlu"), "questions are asked one by one"),
    ],
)
def test_options_that_would_do_nothing_are_refused(run, options, message):
    assert message in run("evaluate", *options, code=2).output.replace("\n", " ")


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--holdout", 1.5), "holdout must lie"),
        (("--schedule", "cubic", "--rounds", 1), "give three or more"),
        (("--eval-data", "none.txt"), "none.txt"),
    ],
)
def test_what_cannot_be_is_found_before_calibration(run, tmp_path, monkeypatch, options, message, dry):
    monkeypatch.setattr("iobs.cli.prune._Calibration.batches", lambda *_: pytest.fail("samples were drawn"))
    assert message in one_error(run("prune", "-o", tmp_path / "out", *options, *(["--dry-run"] * dry), code=1))


# ---- the console
def test_names_come_through_whole_and_as_they_are(run, tmp_path, capsys):
    names = ["speed [m/s]", "rate [/s]", "[bold]", ":smile:", "a.very.long.name." * 20]
    table = Table(title="title [/t]")
    table.add_column("name [/n]")
    table.add_column("other")
    for name in names:
        table.add_row(name, "x" * 50)
    console.output_console().print(table)
    console.output_console().print("line [/x]")
    console.say("said [/x]")
    shown = capsys.readouterr()
    assert all(name in shown.out for name in [*names, "title [/t]", "name [/n]", "line [/x]"])
    assert shown.err == "said [/x]\n"
    (tmp_path / "o [/v1]").mkdir(parents=True)
    file = tmp_path / "o [/v1]" / "a.csv"
    file.write_text("rate [/s],mass [kg],y\n" + "".join(f"{i},{i * i % 7},{2 * i}\n" for i in range(20)))
    assert "rate [/s]" in run("solve", file, "-k", 1).output
    assert str(tmp_path / "o [/v1]") in one_error(run("inspect", tmp_path / "o [/v1]", code=1))


# ---- errors: one line, exit code, nothing left
@pytest.mark.parametrize(
    ("network", "data", "options", "message"),
    [
        ("net", "spoiled", (), "batch 2"),
        ("spoiled_net", "batches", (), "NaN"),
        ("net", "empty", (), "no batch"),
        ("net", "batches", ("--skip", "nothing*"), "matches none"),
        ("net", "batches", ("--sparsity", "1.0"), r"\[0, 1\)"),
        ("net", "batches", ("--pattern", "2:4"), "divisible by 4, got 7"),
        ("net", "batches", ("--pattern", "x"), "Cannot read the pattern"),
        ("net", "batches", ("--solver", "wish"), "wish"),
        ("net", "batches", ("--recipe", "wish"), "wish"),
        ("absent", "batches", (), "no function"),
    ],
)
def test_each_mistake_gives_one_clear_line(run, classifier, tmp_path, network, data, options, message):
    folder = tmp_path / "folder"
    arguments = (f"{classifier}:{network}", "--data", f"{classifier}:{data}", "-o", folder / "out", *options)
    assert re.search(message, one_error(run("prune", *arguments, code=1)))
    assert not folder.exists()


def test_an_output_that_exists_is_found_before_any_work(run, tmp_path):
    (tmp_path / "mine").write_text("x")
    assert "not empty" in one_error(run("prune", "/no/such/model", "-o", tmp_path, code=1))


def test_a_text_that_is_too_short(run, tmp_path):
    (tmp_path / "a.txt").write_text("few words")
    message = one_error(run("prune", "-o", tmp_path / "out", "--data", tmp_path / "a.txt", code=1))
    assert "less than one window of 256" in message


def test_wrong_usage_exits_with_2(run, tmp_path):
    run("prune", code=2)
    run("prune", "-o", tmp_path / "out", "--sparsity", "0.5", "--pattern", "2:4", code=2)
    run("prune", "-o", tmp_path / "out", "--samples", 0, code=2)
    run("prune", "-o", tmp_path / "out", "--batch-size", 0, code=2)
    run("prune", "-o", tmp_path / "out", "--rounds", 2, "--lr", "quick", code=2)
    run("prune", "-o", tmp_path / "out", "--lr", 0.01, code=2)
    run("evaluate", "--dtype", "float3", code=2)
    run("evaluate", "--device", "nonsense", code=2)


def test_interruption_leaves_nothing(run, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("iobs.cli.results.write_report", interrupted)
    result = run("prune", "-o", tmp_path / "out", *QUICK, code=130)
    assert "Nothing half-written" in result.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NonFiniteError("The model gives NaN on batch 2."), 1, "The model gives NaN on batch 2."),
        (RuntimeError("can't allocate memory\nmany lines"), 1, "can't allocate memory"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
    ],
)
def test_a_pruned_model_that_cannot_be_scored_is_written(run, classifier, tmp_path, monkeypatch, error, code, said):
    def evaluate(*_, **options):
        if "length" not in options:  # a few samples, before any work
            return {}
        if scored:
            raise error
        scored.append(1)
        return {"accuracy": 50.0}

    scored = []
    monkeypatch.setattr("iobs.cli.results.evaluate", evaluate)
    sources = ("--data", f"{classifier}:batches", "--eval-data", f"{classifier}:batches")
    result = run("prune", f"{classifier}:net", *sources, "-o", tmp_path / "out", code=code)
    note = f"The pruned model could not be scored: {said}"
    assert note in result.stderr.splitlines()
    report = read_report(tmp_path / "out" / "report.json")
    assert (report.scores, report.notes[-1]) == ({}, note)
    assert "50.00 % zeros" in run("inspect", tmp_path / "out").output


def test_inspect_of_what_is_no_model(run, tmp_path):
    assert "is not a directory" in one_error(run("inspect", tmp_path / "none", code=1))
    assert "no .safetensors" in one_error(run("inspect", tmp_path, code=1))


def test_inspect_of_a_dense_model(run):
    assert "this model is dense" in run("inspect", models.EMBEDDED).output


# ---- demo
def test_demo(run, tmp_path, monkeypatch):
    """The demo with its cheapest method and the rounds, on few windows."""
    real = demo_command.methods

    def two(rounds):
        from dataclasses import replace

        chosen = [method for method in real(rounds) if method.name == "magnitude" or method.options.get("rounds")]
        last = chosen[-1]
        step = replace(last.options["step"], steps=1, batch_size=2)
        options = {**last.options, "step": step, "include": "model.layers.0.mlp.*", "solver": "magnitude"}
        return [*chosen[:-1], replace(last, options=options)]

    monkeypatch.setattr(demo_command, "methods", two)
    out = tmp_path / "iobs-demo"
    text = run("demo", "-o", out, "--samples", 8, "--rounds", 2).output
    assert "magnitude" in text
    assert "Reloaded" in text
    assert {entry.name for entry in out.iterdir()} == {"report.html", "report.json", "model"}
    report = read_report(out / "report.json")
    assert [*report.scores] == ["dense", "magnitude", "I-OBS, 2 rounds"]
    assert "is not empty" not in run("inspect", out).output
    assert demo_command._is_demo(out)  # and so may be replaced
    (out / "mine.txt").write_text("x")
    assert "not empty" in one_error(run("demo", "-o", out, code=1))


def test_the_demo_replaces_no_model_of_others(run, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_text("mine")
    assert "not empty" in one_error(run("demo", "-o", tmp_path, code=1))
    (tmp_path / "report.json").write_text('{"tests": 5}')
    assert "not empty" in one_error(run("demo", "-o", tmp_path, code=1))
    assert weights.read_text() == "mine"


def test_the_demo_compares_what_it_promises():
    assert [method.name for method in demo_command.methods(3)] == [
        "magnitude", "Wanda", "SparseGPT", "ADMM", "I-OBS, 3 rounds"
    ]  # fmt: skip


# ---- reproduce
def test_reproduce(run, monkeypatch):
    entry = Experiment(
        "table9",
        "Table 9",
        "an example",
        lambda request: Results("perplexity", [Row("50 %", "I-OBS", 11.0, float(request.seed))], ["A note."]),
        "a small network",
    )
    for module in ("iobs.paper.registry", "iobs.cli.reproduce"):
        monkeypatch.setattr(f"{module}.experiments", lambda: [entry])
    assert "table9" in run("reproduce").output
    text = run("reproduce", "table9", "--seed", 7).output
    assert all(part in text for part in ("published", "11", "7", "A note."))
    assert json.loads(run("reproduce", "table9", "--json").stdout)["rows"][0]["published"] == 11.0
    assert "table9" in one_error(run("reproduce", "table10", code=1))


# ---- progress
def test_progress_counts_layers_and_steps(monkeypatch):
    told = []
    steps = SimpleNamespace(update=lambda done, total, text: told.append((done, total, text)))
    watch = Watch(steps, "x: ")
    layer = LayerRecord("l", (2, 2), 0.5, 2, 0.1, None, 0.1, 0.01, 0, 5, 0.1)
    watch.begin(2, ["l", "m"])
    for round_index in range(2):
        watch.layer(round_index, layer)
        watch.layer(round_index, layer)
        watch.round(RoundRecord(round_index, 0.5, 1.0, None, [layer]))
        for step in range(3 if round_index == 0 else 0):
            watch.step(round_index, step + 1, 3, 0.5)
    assert told[1] == (1, 4, "x: round 1 of 2, l")
    assert told[3] == (3, 7, "x: round 1 of 2, step 1 of 3, loss 0.500")
    watch.step(2, 1, 1, 0.25)
    assert told[-1] == (8, 8, "x: polish: step 1 of 1, loss 0.250")


def test_plain_progress_is_a_line_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 20.0, 21.0])
    monkeypatch.setattr("iobs.cli.progress.time.monotonic", lambda: next(clock))
    with Steps("work") as steps:
        for done in (1, 5, 6):
            steps.update(done, 10)
    assert capsys.readouterr().err == "work: 50 %, about 20 s left\n"


def test_steps_that_were_taken_before_are_not_counted():
    told = []
    watch = Watch(SimpleNamespace(update=lambda done, total, text: told.append((done, total))))
    watch.begin(3, ["l"])
    for done in (9, 10):  # resumed after eight steps of the first round
        watch.step(0, done, 10, 0.5)
    assert told[-1] == (2, 3 + 12)
    watch.step(1, 1, 10, 0.5)
    assert told[-1] == (3, 15)
    watch.begin(1, ["l"])
    watch.layer(0, LayerRecord("l", (2, 2), 0.5, 2, 0.1, None, 0.1, 0.01, 0, 5, 0.1))
    for done in range(301, 601):
        watch.step(3, done, 600, 0.5)
    assert told[-1] == (301, 301)


def test_a_polish_says_what_it_and_the_projection_came_to(capsys):
    steps = SimpleNamespace(update=lambda *_: None)
    projection = RoundRecord(0, 0.5, 1.0, 0.75, [], seconds=2.0)
    polish = RoundRecord(1, 0.5, 1.0, 0.25, [], [0.1, 0.1], seconds=3.0, kind="polish", polished_round=0)
    watch = Watch(steps, "x, ")
    watch.begin(5, ["l"])
    watch.expect_rounds(1)
    watch.round(projection)
    assert capsys.readouterr().err == ""  # alone it is the result, which is shown at the end
    watch.step(1, 1, 2, 0.1)
    assert capsys.readouterr().err == "x, projection: 50.0 % zeros, loss 0.7500, 2.0 s\n"
    watch.round(polish)
    assert capsys.readouterr().err == "x, polish of 2 steps: 50.0 % zeros, loss 0.2500, 3.0 s\n"
    quiet = Watch(steps, quiet=True)
    quiet.begin(1, ["l"])
    quiet.round(projection)
    quiet.step(1, 1, 2, 0.1)
    quiet.round(polish)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    """Keeps what a terminal is sent."""

    def isatty(self):
        return True


def test_what_is_said_stands_above_the_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with Steps("work") as steps:
        steps.update(1, 2)
        Watch(steps).note("a note")
        console._show_warning("a warning", UserWarning)
    # Each begins where the bar was erased, and ends its own line.
    sent = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert "\x1b[2Ka note\n" in sent
    assert "\x1b[2KWarning: a warning\n" in sent


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_shows_progress(monkeypatch, rank):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(distributed, "current", lambda: distributed.Ranks(rank, 2))
    monkeypatch.setattr("iobs.cli.progress._PLAIN_INTERVAL", 0.0)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with Steps("work") as steps:
            steps.update(1, 2)
            console.say("a note")
        shown = stream.getvalue()
        assert ("work" in shown, "a note" in shown) == (rank == 0, rank == 0)
        assert bool(shown) == (rank == 0)


@pytest.mark.parametrize("command", ["prune", "compare", "demo", "pack", "reproduce", "solve"])
def test_outputs_take_the_home_folder(command, tmp_path, monkeypatch):
    from typer.main import get_command

    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = get_command(app).commands[command]
    (output,) = (option for option in parsed.params if option.name == "output")
    context = parsed.context_class(parsed)
    assert output.process_value(context, "~/out") == tmp_path / "out"
    assert output.process_value(context, "out") == Path("out")
