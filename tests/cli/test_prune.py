"""`iobs prune`: options reach the run, and the output follows them."""

import json
from math import prod

import pytest
from checks import one_error
from short_options import FEW_STEPS, ONE_SHOT, QUICK, SMALL

import iobs
from iobs import models
from iobs.pruning.recipe import Recipe
from iobs.report import read_report


def test_prune_then_evaluate_and_inspect_a_language_model(run, tmp_path, embedded_text, real_figures):
    out = tmp_path / "out"
    shown = run("prune", "-o", out, *ONE_SHOT, *QUICK).output
    assert "50.00 % zeros" in shown
    names = {file.name for file in out.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "report.json", "report.html", "recipe.yaml"} <= names

    from transformers import AutoModelForCausalLM

    reloaded = AutoModelForCausalLM.from_pretrained(out)
    pruned = [reloaded.model.layers[0].mlp.up_proj.weight, reloaded.model.layers[1].mlp.down_proj.weight]
    assert sum(int((one == 0).sum()) for one in pruned) == 69_120
    assert int((reloaded.model.layers[1].mlp.up_proj.weight == 0).sum()) == 0

    report = read_report(out / "report.json")
    assert report.scores["pruned"]["perplexity"] > report.scores["dense"]["perplexity"]
    source = tmp_path / "text.txt"
    source.write_text("\n<|endoftext|>\n".join(embedded_text("heldout")), encoding="utf8")
    again = json.loads(run("evaluate", out, "--data", source, "--seq-len", 32, "--json").stdout)
    # The report scores the float32 weights, the files hold them in float16.
    assert again["perplexity"] == pytest.approx(report.scores["pruned"]["perplexity"], rel=1e-4)
    text = run("inspect", out).output
    assert "50.00 % zeros: 69,120 of 138,240 weights in 2 layers" in text
    assert "27 matrices have no zero" in text
    assert len(json.loads(run("inspect", out, "--json").stdout)["layers"]) == 29


def test_prune_runs_rounds_on_a_network_of_the_user(run, classifier, tmp_path):
    out = tmp_path / "out"
    shown = run(
        "prune", f"{classifier}:net", "--data", f"{classifier}:batches", "--eval-data", f"{classifier}:batches",
        "-o", out, "--sparsity", 0.4, "--recipe", "best", "--rounds", 2, *FEW_STEPS,
        "--set", "finetune.steps=4", "--set", "finetune.most_steps=null", "--set", "finetune.lr=1e-3",
        "--set", "finetune.optimizer=adam",
    ).output  # fmt: skip
    assert "Rounds" in shown
    assert "accuracy" in shown
    assert {file.name for file in out.iterdir()} == {
        "model.safetensors", "iobs.json", "recipe.yaml", "report.json", "report.html", "README.md"
    }  # fmt: skip
    run("evaluate", out, "--data", f"{classifier}:batches")
    assert "zeros" in run("inspect", out).output


def test_prune_scores_both_models_on_the_same_data(run, classifier, tmp_path):
    classifier.write_text(
        classifier.read_text() + "\n"
        "def fresh():\n"
        "    from pathlib import Path\n"
        "    with Path(__file__).with_name('calls').open('a') as calls:\n"
        "        calls.write('x')\n"
        "    return batches()\n"
    )
    options = ("--data", f"{classifier}:batches", "--eval-data", f"{classifier}:fresh", "-o", tmp_path / "out")
    run("prune", f"{classifier}:net", *options, *ONE_SHOT)
    assert (tmp_path / "calls").read_text() == "x"


def test_prune_options_set_every_setting_of_the_rounds(run, classifier, tmp_path):
    out = tmp_path / "out"
    run(
        "prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--set", "rounds.count=3",
        "--set", "rounds.schedule=cubic", "--set", "rounds.data=fresh", "--set", "rounds.finetune.steps=2",
        "--set", "rounds.finetune.lr=2e-2", "--set", "rounds.finetune.optimizer=adam",
        "--set", "rounds.finetune.loss=kl", "--set", "inputs=dense", "--set", "target=dense", "--set", "blocks=null",
    )  # fmt: skip
    recipe = read_report(out / "report.json").settings["recipe"]
    assert (recipe["inputs"], recipe["target"]) == ("dense", "dense")
    rounds = recipe["rounds"]
    assert (rounds["count"], rounds["schedule"], rounds["data"]) == (3, "cubic", "fresh")
    step = rounds["finetune"]
    assert (step["steps"], step["lr"], step["optimizer"], step["loss"]) == (2, 0.02, "adam", "kl")


