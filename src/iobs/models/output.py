"""Output directories, written complete or not at all, and the companions of weights that are copied there."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from iobs.core.files import weight_index
from iobs.core.outputs import PARTIAL, absolute, check_output, is_partial, require_empty
from iobs.errors import OutputError
from iobs.pruning.runtime.ranks import current
from iobs.pruning.runtime.scratch import locked_folder, remove_abandoned


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
    target = absolute(directory)
    place = target if target.is_dir() else target.parent
    with _explaining(directory):
        place.mkdir(parents=True, exist_ok=True)
        remove_abandoned(place, target.name)
    with temporary_directory(directory) as temporary, _explaining(directory):
        yield temporary
        _make_readable(temporary)
        if place == target:
            require_empty(directory, replaceable)  # another process may have filled it meanwhile
            _move_up(temporary, target)
        else:
            temporary.rename(target)


@contextmanager
def temporary_directory(directory: Path) -> Iterator[Path]:
    """Yield a locked temporary directory on the disk of an output directory; it is removed at the end.

    Raises:
        OutputError: it cannot be created.
    """
    target = absolute(directory)
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
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise OutputError(f"{directory} could not be written ({reason}); nothing was left behind.") from error


def _is_foreign(directory: Path, error: OSError | SafetensorError) -> bool:
    """True if an error does not come from the output, but from data that a run reads while its output is open."""
    if isinstance(error, SafetensorError):
        return False
    if error.errno is None or isinstance(error, (ConnectionError, TimeoutError)):  # of a library, or of a network
        return True
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return False
    place, file = absolute(directory), absolute(Path(error.filename))
    parts = [part.name for part in (file, *file.parents)]
    written = any(name.startswith(f".{place.name}.") and name.endswith(PARTIAL) for name in parts)
    return not written and not file.is_relative_to(place)


def destination(folder: Path) -> Path:
    """The output directory that a temporary folder of `output_directory` will become; any other folder is itself."""
    if not (folder.name.startswith(".") and folder.name.endswith(PARTIAL)):
        return folder
    inside = folder.name.startswith(f".{folder.parent.name}.")
    return folder.parent if inside else folder.parent / folder.name.removesuffix(PARTIAL)[1:].rpartition(".")[0]


def _make_readable(temporary: Path) -> None:
    """Set the usual permissions: tempfile and safetensors create files that only their owner can read."""
    mask = os.umask(0)  # which can only be read by a change
    os.umask(mask)
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


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".packed")
REPORTS = ("report.json", "report.html")  # describe the run that wrote a directory
# A key at the start of a line, with the list items or continuation lines that may follow it.
_LICENCE = re.compile(r"^license(?:_name|_link)?:.*(?:\n[ -].*)*", flags=re.MULTILINE)


def copy_companions(source: Path, target: Path, keep_index: bool = False, leave: Collection[str] = ()) -> None:
    """Copy all files and folders of a model directory except its weights.

    Not copied: hidden files, and folders that hold weights (another model, or another format of this model) or the
    target. A config.json in `target` is kept, because it describes the weights there. A file that cannot be copied
    only warns.

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
                described = entry.name == "config.json" and (target / entry.name).exists()
                if not described and not _is_weights(entry):
                    shutil.copyfile(entry, target / entry.name)
            elif not target.resolve().is_relative_to(entry.resolve()) and not any(map(_is_weights, entry.rglob("*"))):
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


def _left_of(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if _stays_behind(Path(folder, name))]


def _stays_behind(path: Path) -> bool:
    """Check for entries that are never copied: hidden, caches, links to folders (may be circular), pipes, sockets."""
    if path.name.startswith(".") or path.name == "__pycache__":
        return True
    return path.is_symlink() if path.is_dir() else not path.is_file()


def _is_weights(file: Path) -> bool:
    return file.suffix in _WEIGHTS or file.name.endswith((".index.json", ".onnx_data"))
