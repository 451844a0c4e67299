"""Write benchmarks/RESULTS.md and the pages in results/ from the rows there, and nothing else; also two pictures.

python benchmarks/assemble.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import blocks
import breadth
import busy_machine
import bytes_on_disk
import chita_report
import depth
import encoders
import equal_bytes
import equations
import exports
import grid_layers
import grid_report
import language_models
import layer_report
import layer_shapes
import networks_report
import paper_rounds
import passes
import peers
import proof_floors
import proofs
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
from picture import IMAGES
from rows import RESULTS, Row, read

PAGE = Path(__file__).resolve().parent / "RESULTS.md"


@dataclass(frozen=True)
class Section:
    """One page of tables: the file of its rows, its tables, what it answers, and what the first page shows of it.

    Args:
        rows: name of the file of rows, which is the name of the page too unless `page` says another.
        tables: the page of the rows.
        answers: the question that the page answers, for the list of contents.
        shown: (heading of the page, the same for the first page): parts that stand on the first page.
        page: name of the page.
    """

    rows: str
    tables: Callable[[list[Row]], str]
    answers: str
    shown: tuple[tuple[str, str], ...] = ()
    page: str = ""

    @property
    def name(self) -> str:
        return self.page or self.rows


# What a reader asks first comes first.
SECTIONS = (
    Section(
        "grid",
        grid_report.tables,
        "what the solver and each part of the recipe are worth",
        (
            ("ResNet-20, CIFAR-10, 80% zeros", "Solver and recipe: ResNet-20, 80 % zeros (accuracy, dense 91.70)"),
            (
                "Llama of 260 thousand parameters, stories, 50%",
                "Solver and recipe: a Llama, 50 % zeros (perplexity, dense 4.64)",
            ),
        ),
    ),
    Section(
        "language_models",
        language_models.tables,
        "a real language model, ours and peers",
        (("50 % zeros", "A language model of 135 million parameters, 50 % zeros (perplexity)"),),
    ),
    Section(
        "encoders",
        encoders.tables,
        "sentence encoders with zeros, ours and peers",
        (("all-MiniLM-L6-v2", "Sentence embeddings of MiniLM (error of cosines to the dense model's)"),),
    ),
    Section("networks", networks_report.tables, "accuracy against sparsity, ours and peers, on five networks"),
    Section("networks", chita_report.tables, "the strongest peer: its authors' figures beside ours", page="chita"),
    Section("resnet20_oneshot", resnet20_oneshot.tables, "the solvers alone, on one network"),
    Section("paper_rounds", paper_rounds.tables, "the paper's algorithm, round by round"),
    Section("small_networks", small_networks.tables, "seven small networks, a development set"),
    Section("blocks", blocks.tables, "targets that carry the residual, and block reconstruction"),
    Section("passes", passes.tables, "forward passes of the calibration data that a recipe costs"),
    Section(
        "layer_race",
        layer_report.tables,
        "error and time of a single layer, beside SparseGPT, ALPS and OBC",
        (("Geometric means over all cells", "One layer: error and time, geometric means over the cells of both"),),
    ),
    Section("layer_shapes", layer_shapes.tables, "time and memory of large layers"),
    Section("structured_layers", structured_layers.tables, "whole channels, neurons and heads of a single layer"),
    Section(
        "structured_networks",
        structured_networks.tables,
        "whole networks with fewer channels, neurons and heads",
        (("**ResNet-20** (accuracy)", "Fewer units: ResNet-20 (accuracy, dense 91.70)"),),
    ),
    Section("structured_speed", structured_speed.tables, "time of narrower networks in torch and ONNX Runtime"),
    Section("structured_families", structured_families.tables, "units of networks of every family"),
    Section("grid_layers", grid_layers.tables, "four-bit weights of a single layer, dense and sparse"),
    Section(
        "equal_bytes",
        equal_bytes.tables,
        "sparse and dense grids of whole networks at equal bytes",
        (
            ("ResNet-20, CIFAR-10", "Equal bits: ResNet-20 (accuracy, dense 91.70)"),
            ("Llama 260K", "Equal bits: the Llama (perplexity / dense)"),
        ),
    ),
    Section("bytes_on_disk", bytes_on_disk.tables, "quality at equal bytes of files, ours and of other libraries"),
    Section("exports", exports.tables, "files for other runtimes, read by them: bytes, zeros, outputs"),
    Section(
        "running",
        running.tables,
        "speed of pruned networks on a CPU, beside torch",
        (("Text of a Llama of 522 million parameters", "Speed: text of a Llama of 522 million weights, one thread"),),
    ),
    Section("peers", peers.tables, "tokens/s and memory against torch and the peers, with the loss of accuracy"),
    Section("breadth", breadth.tables, "tiny networks of every family: coverage and exactness"),
    Section("speakers", speakers.tables, "a trained LSTM, pruned gate by gate"),
    Section(
        "recovery",
        recovery_report.tables,
        "sparse regression beside abess, skscope and others",
        (
            ("n 200, d 500, no noise", "Sparse regression without noise (exact support / loss reached / time)"),
            ("With noise", "Sparse regression with noise (the same)"),
        ),
    ),
    Section(
        "proofs",
        proofs.tables,
        "proofs of the best k columns beside El0ps, OKRidge, l0bnb and SCIP",
        (("Value, gap and time", "Proofs of the best k columns, beside other solvers"),),
    ),
    Section("equations", equations.tables, "equations from data beside MIOSR, which calls Gurobi"),
    Section("proof_floors", proof_floors.tables, "how far any relaxation can prove a support"),
    Section("regression_race", regression_race_report.tables, "sparse regression beside six libraries, small to wide"),
    Section("small_regression", small_regression.tables, "time of small regressions beside abess"),
    Section("depth", depth.tables, "cost against the number of blocks"),
    Section("busy_machine", busy_machine.tables, "threads beside other programs"),
    Section(
        "scale",
        scale_report.tables,
        "models that do not fit into memory, kills, several processes",
        (("Block by block from files to files", "Block by block from files to files"),),
    ),
)

INTRODUCTION = """# Results

