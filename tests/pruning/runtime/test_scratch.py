"""Temporary folders for large files."""

import errno
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from iobs.errors import OutputError
from iobs.pruning.runtime import scratch
from iobs.pruning.runtime.scratch import scratch_folder


def test_scratch_folder_lies_in_the_given_folder_and_is_removed(tmp_path):
    with scratch_folder(tmp_path / "not" / "there", "out") as folder:
        assert folder.parent == tmp_path
        (folder / "file").write_text("x")
        with scratch_folder(tmp_path, "out") as other:  # the first folder is locked
            assert folder.is_dir()
            assert other != folder
    assert not [*tmp_path.iterdir()]


def test_scratch_folder_removes_those_of_killed_processes(tmp_path):
    (tmp_path / ".out.1234.partial").mkdir()
    (tmp_path / ".other.1234.partial").mkdir()
    with scratch_folder(tmp_path, "out"):
        assert not (tmp_path / ".out.1234.partial").exists()
    assert (tmp_path / ".other.1234.partial").is_dir()


def test_scratch_folder_takes_the_default_folder_if_the_given_one_cannot_be_written(tmp_path, monkeypatch):
    make, default = tempfile.mkdtemp, tmp_path / "default"
    default.mkdir()

    def refuse(**given):
        if Path(given["dir"]) != default:
            raise PermissionError(errno.EACCES, "Permission denied")
        return make(**given)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(default))
    with scratch_folder(tmp_path, "out") as folder:
        assert folder.parent == default


def test_folder_that_cannot_be_locked_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    tried = []

    def refuse(folder):
        tried.append(folder)
        assert len(tried) < 5, "it goes on forever"
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(scratch, "lock_folder", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="Too many open files"), scratch_folder(tmp_path, "out"):
        pytest.fail("there is no lock")
    assert not [*tmp_path.iterdir()]


def test_scratch_folder_asks_for_room_first(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with scratch_folder(tmp_path, needed_bytes=10**9):
        pass
    with (
        pytest.raises(OutputError, match=r"need about 1001 MB, and .* has 1000 MB left"),
        scratch_folder(tmp_path, needed_bytes=10**9 + 1),
    ):
        pytest.fail("there is no room")
    assert not [*tmp_path.iterdir()]


def test_disk_that_became_full_is_one_clear_error(tmp_path):
    with pytest.raises(OutputError, match="became full; free some space"), scratch_folder(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(OutputError, match="became full"), scratch_folder(tmp_path):
        raise full
    with pytest.raises(FileNotFoundError), scratch_folder(tmp_path):
        raise FileNotFoundError("another error")
