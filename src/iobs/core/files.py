"""Paths as users write them, weight files of a model directory, and output files that are never half written."""

from __future__ import annotations

import base64
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from iobs.errors import ModelError, OutputError

_LONGEST_HEADER = 2**27


def expanded(path: str | Path) -> Path:
    """Expand "~" to the home folder; unchanged without such a folder, for which `Path.expanduser` raises."""
    return Path(os.path.expanduser(path))


PACKED = "iobs_packed"  # key in the metadata of packed safetensors files
JOINED_BYTES = 2**16  # most bytes of a tensor that a packed file joins with others, where nobody reads it by its name

ENTRY_BYTES = 90  # of a tensor of its own in the header of a file, about


def compressed_text(value: object) -> str:
    """Lists of names and numbers as a short text, of signs that JSON leaves as they are."""
    return base64.b85encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode("utf8"), 9)).decode("ascii")


def from_compressed_text(text: str) -> Any:
    """The value of `compressed_text`.

    Raises:
        ValueError: the text is damaged.
    """
    try:
        return json.loads(zlib.decompress(base64.b85decode(text)))
    except zlib.error as error:
        raise ValueError("a list of names is damaged") from error


def packed_hint(directory: Path) -> str:
    """Second half of an error message about missing weights: how to unpack them. Empty if no packed file is there."""
    return "; it is packed: run iobs pack --unpack first" if [*directory.glob("*.packed")] else ""


def read_header(file: Path) -> tuple[Any, int]:
    """The header of a safetensors file as it stands there, and its length.

    Raises:
        OSError, ValueError, RecursionError: the file cannot be read, or is no safetensors file.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("its header is too long")
        return json.loads(opened.read(length)), length


def is_packed_file(file: Path) -> bool:
    """True if a safetensors file is packed; False for files that are damaged or no safetensors files."""
    try:
        return PACKED in read_header(file)[0].get("__metadata__", {})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return False


def require_dense(file: Path) -> None:
    """Raise if a safetensors file is packed.

    Raises:
        ModelError: it is.
    """
    if is_packed_file(file):
        raise ModelError(f"{file.parent} is packed; run iobs pack --unpack first.")


def weight_index(directory: Path) -> Path | None:
    """The index of a sharded model. Returns None without an index, and if model.safetensors exists: it has priority."""
    index = directory / "model.safetensors.index.json"
    return index if index.is_file() and not (directory / "model.safetensors").is_file() else None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, in alphabetical order.

    These are model.safetensors if it exists, else the shards of the index, else every .safetensors file. Other
    .safetensors files beside the first two (from an earlier run, or in another format) are ignored.

    Raises:
        ModelError: the index is damaged, names a missing file, or names a file outside the directory.
    """
    whole, index = directory / "model.safetensors", weight_index(directory)
    if whole.is_file():
        return [whole]
    if index is None:
        return sorted(directory.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is damaged; copy it again.") from error
    if strange:
        raise ModelError(f"{index} names {strange[0]!r}, which lies outside {directory}; do not trust these files.")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        what = packed_hint(directory) or ", though the index of weights names it; copy it again"
        raise ModelError(f"{directory / missing[0]} is missing{what}.")
    return [directory / name for name in names]


# ---- Output files of one command: complete, or as they were before it


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yield a temporary path beside `file` that replaces it on success and is removed on failure or Ctrl-C.

    A device, a pipe and the standard output are yielded themselves, and so is a file whose folder takes no new files.

    Raises:
        OSError: the file cannot be written.
    """
    target = file.resolve()  # the file of a link is replaced, not the link
    beside = target.with_name(f".{target.stem[:100]}.{os.getpid()}{target.suffix}")  # savefig reads the suffix
    replaceable = file.is_file() and os.access(target.parent, os.W_OK) and file.parent != Path("/dev")
    if file.exists() and not replaceable:
        target = beside = file
    try:
        yield beside
        if beside != target:
            if target.exists():
                shutil.copymode(target, beside)
            beside.replace(target)
    except BaseException:
        if beside != target:
            with suppress(OSError):
                beside.unlink()
        raise


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """Yield the path of `replaced`.

    Raises:
        OutputError: the file cannot be written.
    """
    try:
        with replaced(file) as written:
            yield written
    except OSError as error:
        raise OutputError(f"Cannot write {file}: {error.strerror or error}.") from error