def test_prune_continues_from_a_pruned_network(run, classifier, tmp_path):
    data, one, two = ("--data", f"{classifier}:batches", *ONE_SHOT), tmp_path / "one", tmp_path / "two"
    run("prune", f"{classifier}:net", *data, "-o", one, "--sparsity", 0.4, "--solver", "magnitude")
    run("prune", one, *data, "-o", two, "--sparsity", 0.6, "--set", "keep_zeros=true", "--set", "allocation=uniform")
    first, second = (models.load(folder).module[0].weight for folder in (one, two))
    assert not bool(second[first == 0].any())
    assert int((second == 0).sum()) == 67


def test_prune_options_override_steps_of_a_recipe(run, classifier, tmp_path):
    out = tmp_path / "out"
    network = (f"{classifier}:net", "--data", f"{classifier}:batches")
    changes = ("--rounds", 2, "--set", "rounds.finetune.lr=0.05", "--solver", "magnitude")
    run("prune", *network, "-o", out, "--recipe", "paper", *changes)
    recipe = read_report(out / "report.json").settings["recipe"]
    step = recipe["rounds"]["finetune"]
    assert (recipe["solver"], recipe["rounds"]["count"]) == ("magnitude", 2)
    assert (step["lr"], step["optimizer"], step["loss"]) == (0.05, "sgd", "task")


def test_prune_options_reach_the_settings(run, classifier, tmp_path):
    out = tmp_path / "out"
    run(
        "prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--recipe", "best", "--rounds", 2,
        "--set", "rounds.finetune.optimizer=adam", "--set", "rounds.finetune.lr=0.02", "--set", "finetune.steps=5",
        "--set", "finetune.most_steps=null", "--set", "refine=swap", "--set", "solver.budget=fast",
        "--set", "damping=0.02", "--set", "holdout=0.2", "--set", "batch_norm=update", "--set", "depthwise=true",
        "--resume", *FEW_STEPS,
    )  # fmt: skip
    settings = read_report(out / "report.json").settings
    recipe = settings["recipe"]
    assert [recipe[name] for name in ("refine", "damping", "batch_norm", "depthwise")] == ["swap", 0.02, "update", True]
    assert (recipe["solver"]["name"], recipe["solver"]["budget"], settings["holdout"]) == ("admm", "fast", 0.2)
    assert settings["decided"]["finetune"]["steps"] == 5
    step = recipe["rounds"]["finetune"]
    assert (step["optimizer"], step["lr"]) == ("adam", 0.02)
    assert {file.name for file in tmp_path.iterdir()} == {"mine.py", "out"}, "the checkpoint is removed at the end"


@pytest.mark.usefixtures("small_embedded")
@pytest.mark.parametrize("pattern", ["2:4", pytest.param("4:8", marks=pytest.mark.slow)])
def test_prune_to_a_pattern_passes_inspect(run, tmp_path, pattern):
    out = tmp_path / "out"
    run("prune", "-o", out, "--pattern", pattern, "--solver", "magnitude", *FEW_STEPS, *QUICK)
    assert pattern in run("inspect", out, "--pattern", pattern).output
    assert "1:4 allows 1" in one_error(run("inspect", out, "--pattern", "1:4", code=1))


@pytest.mark.usefixtures("small_embedded")
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        pytest.param(("--bits", "4"), "int4", marks=pytest.mark.slow),
        (("--bits", "3", "--pattern", "2:4"), "2:4+int3"),
        pytest.param(("--sparsity", "50%+int4"), None, marks=pytest.mark.slow),
    ],
)
def test_prune_to_a_grid_passes_inspect(run, tmp_path, options, pattern):
    out = tmp_path / "out"
    shown = run("prune", "-o", out, *options, "--solver", "sparsegpt", *ONE_SHOT, *QUICK).output if pattern else ""
    if pattern is None:
        # The recipe "fast" moves zeros between layers.
        shown = run("prune", "-o", out, *options, "--set", "blocks.steps=5", "--set", "blocks.lr=1e-3", *QUICK).output
    assert "bits a weight" in shown
    if pattern:
        assert pattern.rpartition("+")[2] in run("inspect", out, "--pattern", pattern).output
        assert "not on the grid" in one_error(run("inspect", out, "--pattern", pattern[:-1] + "2", code=1))
        again = tmp_path / "again"
        run("prune", "-o", again, "--recipe", out / "recipe.yaml")
        assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("small_embedded")
