"""Output directories, written complete or not at all, and the companions of weights that are copied there."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import ceil, floor
from pathlib import Path

from safetensors import SafetensorError

from iobs.core.files import expanded, weight_index
from iobs.errors import OutputError, UnusableOutputError
from iobs.pruning.runtime.ranks import current
from iobs.pruning.runtime.scratch import PARTIAL, is_partial, locked_folder, remove_abandoned


def check_output(directory: Path, needed_bytes: int = 0, replaceable: Collection[str] = ()) -> None:
    """Raise, before any work, unless an output directory can be written.

    Args:
        directory: the output directory.
        needed_bytes: approximate size of the output.
        replaceable: names that may already be in the directory and will be replaced.

    Raises:
        UnusableOutputError: the directory is not empty, it or its parent cannot be written, or the disk is too full.
    """
    _require_empty(directory, replaceable)
    target = _target(directory)
    place = target if target.is_dir() else _existing_parent(target)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UnusableOutputError(f"{place} cannot be written; choose another output directory.")
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise UnusableOutputError(
            f"{directory} needs about {ceil(needed_bytes / 1e6)} MB and {place} has {floor(free / 1e6)} MB left; "
            "free some space or choose another output directory."
        )


@contextmanager
def output_directory(directory: Path, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """Yield a temporary directory that becomes `directory` on success and is removed on failure or Ctrl-C.

    A new directory appears by one rename. An existing directory may be a mount point, the current directory or the
    target of a link, which cannot be renamed. The files are therefore moved into an existing directory at the end.
    Temporary directories that killed processes left for the same output are removed at the start; a running process
    keeps its directory locked.

    Args:
        directory: the output directory.
        replaceable: names that may already be in the directory and will be replaced.

    Raises:
        OutputError: as `check_output`, or the disk became full.
    """
    check_output(directory, replaceable=replaceable)
    target = _target(directory)
    place = target if target.is_dir() else target.parent
    with _explaining(directory):
        place.mkdir(parents=True, exist_ok=True)
        remove_abandoned(place, target.name)
    with temporary_directory(directory) as temporary, _explaining(directory):
        yield temporary
        _make_readable(temporary)
        if place == target:
            _require_empty(directory, replaceable)  # another process may have filled it meanwhile
            _move_up(temporary, target)
        else:
            temporary.rename(target)


@contextmanager
def temporary_directory(directory: Path) -> Iterator[Path]:
    """Yield a locked temporary directory on the disk of an output directory; it is removed at the end.

    Raises:
        OutputError: it cannot be created.
    """
    target = _target(directory)
    with ExitStack() as stack:
        with _explaining(directory):
            place = target if target.is_dir() else target.parent
            temporary = stack.enter_context(locked_folder(place, target.name))
        yield temporary


@contextmanager
def output_of_ranks(directory: Path, replaceable: Collection[str] = ()) -> Iterator[Path]:
    """Yield the directory of `output_directory` on the first rank, and a temporary directory on every other rank.

    Raises:
        OutputError: as `output_directory`.
        DistributedError: another rank is gone.
    """
    ranks = current()
    with ExitStack() as stack:
        folder = stack.enter_context(output_directory(directory, replaceable)) if ranks.first else None
        ranks.wait()  # the first rank has removed the directories of killed runs
        if folder is None:
            folder = stack.enter_context(temporary_directory(directory))
            stack.enter_context(_explaining(directory))
        yield folder


@contextmanager
def _explaining(directory: Path) -> Iterator[None]:
    """Convert failures of writing an output directory into one error."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OutputError) or _is_foreign(directory, error):
            raise
        raise _explained(directory, error) from error


def _is_foreign(directory: Path, error: OSError | SafetensorError) -> bool:
    """True if an error does not come from the output, but from data that a run reads while its output is open."""
    if isinstance(error, SafetensorError):
        return False
    if error.errno is None or isinstance(error, (ConnectionError, TimeoutError)):  # of a library, or of a network
        return True
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return False
    place, file = _target(directory), _target(Path(error.filename))
    parts = [part.name for part in (file, *file.parents)]
    written = any(name.startswith(f".{place.name}.") and name.endswith(PARTIAL) for name in parts)
    return not written and not file.is_relative_to(place)


