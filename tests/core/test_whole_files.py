"""Output files: complete, or as they were before."""

import os
import stat
from pathlib import Path

import pytest

from iobs.core.files import whole_file
from iobs.errors import OutputError


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device"), ValueError("shape")])
def test_old_file_stays_if_writing_fails(failure, tmp_path):
    file = tmp_path / "model.json"
    file.write_text("old")
    expected = OutputError if isinstance(failure, OSError) else type(failure)

    def fail():
        with whole_file(file) as written:
            written.write_text("ha")
            raise failure

    with pytest.raises(expected):
        fail()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_new_file_replaces_the_old_one_and_keeps_its_mode(tmp_path):
    file = tmp_path / "model.json"
    file.write_text("old")
    file.chmod(0o640)
    with whole_file(file) as written:
        written.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [file]


def test_file_of_a_link_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "real").mkdir()
    file, link = tmp_path / "real" / "model.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    with whole_file(link) as written:
        written.write_text("new")
    assert link.is_symlink()
    assert file.read_text() == "new"


def test_temporary_file_has_the_ending_of_the_output(tmp_path):
    with whole_file(tmp_path / ("x" * 250 + ".svg")) as written:
        assert written.suffix == ".svg"
        written.write_text("<svg/>")


def test_device_is_written_itself():
    with whole_file(Path(os.devnull)) as written:
        assert written == Path(os.devnull)


def test_folder_that_does_not_exist_is_one_error(tmp_path):
    with (
        pytest.raises(OutputError, match=r"Cannot write .*model.json: No such file"),
        whole_file(tmp_path / "absent" / "model.json") as written,
    ):
        written.write_text("new")