The tables that matter most; every other one is on a page of `results/`, listed at the end. Each page names the command
that makes its tables from rows in `benchmarks/results/*.jsonl`; each row names its commit, seed, processor seconds and
machine. `benchmarks/assemble.py` writes all pages from the rows alone.

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
  does; the first tables say what these steps are worth."""


def pages() -> dict[Path, str]:
    """The text of every page, by its file."""
    shown, contents, files = [], [], {}
    for section in SECTIONS:
        rows, old = read(section.rows), older(section.rows) if section.name == section.rows else ""
        if not (rows or old):
            continue
        body = section.tables(rows).strip()
        title = body.split("\n")[0].lstrip("# ")
        file = f"results/{section.name}.md"
        files[RESULTS / f"{section.name}.md"] = relative(f"{body}\n\n{old}".strip() + "\n")
        contents.append(f"- [{title}]({file}): {section.answers}")
        for start, heading in section.shown:
            shown.append(f"## {heading}\n\n{part(body, start)}\n\nFrom [{title}]({file}).")
    files[PAGE] = "\n\n".join([INTRODUCTION, *shown, "## All pages", "\n".join(contents)]) + "\n"
    return files


def part(body: str, start: str) -> str:
    """The lines below the first heading (or line in bold) that begins with `start`, up to the next one.

    Raises:
        ValueError: there is no such heading.
    """
    lines = body.split("\n")
    heads = [number for number, line in enumerate(lines) if line.startswith(("#", "**"))]
    for number in heads:
        if lines[number].lstrip("# ").startswith(start):
            return "\n".join(lines[number + 1 : next((later for later in heads if later > number), None)]).strip()
    raise ValueError(f"No heading begins with {start!r}.")


def relative(text: str) -> str:
    """The text of a section as a page of `results/`, where the pictures lie beside it."""
    return text.replace("](results/", "](")


def older(name: str) -> str:
    """Tables of a page that were made before rows were kept."""
    rows = [row for row in read("transcribed") if row["page"] == name]
    if not rows:
        return ""
    lines = ["## Older figures", "", "Transcribed from the page of the named commit; their raw rows were not kept."]
    for title, commit, seed, head in dict.fromkeys(
        (row["title"], row["commit"], row["seed"], tuple(row["head"])) for row in rows
    ):
        cells = [row["cells"] for row in rows if (row["title"], row["seed"], tuple(row["head"])) == (title, seed, head)]
        lines += ["", f"**{title}** (commit {commit}, seeds {seed})", ""]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        lines += [f"| {' | '.join(texts)} |" for texts in cells]
    return "\n".join(lines)


def main() -> None:
    layer_report.plot(read("layer_race"), RESULTS / "layer_race.png")
    for folder in (RESULTS, IMAGES):
        bytes_on_disk.plot(read("bytes_on_disk"), folder / "bytes_on_disk.png")
    for file, text in pages().items():
        file.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
