"""Large layers: seconds, peak extra memory and the share of the machine's own matrix product, ours and SparseGPT's.

    python benchmarks/layer_shapes.py --shape 4096x4096                       CPU, one thread
    python benchmarks/layer_shapes.py --peers FOLDER --device cuda            4096x4096, 11008x4096, 4096x11008 on a GPU

Each solver runs in a process of its own, so that memory is its own: anonymous resident memory on a CPU, looked at every
20 ms, allocated memory on a GPU, the peak above what the finished problem takes. Random data; float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from rows import Row, Rows, stamp

from iobs.core.memory import resident
from iobs.pruning.runtime.memory import MemoryWatch

SHAPES = ["4096x4096", "11008x4096", "4096x11008"]
SOLVERS = {
    "SparseGPT": None,
    "ours sparsegpt": {"solver": "sparsegpt"},
    "ours admm fast": {"solver": "admm", "budget": "fast"},
    "ours admm": {"solver": "admm"},
}


def problem(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and Gram matrix; correlated inputs, half as many again as columns."""
    generator = torch.Generator(device=device).manual_seed(0)
    gram = torch.zeros(columns, columns, device=device)
    decay = torch.arange(1, columns + 1, device=device).rsqrt()
    for _ in range(6):
        samples = torch.randn(columns // 4, columns, generator=generator, device=device) * decay
        samples += samples.roll(1, 1)
        gram += samples.T @ samples / columns
    return torch.randn(rows, columns, generator=generator, device=device), gram


def allocated(memory: MemoryWatch) -> int:
    """Peak bytes: on a GPU its own alone."""
    on_gpu = memory.device.type == "cuda"
    return torch.cuda.max_memory_allocated() if on_gpu else memory.look()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_one(name: str, rows: int, columns: int, device: str, peers: Path | None, repeats: int, threads: int) -> dict:
    """Least seconds of the repeats, and the peak above the problem of the first run."""
    import iobs

    torch.set_num_threads(threads)
    options = SOLVERS[name]
    if options is None:
        from layer_peers import Peers

        assert peers is not None
        theirs = Peers(peers, device)
    else:  # compile on a small problem
        weight, gram = problem(64, 256, device)
        iobs.solve(iobs.Quadratic.at(weight, gram), iobs.Unstructured(0.5), damping=0.01, **options)
    weight, gram = problem(rows, columns, device)
    before = torch.cuda.memory_allocated() if device == "cuda" else resident()
    memory = MemoryWatch(torch.device(device))
    seconds, peak, started = [], 0, time.process_time()
    for repeat in range(repeats):
        wait(device)
        began = time.perf_counter() if device == "cuda" else time.process_time()
        with nullcontext() if device == "cuda" else memory.watching():
            if options is None:
                theirs.sparsegpt(weight, gram, 0.5, None)
            else:
                iobs.solve(iobs.Quadratic.at(weight, gram), iobs.Unstructured(0.5), damping=0.01, **options)
            wait(device)
        seconds.append((time.perf_counter() if device == "cuda" else time.process_time()) - began)
        peak = peak if repeat else allocated(memory) - before
    return {"seconds": min(seconds), "peak": peak, "processor_seconds": time.process_time() - started}


def product_rate(size: int, device: str) -> float:
    """Flops a second of a square float32 matrix product."""
    a = torch.randn(size, size, device=device)
    a @ a
    best = float("inf")
    for _ in range(3):
        wait(device)
        began = time.perf_counter() if device == "cuda" else time.process_time()
        a @ a
        wait(device)
        best = min(best, (time.perf_counter() if device == "cuda" else time.process_time()) - began)
    return 2 * size**3 / best


def race_shapes(device: str, peers: Path | None, shapes: list[str], repeats: int, threads: int, rows: Rows) -> None:
    """A row a shape and solver."""
    torch.set_num_threads(threads)
    rate = product_rate(4096 if device == "cuda" else 2048, device)
    unit = "GPU" if device == "cuda" else f"CPU, {threads} thread" + "s" * (threads > 1)
    here = [name for name, solver in SOLVERS.items() if solver is not None or peers is not None]
    for shape in shapes:
        key = {"shape": shape, "unit": unit}
        for name in rows.unmeasured(here, **key):
            found = _in_own_process(name, shape, device, peers, repeats, threads)
            rows.put({**key, "solver": name, **found, "product_rate": rate, **stamp(0)})


def tables(rows: list[Row]) -> str:
    """Seconds and memory by shape."""
    lines = [
        "# Large layers",
        "",
        "`python benchmarks/layer_shapes.py --shape 4096x4096`, peers beside it with `--peers FOLDER` (with `--quick`: "
        "1024x1024). Sparsity 0.5. The flop floor is that of SparseGPT, d^3/3 + rows d^2, at the speed of a float32 "
        "matrix product on the same machine. Peak memory is that above the finished problem.",
    ]
    for shape, unit in dict.fromkeys((row["shape"], row["unit"]) for row in rows):
        lines += ["", f"## {shape}, {unit}", ""]
        lines += ["| solver | seconds | x floor | peak extra memory, MB | in rows x columns buffers |"]
        lines += ["|---|---|---|---|---|"]
        count, columns = map(int, shape.split("x"))
        for row in (row for row in rows if (row["shape"], row["unit"]) == (shape, unit)):
            floor = (columns**3 / 3 + count * columns**2) / row["product_rate"]
            seconds = [f"{row['seconds']:.3f}", f"{row['seconds'] / floor:.2f}"]
            memory = [f"{row['peak'] / 1e6:.0f}", f"{row['peak'] / (4 * count * columns):.1f}"]
            lines.append(f"| {row['solver']} | {' | '.join([*seconds, *memory])} |")
    return "\n".join(lines) + "\n"


def _in_own_process(name: str, shape: str, device: str, peers: Path | None, repeats: int, threads: int) -> dict:
    command = [sys.executable, __file__, "--one", name, "--shape", shape, "--device", device]
    command += ["--repeats", str(repeats), "--threads", str(threads)]
    command += ["--peers", str(peers)] if peers else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", help="rows x columns; all three shapes if not given")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the shape 1024x1024")
    parser.add_argument("--again", action="store_true", help="measure rows of other commits anew")
    parser.add_argument("--one", choices=list(SOLVERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    usual = ["1024x1024"] if arguments.quick else SHAPES
    shapes = [arguments.shape] if arguments.shape else usual
    common = (arguments.device, arguments.peers)
    if arguments.one:
        rows, columns = map(int, shapes[0].split("x"))
        print(json.dumps(run_one(arguments.one, rows, columns, *common, arguments.repeats, arguments.threads)))
        return
    rows = Rows("layer_shapes", ("shape", "unit", "solver"), arguments.again)
    race_shapes(*common, shapes, arguments.repeats, arguments.threads, rows)


if __name__ == "__main__":
    main()
