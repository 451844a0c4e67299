"""Threads on a busy machine: time of `iobs.prune` beside programs that keep the cores busy.

    python benchmarks/busy_machine.py [--loops 0 2] [--repetitions 3]

A convolutional network of 75 thousand weights and recipe "fast", in a new process for each measurement. All settings
take turns, so that each meets the machine's other work alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rows import Row, Rows, stamp

# Setting -> threads, variables of the environment, and the library that is imported first.
SETTINGS: dict[str, tuple[int, dict[str, str], str]] = {
    "one thread": (1, {}, "iobs"),
    "two threads": (2, {}, "iobs"),
    "two threads, torch imported first": (2, {}, "torch"),
    # GNU's default where no policy is set; iobs leaves a choice of the user as it is.
    "two threads that spin": (2, {"GOMP_SPINCOUNT": "300000"}, "iobs"),
}
CODE = """
import {first}
import time, iobs, torch
from iobs.pruning.recipe import BlockFit
from torch import nn
torch.set_num_threads({threads})

def run():
    torch.manual_seed(0)
    sizes = [(3, 16), (16, 32), (32, 48), (48, 64), (64, 48)]
    layers = [part for n, m in sizes for part in (nn.Conv2d(n, m, 3, padding=1), nn.BatchNorm2d(m), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)).eval()
    data = [(torch.randn(16, 3, 8, 8), torch.randint(10, (16,))) for _ in range(3)]
    wall, processor = time.perf_counter(), time.process_time()
    iobs.prune(model, data, 0.7, "fast", blocks=BlockFit(steps=10, lr=1e-3))
    return time.perf_counter() - wall, time.process_time() - processor

iobs.prune(nn.Linear(8, 8), [torch.randn(32, 8)], 0.5, "one-shot")
print(*run())
"""
LOOP = "while True: pass"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(setting: str) -> tuple[float, float]:
    """Seconds and processor seconds of one run."""
    threads, variables, first = SETTINGS[setting]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    command = [sys.executable, "-c", CODE.format(first=first, threads=threads)]
    result = subprocess.run(command, env=clean | variables, capture_output=True, text=True, check=True)
    wall, processor = map(float, result.stdout.split()[-2:])
    return wall, processor


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md: one table."""
    lines = [
        "# Threads on a busy machine",
        "",
        "Made by `python benchmarks/busy_machine.py`. A convolutional network of 75 thousand weights, recipe `fast` "
        "with 10 steps a block, on two cores; seconds, median. Ratios are to one thread beside the same loops.",
        "",
        "| busy loops beside it | setting | seconds | ratio | processor seconds |",
        "|---|---|---|---|---|",
    ]
    single = {row["loops"]: row["wall_seconds"] for row in rows if row["setting"] == "one thread"}
    for row in sorted(rows, key=lambda row: (row["loops"], [*SETTINGS].index(row["setting"]))):
        lines.append(
            f"| {row['loops']} | {row['setting']} | {row['wall_seconds']:.1f} "
            f"| {row['wall_seconds'] / single[row['loops']]:.2f} | {row['processor_seconds']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, nargs="*", default=[0, 2])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    rows = Rows("busy_machine", ("loops", "setting"), again=True)
    for loops in options.loops:
        times: dict[str, list[tuple[float, float]]] = {setting: [] for setting in SETTINGS}
        with busy(loops):
            time.sleep(1)
            for _ in range(options.repetitions):
                for setting, measured in times.items():
                    measured.append(measure(setting))
        for setting, measured in times.items():
            wall, processor = (statistics.median(values) for values in zip(*measured, strict=True))
            row = {"loops": loops, "setting": setting, "wall_seconds": wall, "processor_seconds": processor}
            rows.put(row | stamp(0))


if __name__ == "__main__":
    main()
