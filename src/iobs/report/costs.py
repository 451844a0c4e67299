"""Bytes of the parts of a packed directory, which are those of its files and no more, and their table."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from iobs.core.files import expanded
from iobs.core.formats import percent
from iobs.models.huggingface import is_tokenizer_file
from iobs.models.packed_files import PackedFile, files_with_codes
from iobs.report.tables import titled_table

_ROWS = 16  # groups of tensors in the table; those of fewer bytes are one row


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one name in all blocks.

    Attributes:
        name: with * for the numbers of blocks.
        tensors: how many.
        weights: their entries.
        parts: bytes by part.
    """

    name: str
    tensors: int
    weights: int
    parts: dict[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class PackedCosts:
    """Bytes of a packed directory.

    Attributes:
        groups: of tensors, those of most bytes first.
        metadata: bytes of names, shapes and sums in the files of weights.
        tokenizer: bytes of the files of the tokenizer.
        others: bytes of all other files, such as config.json.
    """

    groups: list[TensorGroup]
    metadata: int
    tokenizer: int
    others: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the parts of all tensors, and of the metadata: the files of weights."""
        total: Counter[str] = Counter()
        for group in self.groups:
            total.update(group.parts)
        return {**{part: size for part, size in total.items() if size}, "metadata": self.metadata}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the files of weights."""
        return sum(self.parts.values())

    @property
    def bytes(self) -> int:
        """Bytes of the directory."""
        return self.weight_bytes + self.tokenizer + self.others


def costs_of(path: str | Path) -> PackedCosts:
    """The costs of a packed directory without loss; every sum in its files is checked.

    Raises:
        ModelError: there is no such file, or one is damaged.
    """
    directory = expanded(path)
    files = files_with_codes(directory)
    groups: dict[str, TensorGroup] = {}
    metadata = 0
    for file in files:
        packed = PackedFile(file)
        parts = packed.parts()
        metadata += file.stat().st_size - sum(sum(sizes.values()) for sizes in parts.values())
        for name, sizes in parts.items():
            group = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            old = groups.get(group, TensorGroup(group, 0, 0, {}))
            total = Counter(old.parts) + Counter(sizes)
            entries = math.prod(packed.entries[name].shape)
            groups[group] = TensorGroup(group, old.tensors + 1, old.weights + entries, dict(total))
    rest = [file for file in directory.rglob("*") if file.is_file() and file not in files]
    tokenizer = sum(file.stat().st_size for file in rest if is_tokenizer_file(file))
    others = sum(file.stat().st_size for file in rest) - tokenizer
    return PackedCosts(sorted(groups.values(), key=lambda group: -group.bytes), metadata, tokenizer, others)


def costs_table(costs: PackedCosts) -> Table:
    """Table of groups of tensors (rows) by entries, bits and bytes."""
    table = titled_table("Bytes of the packed weights", ("tensors",), ("number", "entries", "bits each", "bytes"))
    rest = costs.groups[_ROWS:]
    rows = [(group.name, group.tensors, group.weights, group.bytes) for group in costs.groups[:_ROWS]]
    if rest:
        sums = (
            sum(each.tensors for each in rest),
            sum(each.weights for each in rest),
            sum(each.bytes for each in rest),
        )
        rows.append((f"{len(rest)} other names", *sums))
    for name, number, entries, count in rows:
        bits = f"{8 * count / entries:.2f}" if entries else "–"
        table.add_row(name, f"{number:,}", f"{entries:,}", bits, f"{count:,}")
    return table


def costs_lines(costs: PackedCosts) -> list[str]:
    """Lines with the bytes of each part."""
    total = costs.weight_bytes
    parts = sorted(costs.parts.items(), key=lambda item: -item[1])
    lines = [f"{total:,} bytes in the files of weights, every sum checked:"]
    lines += [f"  {part}: {size:,} ({percent(size / total, 2)})" for part, size in parts]
    return [*lines, f"beside them {costs.tokenizer:,} bytes of the tokenizer, and {costs.others:,} of other files"]


def costs_as_json(costs: PackedCosts) -> dict[str, object]:
    """The same for a program."""
    return {
        "weights": costs.weight_bytes,
        "parts": costs.parts,
        "tokenizer": costs.tokenizer,
        "others": costs.others,
        "tensors": {group.name: {"number": group.tensors, "parts": group.parts} for group in costs.groups},
    }
