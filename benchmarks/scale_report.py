"""Tables of scale.py, resume_kills.py and two_ranks.py, from their rows in results/scale.jsonl."""

from __future__ import annotations

from typing import Any

from rows import Row, Rows, stamp


def record(kind: str, key: str, processor_seconds: float, seed: int = 0, **values: Any) -> None:
    """Keep a measurement in place of the older one of the same key."""
    rows = Rows("scale", ("kind", "key"))
    rows.put({"kind": kind, "key": key, **values, "processor_seconds": processor_seconds, **stamp(seed)})


def tables(rows: list[Row]) -> str:
    """The results as a page of markdown."""
    rows = sorted(rows, key=lambda row: (row["kind"], row["key"]))
    parts = ["# Scale", _INTRODUCTION]
    for kind, section in _SECTIONS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        if chosen:
            parts.append(section(chosen))
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = (
    "`python benchmarks/scale.py` (`--model`, `--layers` and `--length` as the rows say), `resume_kills.py` and "
    "`two_ranks.py`. Peak memory is the anonymous resident memory of the whole process, looked at every 20 ms; "
    "predictions are those that the plan prints before the work. Seconds are of a small machine that does other "
    "work besides: upper bounds; processor time is that of all threads together."
)


def _table(head: str, body: list[list[str]]) -> str:
    """A table; the names of its columns are divided by " | "."""
    names = head.split(" | ")
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [names, ["---"] * len(names), *body])


def _models(rows: list[Row]) -> str:
    head = (
        "model | budget | device | peak, MB | predicted, MB | off by | minutes | of processor time | predicted | zeros"
    )
    body, notes = [], []
    for row in sorted(rows, key=lambda row: row["model_mb"]):
        name = f"{row['layers']} x {row['width']} wide, {row['model_mb']:,.0f} MB, {row['samples']} x {row['length']}"
        peak, predicted = row["peak_mb"], row["predicted_mb"]
        memory = [f"{peak:,.0f}", f"{predicted:,.0f}", f"{predicted / peak - 1:+.0%}"]
        minutes = [f"{row[name] / 60:.1f}" for name in ("seconds", "processor_seconds", "predicted_seconds")]
        body.append([name, row["budget"], row["device"], *memory, *minutes, f"{row['sparsity']:.4f}"])
        blocks = ", ".join(f"{one:.0f}" for one in row["block_seconds"])
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in row["parts"].items())
        killed = f"In {row['killed'] + 1} sittings, each killed but the last. " if row.get("killed") else ""
        notes.append(
            f"**{name}, {row['budget']}.** {killed}Blocks, seconds: {blocks}. Of one: {parts}. {row['expected']}"
        )
    return "\n\n".join(["## Block by block from files to files", _table(head, body), *notes])


def _kills(rows: list[Row]) -> str:
    head = "ranks | killed at work | resumed to the same bits | work, s | entries of the journal at the kills"
    body = []
    for row in rows:
        entries = f"{min(row['entries'])} to {max(row['entries'])} of {row['whole']}"
        body.append([str(row["ranks"]), str(row["kills"]), str(row["good"]), f"{row['seconds']:.1f}", entries])
    return "\n\n".join(["## Killed and resumed", _table(head, body)])


def _ranks(rows: list[Row]) -> str:
    head = "run | 1 rank, s | 2 ranks, s | times faster | share spent in sums and broadcasts | equal masks"
    body = []
    for row in rows:
        times = [f"{row['one']:.1f}", f"{row['two']:.1f}", f"{row['one'] / row['two']:.2f}"]
        body.append([row["key"], *times, f"{row['communication']:.1%}", f"{row['equal']:.4%}"])
    return "\n\n".join(["## Two ranks against one: gloo, one thread each, both warm", _table(head, body)])


def _solves(rows: list[Row]) -> str:
    head = "ranks | one rank, s | a layer for each rank, s | rows divided, s | times faster than one | equal masks"
    body = []
    for row in rows:
        times = [f"{row[name]:.1f}" for name in ("one", "layers", "rows")]
        body.append([str(row["ranks"]), *times, f"{row['one'] / row['rows']:.2f}", f"{row['equal']:.2%}"])
    title = "## Solves of one block of 1,024 columns: processor seconds of the rank that takes longest"
    return "\n\n".join([title, _table(head, body)])


_SECTIONS = {"model": _models, "kills": _kills, "ranks": _ranks, "solves": _solves}