def test_prune_to_zeros_and_bits_a_weight(run, tmp_path):
    out = tmp_path / "out"
    run("prune", "-o", out, "--pattern", "2:4", "--bits-per-weight", "3.4", "--recipe", "one-shot", *QUICK)
    report = read_report(out / "report.json")
    assert all(2 * row.zeros >= row.weights for row in report.audit)
    assert 3.3 < report.bits_per_weight <= 3.6  # sides of small matrices
    run("inspect", out, "--pattern", "2:4+rate:3.6")
    run("prune", "-o", tmp_path / "again", "--recipe", out / "recipe.yaml")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("small_embedded")
def test_prune_to_bits_a_weight(run, tmp_path):
    out = tmp_path / "out"
    shown = run("prune", "-o", out, "--bits-per-weight", "3.4", "--recipe", "one-shot", *QUICK).output
    assert "bits a weight" in shown
    report = read_report(out / "report.json")
    assert 3.3 < report.bits_per_weight <= 3.6  # sides of small matrices
    assert "rate:3.4" in (out / "recipe.yaml").read_text(encoding="utf8")
    refused = run("prune", "-o", tmp_path / "new", "--bits-per-weight", "3", "--bits", "4", *QUICK, code=2).output
    assert "--bits-per-weight" in refused
    refused = run("prune", "-o", tmp_path / "new", "--bits-per-weight", "3", "--megabytes", "1", *QUICK, code=2).output
    assert "--megabytes" in refused


def test_dry_run_of_a_size_shows_its_bits_and_its_least(run, tmp_path):
    shown = run("prune", "-o", tmp_path / "out", "--megabytes", "3", "--dry-run", *QUICK).output
    assert "the run divides them" in shown
    assert "bits a weight" in shown
    message = one_error(run("prune", "-o", tmp_path / "out", "--megabytes", "0.01", "--dry-run", *QUICK, code=2))
    assert "The least for this network is" in message
    shown = run("prune", "-o", tmp_path / "out", "--bits", "4", "--dry-run", *QUICK).output
    assert "bits a weight" in shown
    assert "4.1" in shown or "4.2" in shown
    plan = json.loads(run("prune", "--pattern", "2:4", "--bits-per-weight", "4", "--dry-run", "--json", *QUICK).stdout)
    assert all(2 * row["zeros"] == prod(row["shape"]) == row["bits"] / 4 for row in plan["layers"])
    plan = json.loads(run("prune", "--sparsity", "50%", "--bits", "4", "--dry-run", "--json", *QUICK).stdout)
    assert all(2 * row["zeros"] == prod(row["shape"]) < row["bits"] for row in plan["layers"])
    assert "even division" in plan["about"]


def test_bits_are_given_once(run, tmp_path):
    assert "has bits already" in run(
        "prune", "-o", tmp_path / "out", "--pattern", "int4", "--bits", "3", *QUICK, code=2
    ).output.replace("\n", " ")


@pytest.mark.usefixtures("small_embedded")
@pytest.mark.parametrize("solver", ["global-magnitude", "chita"])
def test_dry_run_of_a_network_solver_shows_its_time(run, solver):
    shown = run("prune", "--dry-run", "--solver", solver, "--include", "*.0.*.q_proj", *QUICK).output
    assert "Predicted time" in shown
    assert "stages of the whole network" in shown


def test_dry_run_writes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run("prune", "--dry-run", *SMALL).output
    assert "model.layers.0.mlp.up_proj" in text
    assert "left dense" in text
    assert "Predicted time: " in text
    assert not [*tmp_path.iterdir()]
    shown = json.loads(run("prune", "--dry-run", "--json", *SMALL).stdout)
    assert sum(shown["phases"].values()) == pytest.approx(shown["seconds"])
    assert shown["phases"]["solves"] > 0


@pytest.mark.usefixtures("small_embedded")
def test_prune_reports_fewer_windows_than_requested(run, tmp_path):
    (tmp_path / "a.txt").write_text("some words about nothing at all " * 80)
    out = tmp_path / "out"
    options = (*SMALL, *ONE_SHOT, "--solver", "magnitude", "--data", tmp_path / "a.txt", "--samples", 4000)
    assert "of 4000 windows to calibrate on: the text has no more." in run("prune", "-o", out, *options).stderr
    assert read_report(out / "report.json").settings["seq_len"] == 256


