"""recipe.yaml repeats a run; `--set` and recipe files are checked before any work."""

import pytest
from checks import one_error
from safetensors.torch import load_file
from short_options import FEW_STEPS, QUICK

from iobs.report import read_report


@pytest.fixture
def no_work(monkeypatch):
    """Loading a model fails the test."""
    for name in ("iobs.cli.loading.load_model", "iobs.models.streamed.StreamedModel.open"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("a model was loaded"))


def assert_same_bytes(first, second):
    for name in ("model.safetensors", "recipe.yaml"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_recipe_file_repeats_a_run_of_a_network(run, classifier, tmp_path, monkeypatch):
    network, first, second, other = f"{classifier}:net", tmp_path / "A", tmp_path / "B", tmp_path / "C"
    changes = ("--solver", "sparsegpt", "--set", "solver.block=4", "--set", "damping=5e-2", "--set", "holdout=0.3")
    monkeypatch.chdir(classifier.parent)
    run("prune", network, "-o", first, "--data", "mine.py:batches", "--sparsity", "60%", "--seed", 3, *changes)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run("prune", network, "-o", second, "--recipe", first / "recipe.yaml")
    assert_same_bytes(first, second)
    settings = [read_report(folder / "report.json").settings for folder in (first, second)]
    assert [found.pop("calibration") for found in settings] == ["mine.py:batches"] * 2  # without the folder
    assert settings[0] == settings[1]
    run("prune", network, "-o", other, "--recipe", first / "recipe.yaml", "--sparsity", 0.3, "--ignore", "2")
    report = read_report(other / "report.json")
    assert (report.settings["holdout"], report.settings["recipe"]["damping"]) == (0.3, 0.05)
    assert [(row.name, row.zeros) for row in report.audit] == [("0", 34)]


def test_recipe_file_repeats_rounds_of_finetuning(run, classifier, tmp_path):
    network = f"{classifier}:net"
    changes = ("--recipe", "one-shot", "--rounds", 2, "--set", "rounds.finetune.optimizer=adam",
               "--set", "rounds.finetune.lr=1e-2", "--set", "rounds.finetune.steps=3",
               "--set", "finetune.optimizer=adam", "--set", "finetune.lr=1e-2", "--set", "finetune.steps=3",
               "--set", "finetune.most_steps=none", "--set", "rounds.schedule=constant")  # fmt: skip
    run("prune", network, "-o", tmp_path / "A", "--data", f"{classifier}:batches", *changes)
    run("prune", network, "-o", tmp_path / "B", "--recipe", tmp_path / "A" / "recipe.yaml")
    assert_same_bytes(tmp_path / "A", tmp_path / "B")
    assert len(read_report(tmp_path / "A" / "report.json").rounds) == 3


def test_recipe_file_repeats_a_run_with_low_memory(run, small_model, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    given = ("--low-memory", "--data", tmp_path / "text.txt", "--solver", "sparsegpt", "--pattern", "2:4")
    run("prune", small_model, "-o", tmp_path / "A", *given, *FEW_STEPS, *QUICK)
    run("prune", small_model, "-o", tmp_path / "B", "--recipe", tmp_path / "A" / "recipe.yaml")
    assert_same_bytes(tmp_path / "A", tmp_path / "B")
    dense, pruned = (load_file(folder / "model.safetensors") for folder in (small_model, tmp_path / "A"))
    new_zeros = [name for name in dense if int((pruned[name] == 0).sum()) > int((dense[name] == 0).sum())]
    assert new_zeros == ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["A", "B", "text.txt"]


@pytest.mark.parametrize("low_memory", [(), ("--low-memory",)])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("wish=3", "no field 'wish'"),
        ("solver.wish=3", "'wish' is unknown; here the fields are budget"),
        ("finetune.wish=3", "'wish' is unknown"),
        ("rounds.count.deep=3", "'deep' is unknown"),
        ("=3", "no field ''"),
        ("damping=much", "damping must be a number, got 'much'"),
        ("damping=-1", "damping must not be negative"),
        ("solver=wish", "wish"),
        ("solver=5", "solver must be a name"),
        ("solver.budget=wish", "budget must be"),
        ("refine=5", "refine must be a name"),
        ("rounds=many", "rounds must be a whole number"),
        ("rounds.count=0", "rounds must be a whole number"),
        ("finetune.steps=0.5", "steps must be a whole number"),
        ("finetune.most_steps=1", "most_steps must be a whole number of at least steps"),
        ("finetune.most_steps=x", "most_steps must be a whole number"),
        ("finetune.lr=0.02", "give an optimizer too"),
        ("finetune.loss=3", "loss must be"),
        ("finetune=3", "finetune must be a mapping"),
        ("allocation.most=much", "sparsities in"),
        ("allocation.bounds=3", "bounds must map names"),
        ("keep_zeros=maybe", "keep_zeros must be one of False, True"),
        ("rules=all", "rules must be a list"),
        ("holdout=much", "holdout must be a number"),
        ("holdout=1", "holdout must lie"),
        ("damping", "KEY=VALUE"),
        ("", "KEY=VALUE"),
    ],
)
def test_wrong_setting_raises_before_any_work(run, tmp_path, no_work, setting, message, low_memory):
    line = one_error(run("prune", "-o", tmp_path / "out", "--set", setting, *low_memory, code=2))
    assert message in line
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("solver: [admm", "is no YAML"),
        ("just words", "holds no recipe"),
        ("", "holds no recipe"),
        (b"\xff\xfe\x00", "is no YAML"),
        ("date: 2024-13-45", "is no YAML"),
        ("solvr: admm", "A recipe has no key 'solvr'; the keys are solver"),
        ("1: 2", "A recipe has no key 1"),
        ("rounds: {number: 3}", "rounds of a recipe has no key 'number'"),
        ("finetune: {step: 3}", "finetune of a recipe has no key 'step'"),
        ("finetune: {steps: many}", "steps must be a whole number"),
        ("allocation: {bounds: {a: 3}}", "bounds must map names"),
        ("solver: {name: admm, blok: 3}", "does not take these options"),
        ("rules: [{match: '*', wish: 3}]", "has no key 'wish'"),
        ("run: 3", "section run"),
        ("run: {sample: 3}", "no key sample; the keys are"),
        ("run: {samples: many}", "samples must be a whole number"),
        ("run: {seq_len: 1}", "seq_len must be a whole number of at least 2"),
        ("run: {seed: x}", "seed must be a whole number"),
        ("run: {holdout: 2}", "holdout must lie"),
        ("run: {include: 3}", "include must be a list of texts"),
        ("run: {data: [3]}", "data must be a list of texts"),
        ("run: {dtype: 3}", "dtype must be a name"),
        ("run: {low_memory: 3}", "low_memory must be true or false"),
        ("run: {pattern: [3]}", "is no pattern"),
        ("run: {pattern: {wish: 3}}", "wish"),
        ("run: {pattern: 1.5}", r"[0, 1)"),
        (None, "There is no recipe"),
    ],
)
def test_wrong_recipe_file_raises_before_any_work(run, tmp_path, no_work, text, message):
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in one_error(run("prune", "-o", tmp_path / "out", "--recipe", file, code=2))
    assert not (tmp_path / "out").exists()


