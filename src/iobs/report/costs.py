"""Table and lines of what the parts of a packed directory cost."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from iobs.core.formats import percent
from iobs.models.packed_costs import PackedCosts

_ROWS = 16  # groups of tensors in the table; those of fewer bytes are one row


def costs_table(costs: PackedCosts) -> Table:
    """Table of groups of tensors (rows) by entries, bits and bytes."""
    table = Table(title="Bytes of the packed weights", title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("tensors", overflow="fold")
    for name in ("number", "entries", "bits each", "bytes"):
        table.add_column(name, justify="right")
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
