"""No written file holds an absolute path of the machine, except iobs.json, which names the user's own code."""

import shutil

import pytest

FEW = ("--samples", "8", "--seq-len", "32", "--solver", "magnitude", "--recipe", "one-shot", "--batch-size", "4")


def leaks(folder, *paths):
    return [
        file.name
        for file in folder.rglob("*")
        if file.is_file()
        and file.name != "iobs.json"
        and any(str(path).encode() in file.read_bytes() for path in paths)
    ]


@pytest.mark.parametrize("exists", [False, True])
def test_no_file_of_a_pruned_language_model_holds_an_absolute_path(run, small_model, tmp_path, exists):
    shutil.copytree(small_model, tmp_path / "base")
    text = tmp_path / "calibration.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    run("prune", tmp_path / "base", "--data", text, "-o", out, *FEW)
    assert not leaks(out, tmp_path)
    assert "- ../calibration.txt" in (out / "recipe.yaml").read_text()
    run("prune", tmp_path / "base", "--recipe", out / "recipe.yaml", "-o", tmp_path / "again")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_no_file_of_an_own_network_holds_an_absolute_path(run, classifier, tmp_path):
    run("prune", f"{classifier}:net", "--data", f"{classifier}:batches", "-o", tmp_path / "out", *FEW)
    assert not leaks(tmp_path / "out", tmp_path, classifier.parent)


def test_no_file_of_a_streamed_model_holds_an_absolute_path(run, small_model, tmp_path):
    shutil.copytree(small_model, tmp_path / "base")
    text = tmp_path / "calibration.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    options = ("--samples", "8", "--seq-len", "32", "--recipe", "one-shot", "--solver", "magnitude")
    run("prune", tmp_path / "base", "--low-memory", "--data", text, "-o", tmp_path / "out", *options)
    assert not leaks(tmp_path / "out", tmp_path)