def test_sparsity_reads_shares_and_percentages(run, classifier, tmp_path):
    def table(*options):
        return run("prune", f"{classifier}:net", "--dry-run", *options).stdout

    (tmp_path / "text.yaml").write_text("run: {pattern: 30%}")
    (tmp_path / "number.yaml").write_text("run: {pattern: 0.3}")
    shown = table("--sparsity", "30%")
    assert "34 of 112" in shown
    for options in (("--sparsity", 0.3), ("--pattern", 0.3)):
        assert table(*options) == shown
    for name in ("text", "number"):
        assert "34 of 112" in table("--recipe", tmp_path / f"{name}.yaml")


def test_recipe_file_reads_plain_patterns_and_numbers(run, classifier, tmp_path):
    """YAML 1.1 takes 2:4 for the number 124 and 1e-3 for text."""
    (tmp_path / "mine.yaml").write_text(
        "damping: 1e-3\nrules: [{match: '2', pattern: 2:4}]\nrun:\n  pattern: 1:7\n"
        f"  data: {classifier}:batches\n"
    )  # fmt: skip
    run("prune", f"{classifier}:net", "-o", tmp_path / "out", "--recipe", tmp_path / "mine.yaml")
    report = read_report(tmp_path / "out" / "report.json")
    assert report.settings["recipe"]["damping"] == 1e-3
    assert [(row.name, row.asked) for row in report.audit] == [("0", 96), ("2", 24)]


def test_set_does_not_depend_on_the_order_of_options(run, classifier, tmp_path):
    out = tmp_path / "out"
    run(
        "prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", out, "--recipe", "one-shot",
        "--set", "rounds.finetune.lr=0.01", "--set", "rounds.schedule=cubic", "--set", "rounds.finetune.steps=2",
        "--set", "solver.block=4", "--rounds", 3, "--set", "rounds.finetune.optimizer=adam", "--solver", "sparsegpt",
    )  # fmt: skip
    recipe = read_report(out / "report.json").settings["recipe"]
    assert recipe["solver"] == {"name": "sparsegpt", "block": 4}
    assert (recipe["rounds"]["count"], recipe["rounds"]["schedule"]) == (3, "cubic")
    assert (recipe["rounds"]["finetune"]["lr"], recipe["rounds"]["finetune"]["steps"]) == (0.01, 2)