def names_to_replace(directory: Path, marks: Collection[str], overwrite: bool) -> tuple[str, ...]:
    """Names in an output directory that may be replaced: everything if the user asks for it and iobs wrote it.

    Args:
        directory: the output directory.
        marks: shell patterns of file names; a directory with such a file was written by iobs.
        overwrite: the user allows an existing output.

    Raises:
        UnusableOutputError: the directory is not empty, and `overwrite` is False or no file has a name of `marks`; or
            it is a file, or cannot be read.
    """
    names = _contents(directory)
    if names and not any(fnmatch.filter(names, mark) for mark in marks):
        raise UnusableOutputError(
            f"{directory} is not empty and holds no {' and no '.join(marks)}, so iobs did not write it; remove it "
            "yourself or choose another output directory."
        )
    if names and not overwrite:
        raise UnusableOutputError(
            f"{directory} exists and is not empty; add --overwrite to replace it, or choose another output directory."
        )
    return tuple(names)


def destination(folder: Path) -> Path:
    """The output directory that a temporary folder of `output_directory` will become; any other folder is itself."""
    if not (folder.name.startswith(".") and folder.name.endswith(PARTIAL)):
        return folder
    inside = folder.name.startswith(f".{folder.parent.name}.")
    return folder.parent if inside else folder.parent / folder.name.removesuffix(PARTIAL)[1:].rpartition(".")[0]


