"""What lies in a model directory beside the weights: it goes along to wherever the weights are written."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path

from iobs.prune.audit import weight_index

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".packed")
REPORTS = ("report.json", "report.html")  # of what was pruned into a directory
# A key at the beginning of a line, and the list that may follow it on lines of its own.
_LICENCE = re.compile(r"^license(?:_name|_link)?:.*(?:\n[ -].*)*", flags=re.MULTILINE)


def copy_companions(source: Path, target: Path, keep_index: bool = False, leave: Collection[str] = ()) -> None:
    """Copy all but the weights: tokenizer, code, licence, templates, whatever the format of tomorrow brings.

    Hidden files and folders with weights of their own (another model, or another format of this one) stay behind. A
    config.json that `target` has already stays too: it describes the weights that were written there.

    Args:
        source: a model directory.
        target: an existing directory.
        keep_index: also copy the index of the weights, if they have one: they are written under the same names.
        leave: names that stay behind.
    """
    for entry in source.iterdir():
        if entry.name in leave or _stays_behind(entry):
            continue
        try:
            if entry.is_file():
                _copy(entry, target)
            elif not _leads_to(entry, target) and not _holds_weights(entry):
                shutil.copytree(entry, target / entry.name, ignore=_left_of)
        except OSError as error:  # what was computed is worth more than what lies beside it
            warnings.warn(f"{entry} could not be copied to {target}: {error}.", stacklevel=2)
    index = weight_index(source)
    if keep_index and index is not None:
        shutil.copyfile(index, target / index.name)


def with_licence(card: str, original: Path) -> str:
    """A model card with the licence that another card states.

    Args:
        card: a card that starts with a header between lines of dashes.
        original: the README.md that may state a licence; it need not exist.
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
    """Hidden entries, links to folders (which may lead round in a circle), pipes and the like."""
    if path.name.startswith(".") or path.name == "__pycache__":
        return True
    return path.is_symlink() if path.is_dir() else not path.is_file()


def _is_weights(file: Path) -> bool:
    return file.suffix in _WEIGHTS or file.name.endswith((".index.json", ".onnx_data"))


def _holds_weights(folder: Path) -> bool:
    return any(_is_weights(file) for file in folder.rglob("*"))


def _leads_to(folder: Path, target: Path) -> bool:
    """Whether the target is that folder, or lies somewhere inside it."""
    return target.resolve().is_relative_to(folder.resolve())