def test_low_memory_takes_the_same_recipe_by_default(run, small_model, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    data = ("--data", tmp_path / "text.txt", "--samples", "10", "--seq-len", "16", "--include", "*layers.0.mlp.up_proj")
    short = ("--set", "blocks.steps=2", "--set", "allocation=uniform", "--set", "blocks.lr=1e-3")
    for name, more in (("whole", ()), ("streamed", ("--low-memory",))):
        run("prune", small_model, "-o", tmp_path / name, "--dtype", "float32", *data, *short, *more)
    whole, streamed = (Recipe.from_yaml(tmp_path / name / "recipe.yaml") for name in ("whole", "streamed"))
    assert whole == streamed
    assert whole.blocks is not None
    one, two = (read_report(tmp_path / name / "report.json").settings for name in ("whole", "streamed"))
    assert (one["holdout"], one["samples"]) == (two["holdout"], two["samples"]) == (0.1, 9)


def test_low_memory_holds_no_samples_out_where_none_judges(run, small_model, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    data = ("--data", tmp_path / "text.txt", "--samples", "10", "--seq-len", "16", "--include", "*layers.0.mlp.up_proj")
    run("prune", small_model, "-o", tmp_path / "out", "--low-memory", "--recipe", "one-shot", *data)
    settings = read_report(tmp_path / "out" / "report.json").settings
    assert (settings["holdout"], settings["samples"]) == (0.0, 10)


@pytest.mark.usefixtures("small_embedded")
def test_a_size_is_that_of_the_written_weights(run, tmp_path):
    out = tmp_path / "out"
    shown = run("prune", "-o", out, "--megabytes", "2.87", "--recipe", "one-shot", *QUICK).output
    assert "packed: transformers" in shown
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert size <= 1.005 * 2.87e6
    assert iobs.load(out).module is not None


def test_a_network_of_code_in_a_size_is_read_by_iobs_alone(run, tmp_path):
    file, out = tmp_path / "net.py", tmp_path / "out"
    file.write_text(
        "import torch\n\ndef net():\n    return torch.nn.Linear(64, 256)\n"
        "\ndef batches():\n    return [torch.randn(64, 64)]\n",
        encoding="utf8",
    )
    data = ("--data", f"{file}:batches", "--recipe", "one-shot")
    shown = run("prune", f"{file}:net", "-o", out, "--megabytes", "0.014", *data).output
    assert "packed: iobs.load and iobs bench read them" in " ".join(shown.split())
    assert iobs.load(out).module.weight.shape == (256, 64)


@pytest.fixture
def routed(tmp_path):
    """A file with a network of which one layer is seen in a forward pass alone, and data that it does not take."""
    file = tmp_path / "routed.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Routed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.gate = nn.Linear(8, 16), nn.Parameter(torch.randn(4, 16))\n\n"
        "    def forward(self, x):\n        return self.first(x).relu() @ self.gate.T\n\n"
        "def net():\n    return Routed()\n\n"
        "def batches():\n    return [torch.randn(20, 8)]\n\n"
        "def narrow():\n    return [torch.randn(20, 7)]\n"
    )
    return file


def test_dry_run_shows_the_layers_that_a_forward_pass_shows(run, routed):
    """It listed them as dense, and the run pruned them."""
    shown = json.loads(
        run("prune", f"{routed}:net", "--data", f"{routed}:batches", "--dry-run", "--json", *ONE_SHOT).stdout
    )
    assert [layer["layer"] for layer in shown["layers"]] == ["first", "gate"]
    assert shown["dense"] == {}


@pytest.mark.parametrize(("option", "pruned"), [("--ignore", ["first"]), ("--include", ["gate"])])
def test_options_name_layers_that_a_forward_pass_shows(run, routed, tmp_path, option, pruned):
    """The names were looked for before the pass, and refused."""
    network = "prune", f"{routed}:net", "--data", f"{routed}:batches", option, "gate", *ONE_SHOT
    run(*network, "-o", tmp_path / "out")
    assert [row.name for row in read_report(tmp_path / "out" / "report.json").audit] == pruned
    foretold = json.loads(run(*network, "--dry-run", "--json").stdout)
    assert [layer["layer"] for layer in foretold["layers"]] == pruned
    assert "matches none" in one_error(run(*network, "-o", tmp_path / "no", option, "door", code=2))


def test_dry_run_refuses_data_as_the_run_does(run, routed, tmp_path):
    """It ended in a traceback of the model."""
    network = "prune", f"{routed}:net", "--data", f"{routed}:narrow", *ONE_SHOT
    refused = one_error(run(*network, "-o", tmp_path / "out", code=2))
    assert "cannot take calibration batch 0" in refused
    assert one_error(run(*network, "--dry-run", code=2)) == refused
