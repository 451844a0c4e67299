"""An output that exists is refused before any work; --overwrite replaces one that iobs wrote."""

import shutil

import pytest
from checks import one_error
from short_options import ONE_SHOT

from iobs.cli import by_blocks, in_memory
from iobs.report import read_report


@pytest.fixture
def arguments(classifier, tmp_path):
    return (f"{classifier}:net", "--data", f"{classifier}:batches", *ONE_SHOT, "-o", tmp_path / "out")


def test_prune_replaces_an_earlier_output_only_if_asked(run, arguments, tmp_path, monkeypatch):
    out = tmp_path / "out"
    run("prune", *arguments)
    (out / "old.txt").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(in_memory, "prune_in_memory", lambda *_: pytest.fail("the work began"))
        assert "add --overwrite" in one_error(run("prune", *arguments, code=2))
    run("prune", *arguments, "--sparsity", "75%", "--overwrite")
    assert read_report(out / "report.json").sparsity == 0.75
    assert not (out / "old.txt").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine.py", "out"]


def test_overwrite_keeps_what_iobs_did_not_write(run, arguments, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    assert "iobs did not write it" in one_error(run("prune", *arguments, "--overwrite", code=2))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_failed_run_keeps_the_earlier_output(run, arguments, tmp_path, monkeypatch):
    run("prune", *arguments)
    with monkeypatch.context() as patch:
        patch.setattr("iobs.cli.running.write_report", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run("prune", *arguments, "--overwrite", "--sparsity", "0.75", code=130)
    assert read_report(tmp_path / "out" / "report.json").sparsity == 0.5


def test_overwrite_refuses_the_model_itself(run, arguments, tmp_path):
    run("prune", *arguments)
    out = tmp_path / "out"
    assert "MODEL itself" in run("prune", out, "-o", out, "--overwrite", code=2).stderr


def test_overwrite_refuses_a_folder_that_holds_the_model(run, arguments, tmp_path):
    run("prune", *arguments)
    out, inner = tmp_path / "out", tmp_path / "out" / "model"
    shutil.copytree(out, inner)
    assert "MODEL itself or holds it" in run("prune", inner, "-o", out, "--overwrite", code=2).stderr
    shutil.copy(tmp_path / "mine.py", inner)
    assert "holds it" in run("prune", f"{inner / 'mine.py'}:net", "-o", out, "--overwrite", code=2).stderr
    run("pack", inner, "-o", tmp_path / "out.packed")
    (tmp_path / "out.packed").rename(out / "packed")
    (out / "model.packed").touch()
    assert "holds it" in run("pack", out / "packed", "-o", out, "--overwrite", code=2).stderr
    assert (inner / "model.safetensors").is_file()


def test_stopped_run_is_mentioned_without_resume(run, arguments, tmp_path):
    (tmp_path / "out.checkpoint").mkdir()
    assert "with --resume" in run("prune", *arguments).stderr


def test_pack_replaces_a_packed_directory(run, arguments, tmp_path):
    run("prune", *arguments)
    out, packed = tmp_path / "out", tmp_path / "out.packed"
    run("pack", out)
    assert "add --overwrite" in one_error(run("pack", out, code=2))
    run("pack", out, "--overwrite")
    run("pack", "--unpack", packed)
    run("pack", "--unpack", packed, "--overwrite")
    assert "iobs did not write it" in one_error(run("pack", out, "-o", out, "--overwrite", code=2))


def test_option_undoes_low_memory_of_a_recipe_file(run, arguments, tmp_path, monkeypatch):
    run("prune", *arguments)
    file = tmp_path / "recipe.yaml"
    text = (tmp_path / "out" / "recipe.yaml").read_text()
    file.write_text(text.replace("low_memory: false", "low_memory: true"))
    monkeypatch.setattr(by_blocks, "prune_low_memory", lambda *_: pytest.fail("one block at a time"))
    run("prune", *arguments[:-1], tmp_path / "again", "--recipe", file, "--no-low-memory")
    assert (tmp_path / "again" / "recipe.yaml").read_text() == text