def make_folder(output: Path) -> None:
    """Create the results folder before any work, and check that it can be written.

    Raises:
        UnusableOutputError: the folder cannot be created, or no file can be written in it.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        # Write a file instead of asking for permissions: these do not bind the superuser and miss read-only mounts.
        with tempfile.NamedTemporaryFile(dir=output, prefix=".iobs-"):
            pass
    except OSError as error:
        raise UnusableOutputError(
            f"{output} cannot be the folder of the results: no file can be written there ({error.strerror}); "
            "choose another output directory."
        ) from error


def beside(directory: Path, suffix: str) -> Path:
    """The path `directory.suffix` in the same parent folder; "." is resolved to its real name first."""
    here = Path(os.path.abspath(expanded(directory)))
    return here.with_name(f"{here.name}.{suffix}")


def holds(directory: Path, source: Path) -> bool:
    """True if a file or directory exists, and is an output directory or lies inside it."""
    output, path = _target(directory), _target(source)
    return path.exists() and (path == output or output in path.parents)


def _target(directory: Path) -> Path:
    """The absolute path of a directory, links resolved."""
    return Path(os.path.realpath(expanded(directory)))


def _require_empty(directory: Path, replaceable: Collection[str]) -> None:
    """Raise unless a directory holds nothing but replaceable names and abandoned temporary directories.

    Raises:
        UnusableOutputError: the directory holds something else, is a file, or cannot be read.
    """
    if set(_contents(directory)) - set(replaceable):
        raise UnusableOutputError(f"{directory} exists and is not empty; remove it or choose another output directory.")


def _contents(directory: Path) -> list[str]:
    """Names in a directory, except abandoned temporary directories; empty if it does not exist.

    Raises:
        UnusableOutputError: the directory is a file, or cannot be read.
    """
    target = _target(directory)
    if not target.is_dir():
        if target.exists() or target.is_symlink():  # still a link after resolving: a circular link
            raise UnusableOutputError(f"{directory} is a file; choose another output directory.")
        return []
    try:
        names = [entry.name for entry in target.iterdir() if not is_partial(entry, target.name)]
    except OSError as error:
        raise UnusableOutputError(f"{directory} cannot be read; choose another output directory.") from error
    if os.path.ismount(target):  # Path.is_mount is missing on Windows before Python 3.12
        names = [name for name in names if name != "lost+found"]  # part of every new ext file system
    return names


def _make_readable(temporary: Path) -> None:
    """Set the usual permissions: tempfile and safetensors create files that only their owner can read."""
    mask = _umask()
    with suppress(PermissionError):  # a file system without such modes
        temporary.chmod(0o777 & ~mask)
        for file in temporary.rglob("*"):
            file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)


def _move_up(temporary: Path, directory: Path) -> None:
    """Move the new files up into `directory`, replacing its replaceable entries; undo all moves if one fails."""
    new = sorted(temporary.iterdir())
    old = temporary / ".replaced"
    old.mkdir()
    moved: list[tuple[Path, Path]] = []
    try:
        for entry in [*directory.iterdir()]:
            if not is_partial(entry, directory.name) and entry.name != "lost+found":
                moved.append((entry, entry.rename(old / entry.name)))
        for entry in new:
            moved.append((entry, entry.rename(directory / entry.name)))
    except BaseException:
        for before, after in reversed(moved):
            after.rename(before)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _existing_parent(directory: Path) -> Path:
    for parent in directory.absolute().parents:
        if parent.exists():
            return parent
    return Path("/")


def _explained(directory: Path, error: Exception) -> OutputError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return OutputError(f"{directory} could not be written ({reason}); nothing was left behind.")


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".packed")
REPORTS = ("report.json", "report.html")  # describe the run that wrote a directory
# A key at the start of a line, with the list items or continuation lines that may follow it.
_LICENCE = re.compile(r"^license(?:_name|_link)?:.*(?:\n[ -].*)*", flags=re.MULTILINE)


def copy_companions(source: Path, target: Path, keep_index: bool = False, leave: Collection[str] = ()) -> None:
    """Copy all files and folders of a model directory except its weights.

    Not copied: hidden files, and folders that hold weights (another model, or another format of this model). A
    config.json in `target` is kept, because it describes the weights there. A file that cannot be copied only warns.

    Args:
        source: a model directory.
        target: an existing directory.
        keep_index: also copy the index of the weights, for weights that are written to shards of the same names.
        leave: names that are not copied.
    """
    for entry in source.iterdir():
        if entry.name in leave or _stays_behind(entry):
            continue
        try:
            if entry.is_file():
                _copy(entry, target)
            elif not _leads_to(entry, target) and not _holds_weights(entry):
                shutil.copytree(entry, target / entry.name, ignore=_left_of)
        except OSError as error:  # the computed weights are worth more than a companion file
            warnings.warn(f"{entry} could not be copied to {target}: {error}.", stacklevel=2)
    index = weight_index(source)
    if keep_index and index is not None:
        shutil.copyfile(index, target / index.name)


def with_licence(card: str, original: Path) -> str:
    """Add the licence of the original model card to a new card.

    Args:
        card: the new card; it starts with a YAML header between lines of dashes.
        original: README.md of the original model; it may be missing or state no licence.

    Returns:
        The new card, unchanged if no licence is found.
    """
    text = original.read_text(encoding="utf8", errors="replace") if original.is_file() else ""
    header = re.match(r"---\r?\n(.*?)\r?\n---", text, flags=re.DOTALL)
    if header is None:
        return card
    stated = _LICENCE.findall(header[1])
    return card.replace("---\n", "\n".join(["---", *stated, ""]), 1)


def _copy(file: Path, target: Path) -> None:
    if _is_weights(file) or (file.name == "config.json" and (target / file.name).exists()):
        return
    shutil.copyfile(file, target / file.name)


def _left_of(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if _stays_behind(Path(folder, name))]


def _stays_behind(path: Path) -> bool:
    """Check for entries that are never copied: hidden, caches, links to folders (may be circular), pipes, sockets."""
    if path.name.startswith(".") or path.name == "__pycache__":
        return True
    return path.is_symlink() if path.is_dir() else not path.is_file()


def _is_weights(file: Path) -> bool:
    return file.suffix in _WEIGHTS or file.name.endswith((".index.json", ".onnx_data"))


def _holds_weights(folder: Path) -> bool:
    return any(_is_weights(file) for file in folder.rglob("*"))


def _leads_to(folder: Path, target: Path) -> bool:
    """Check that the target is this folder, or lies inside it."""
    return target.resolve().is_relative_to(folder.resolve())
