"""Write benchmarks/RESULTS.md from the rows in results/, and nothing else; also the picture of the layer race.

python benchmarks/assemble.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import blocks
import breadth
import busy_machine
import chita_report
import equal_bytes
import exports
import grid_layers
import grid_report
import layer_report
import layer_shapes
import networks_report
import paper_rounds
import passes
import peers
import proof_floors
import recovery_report
import regression_race_report
import resnet20_oneshot
import running
import scale_report
import small_networks
import small_regression
import speakers
import structured_families
import structured_layers
import structured_networks
import structured_speed
from rows import RESULTS, Row, read

PAGE = Path(__file__).resolve().parent / "RESULTS.md"


@dataclass(frozen=True)
class Section:
    """One section: the file of its rows, its tables, and what it answers."""

    rows: str
    tables: Callable[[list[Row]], str]
    answers: str


# What a reader asks first comes first.
SECTIONS = (
    Section("grid", grid_report.tables, "what the solver and each part of the recipe are worth"),
    Section("networks", networks_report.tables, "accuracy against sparsity, ours and peers, on five networks"),
    Section("networks", chita_report.tables, "the strongest peer: its authors' figures beside ours"),
    Section("resnet20_oneshot", resnet20_oneshot.tables, "the solvers alone, on one network"),
    Section("paper_rounds", paper_rounds.tables, "the paper's algorithm, round by round"),
    Section("small_networks", small_networks.tables, "seven small networks, a development set"),
    Section("blocks", blocks.tables, "targets that carry the residual, and block reconstruction"),
    Section("passes", passes.tables, "forward passes of the calibration data that a recipe costs"),
    Section("layer_race", layer_report.tables, "error and time of a single layer, beside SparseGPT, ALPS and OBC"),
    Section("layer_shapes", layer_shapes.tables, "time and memory of large layers"),
    Section("structured_layers", structured_layers.tables, "whole channels, neurons and heads of a single layer"),
    Section("structured_networks", structured_networks.tables, "whole networks with fewer channels, neurons and heads"),
    Section("structured_speed", structured_speed.tables, "time of narrower networks in torch and ONNX Runtime"),
    Section("structured_families", structured_families.tables, "units of networks of every family"),
    Section("grid_layers", grid_layers.tables, "four-bit weights of a single layer, dense and sparse"),
    Section("equal_bytes", equal_bytes.tables, "sparse and dense grids of whole networks at equal bytes"),
    Section("exports", exports.tables, "files for other runtimes, read by them: bytes, zeros, outputs"),
    Section("running", running.tables, "speed of pruned networks on a CPU, beside torch"),
    Section("peers", peers.tables, "tokens/s and memory against torch and the peers, with the loss of accuracy"),
    Section("breadth", breadth.tables, "tiny networks of every family: coverage and exactness"),
    Section("speakers", speakers.tables, "a trained LSTM, pruned gate by gate"),
    Section("recovery", recovery_report.tables, "sparse regression beside abess, skscope and others"),
    Section("proof_floors", proof_floors.tables, "how far any relaxation can prove a support"),
    Section("regression_race", regression_race_report.tables, "sparse regression beside six libraries, small to wide"),
    Section("small_regression", small_regression.tables, "time of small regressions beside abess"),
    Section("busy_machine", busy_machine.tables, "threads beside other programs"),
    Section("scale", scale_report.tables, "models that do not fit into memory, kills, several processes"),
)

INTRODUCTION = """# Results

Each table is made by one command, which stands at its head, from rows in `benchmarks/results/*.jsonl`. Each row names
its commit, seed, processor seconds and machine. This page is written from the rows alone (`benchmarks/assemble.py`).

    make benchmarks-quick    # a part of every table, in under 30 minutes on two quiet cores
    make benchmarks          # everything; hours. Done rows are skipped, so it can be stopped and continued

- **Data.** Nothing was chosen on test data. All methods of a table see the same calibration samples, unless it says
  otherwise, and make the same number of zeros.
- **Seconds** are processor seconds of one thread. Rows from before these were recorded say so ("s wall", machine "not
  recorded"): their machines were small and shared, so trust ratios, not seconds.
- **Old tables.** Where a table was made before rows were kept, its old figures stand under "Older figures", transcribed
  with their commit, until the command has measured them again.
- **`fast` and `best`** are this library's recipes. `fast` takes some hundred gradient steps on single blocks, `best`
  some thousand (with the trials of learning rates up to 10,080), all on the calibration samples. No one-shot peer
  does; the first section says what these steps are worth."""


def page() -> str:
    """The whole page."""
    sections = [section for section in SECTIONS if read(section.rows) or older(section.rows)]
    bodies = [section.tables(read(section.rows)).strip() for section in sections]
    bodies = [joined(body, older(section.rows)) for section, body in zip(sections, bodies, strict=True)]
    titles = [body.split("\n")[0].lstrip("# ") for body in bodies]
    contents = [
        f"{number}. [{title}](#{anchor(title)}): {section.answers}"
        for number, (title, section) in enumerate(zip(titles, sections, strict=True), 1)
    ]
    lowered = ["\n".join(f"#{line}" if line.startswith("#") else line for line in body.split("\n")) for body in bodies]
    return "\n\n".join([INTRODUCTION, "## Contents", "\n".join(contents), *lowered]) + "\n"


def joined(body: str, old: str) -> str:
    """A section and its older figures, if there are any."""
    return f"{body}\n\n{old}" if old and not body.startswith(chita_report.INTRODUCTION[:9]) else body


def anchor(title: str) -> str:
    """The anchor of a title, as GitHub makes it."""
    return "".join(sign for sign in title.lower().replace(" ", "-") if sign.isalnum() or sign in "-_")


def older(name: str) -> str:
    """Tables of a page that were made before rows were kept."""
    rows = [row for row in read("transcribed") if row["page"] == name]
    if not rows:
        return ""
    lines = ["## Older figures", "", "Transcribed from the page of the named commit; their raw rows were not kept."]
    for title, commit, seed, head in dict.fromkeys(
        (row["title"], row["commit"], row["seed"], tuple(row["head"])) for row in rows
    ):
        own = [row for row in rows if (row["title"], row["seed"]) == (title, seed)]
        lines += ["", f"**{title}** (commit {commit}, seeds {seed})", ""]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [f"| {' | '.join(row['cells'])} |" for row in own if tuple(row["head"]) == head]
    return "\n".join(lines)


def main() -> None:
    layer_report.plot(read("layer_race"), RESULTS / "layer_race.png")
    PAGE.write_text(page(), encoding="utf8")


if __name__ == "__main__":
    main()
