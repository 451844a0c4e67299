"""Weight files of a model directory, by the file rules of transformers."""

from __future__ import annotations

import json
from pathlib import Path

from iobs.errors import ModelError


def packed_hint(directory: Path) -> str:
    """Second half of an error message about missing weights: how to unpack them. Empty if no packed file is there."""
    return "; it is packed: run iobs pack --unpack first" if [*directory.glob("*.packed")] else ""


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
