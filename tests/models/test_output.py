"""Output directories appear whole or not at all."""

import errno
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import prune_directory

from iobs import load_packed, models, save_packed
from iobs.core.outputs import beside, check_output, existing
from iobs.errors import OutputError
from iobs.models import output


def test_output_directory_refuses_a_non_empty_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(OutputError, match="not empty"), models.output_directory(tmp_path / "out"):
        pytest.fail("the body must not run")
    assert (tmp_path / "out" / "mine").read_text() == "x"
    with pytest.raises(OutputError, match="is a file"):
        check_output(tmp_path / "out" / "mine")
    with pytest.raises(OutputError, match="MB left"):
        check_output(tmp_path / "new", needed_bytes=1 << 60)
    check_output(tmp_path / "out", replaceable=("mine",))


@pytest.mark.parametrize("existing", [False, True])
def test_output_directory_appears_complete(tmp_path, existing):
    target = tmp_path / "deep" / "out"
    if existing:
        target.mkdir(parents=True)
    with models.output_directory(target) as temporary:
        (temporary / "file").write_text("x")
        assert not (target / "file").exists()
    assert (target / "file").read_text() == "x"
    assert [entry.name for entry in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "calibration.txt"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        OSError("cannot identify image file 'cat.jpg'"),
    ],
    ids=["missing file", "network", "library"],
)
def test_errors_of_the_data_are_not_explained_as_those_of_the_output(tmp_path, failure):
    with pytest.raises(OSError) as caught, models.output_directory(tmp_path / "out"):  # noqa: PT011
        raise failure
    assert caught.value is failure
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, OSError(errno.ENOSPC, "No space left on device")])
def test_output_directory_is_removed_on_failure(tmp_path, failure):
    expected = OutputError if isinstance(failure, OSError) else failure

    def write():
        with models.output_directory(tmp_path / "out") as temporary:
            (temporary / "file").write_text("x")
            raise failure

    with pytest.raises(expected):
        write()
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files by a Linux resource limit")
def test_output_directory_is_removed_if_the_disk_is_full(directory, tmp_path):
    import resource

    loaded, out = models.load(directory), tmp_path / "folder" / "out"
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal of a file that grows too large: writing fails as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    try:
        with pytest.raises(OutputError, match="could not be written"):
            loaded.save(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert not [*out.parent.iterdir()]


def test_every_path_expands_the_home_folder(directory, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert beside(Path("~/out"), "packed") == tmp_path / "out.packed"
    models.load("~/model").save("~/saved")
    assert save_packed("~/saved", "~/packed") == tmp_path / "packed"
    load_packed("~/packed")
    batches = [{"input_ids": torch.arange(3, 19).reshape(2, 8)}]
    options = {"solver": "magnitude", "checkpoint": "~/checkpoint"}
    prune_directory("~/model", "~/pruned", batches, **options)
    names = {"work", "model", "saved", "packed", "pruned", "checkpoint"}
    assert {entry.name for entry in tmp_path.iterdir()} == names
    assert not list((tmp_path / "work").iterdir())
    with pytest.raises(OutputError, match="not empty"):
        check_output(Path("~/saved"))


def test_output_directory_replaces_replaceable_files(tmp_path):
    for content in ("old", "new"):
        with models.output_directory(tmp_path / "out", replaceable=("file",)) as temporary:
            (temporary / "file").write_text(content)
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_output_directory_fills_the_target_of_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    for name in ("disk", "disk/new"):  # an existing target and a new one
        link = tmp_path / "link"
        link.symlink_to(tmp_path / name)
        with models.output_directory(link) as temporary:
            (temporary / "file").write_text("x")
            assert temporary.is_relative_to(tmp_path / "disk")  # the final move stays on one disk
        assert link.is_symlink()
        assert [entry.name for entry in (tmp_path / name).iterdir()] == ["file"]
        link.unlink()
        (tmp_path / name / "file").unlink()
    link.symlink_to(link)
    with pytest.raises(OutputError, match="is a file"):
        check_output(link)


def test_a_drive_that_does_not_exist_stands_for_its_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda place: False)
    assert existing(tmp_path) == Path(tmp_path.anchor)


def test_output_directory_fills_mount_points_from_within(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    monkeypatch.chdir(target)
    monkeypatch.setattr("os.path.ismount", lambda path: path == target)
    asked = []
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(place) or usage(place))
    (target / "lost+found").mkdir()
    before = target.stat().st_ino
    for content in ("old", "new"):
        with models.output_directory(Path("."), replaceable=("file", "folder")) as temporary:
            (temporary / "file").write_text(content)
            (temporary / "folder").mkdir()
    assert target.stat().st_ino == before
    assert {entry.name for entry in target.iterdir()} == {"file", "folder", "lost+found"}
    assert (target / "file").read_text() == "new"
    assert {*asked} == {target}


def test_two_outputs_into_one_directory_do_not_mix(tmp_path):
    def write():
        with models.output_directory(tmp_path) as slow:
            (slow / "file").write_text("slow")
            with models.output_directory(tmp_path) as quick:
                (quick / "file").write_text("quick")

    with pytest.raises(OutputError, match="not empty"):
        write()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "quick"


def test_output_directory_undoes_a_partial_move(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("old")
    rename = Path.rename

    def fails(path, target):
        if path.name == "second":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)

    def write():
        with models.output_directory(tmp_path, replaceable=("old",)) as temporary:
            for name in ("first", "second"):
                (temporary / name).write_text("new")

    with pytest.raises(OutputError, match="Input/output"):
        write()
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]


def test_output_directory_removes_leftovers_of_dead_processes(tmp_path):
    with output.output_directory(tmp_path / "out") as living:
        abandoned = tmp_path / ".out.abc.partial"
        abandoned.mkdir()
        (abandoned / "model.safetensors").write_bytes(b"half")
        other = tmp_path / ".other.abc.partial"
        other.mkdir()
        with output.output_directory(tmp_path / "out") as temporary:
            assert living.exists()
            assert not abandoned.exists()
            assert other.exists()
            (temporary / "file").write_text("x")
        shutil.rmtree(tmp_path / "out")
        (living / "file").write_text("y")
    assert (tmp_path / "out" / "file").read_text() == "y"


def test_full_disk_on_a_later_rank_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "current", lambda: SimpleNamespace(first=False, wait=lambda: None))
    with pytest.raises(OutputError, match="No space left"), output.output_of_ranks(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())
