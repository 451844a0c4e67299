"""Companion files of a model (tokenizer, code, licence, ...), copied to where its weights are written."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path

from iobs.core.files import weight_index

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
