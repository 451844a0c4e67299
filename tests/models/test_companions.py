"""Files beside the weights are copied along: tokenizers, licences, processors."""

import errno
import os
import shutil

import pytest

from iobs import models
from iobs.models.output import REPORTS, copy_companions, with_licence


def test_save_copies_the_files_beside_the_weights(directory, tmp_path):
    kept = [
        "LICENSE", "modeling_x.py", "preprocessor_config.json", "sentencepiece.bpe.model", "chat_templates/tool.jinja"
    ]  # fmt: skip
    left = [
        "pytorch_model.bin", "pytorch_model.bin.index.json", ".git/HEAD", "onnx/model.onnx", "onnx/config.json",
        "model-2.safetensors",
    ]  # fmt: skip
    for name in kept + left:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    loaded = models.load(directory)
    loaded.save(directory / "folder" / "out")  # a folder inside the folder that is copied
    loaded.save(tmp_path / "out")
    for out in (directory / "folder" / "out", tmp_path / "out"):
        assert all((out / name).read_text() == name for name in kept)
        assert not any((out / name).exists() for name in left)
        assert not (out / "folder").exists()


def test_with_licence_keeps_the_licence_of_the_model_card(tmp_path):
    card = "---\ntags:\n- sparse\n---\n\n# Sparse\n"
    assert with_licence(card, tmp_path / "README.md") == card
    (tmp_path / "README.md").write_text(
        "---\nlanguage: en\nlicense:\n- mit\nlicense_link: LICENSE\ntags: []\n---\nBig."
    )
    assert with_licence(card, tmp_path / "README.md").startswith(
        "---\nlicense:\n- mit\nlicense_link: LICENSE\ntags:\n- sparse\n---\n\n# Sparse"
    )


def test_copy_companions_skips_pipes_loops_and_reports(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "notes").mkdir(parents=True)
    target.mkdir()
    (source / "notes" / "plain.txt").write_text("kept")
    (source / "notes" / "round").symlink_to("..")
    (source / "notes" / "linked.txt").symlink_to("plain.txt")
    os.mkfifo(source / "notes" / "pipe")
    os.mkfifo(source / "pipe")
    (source / "report.json").write_text("{}")
    (source / "LICENSE").write_text("mine")
    copy_companions(source, target, leave=REPORTS)
    assert {entry.name for entry in target.iterdir()} == {"notes", "LICENSE"}
    assert {entry.name for entry in (target / "notes").iterdir()} == {"plain.txt", "linked.txt"}
    assert (target / "notes" / "linked.txt").read_text() == "kept"


def test_save_names_a_file_it_cannot_read_and_copies_the_rest(directory, tmp_path, monkeypatch):
    for name in ("private.json", "public.json"):
        (directory / name).write_text("{}")
    loaded, copyfile = models.load(directory), shutil.copyfile

    def copied(source, target, **options):
        if source.name == "private.json":  # simulated: the superuser can read every file
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        return copyfile(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", copied)
    with pytest.warns(UserWarning, match=r"private\.json could not be copied.*Permission denied"):
        loaded.save(tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"public.json", "model.safetensors", "tokenizer.json"} <= names
    assert "private.json" not in names
