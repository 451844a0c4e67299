"""Two processes against one, on the embedded language model: speed, the share spent in communication, equal masks.

    python benchmarks/two_ranks.py

Every process has one thread. Each prunes twice, and the second time counts, so that nothing is cold.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from scale_report import record

import iobs
from iobs.data import calibration_batches, open_source
from iobs.models import load
from iobs.pruning.runtime.ranks import Ranks, joined

STEP = iobs.FineTune(lr=1e-4, optimizer="adam", steps=10, loss="task")
RUNS: dict[str, iobs.Recipe] = {
    "one shot, SparseGPT": iobs.Recipe(solver="sparsegpt"),
    "one shot, ADMM": iobs.Recipe(solver="admm"),
    "three rounds, 10 Adam steps between": iobs.Recipe(solver="sparsegpt", rounds=iobs.Rounds(3, finetune=STEP)),
}


def run(name: str, folder: Path) -> None:
    """One rank: prune, note the seconds of the second time and those spent in sums and broadcasts, save the weights."""
    torch.set_num_threads(1)
    spent = 0.0

    def timed(function: Any) -> Any:
        def call(*args: Any) -> None:
            nonlocal spent
            began = time.perf_counter()
            function(*args)
            spent += time.perf_counter() - began

        return call

    with joined() as ranks:
        loaded = load()
        source = open_source([], "calibration", loaded)
        batches = calibration_batches(source, loaded, samples=64, length=256, seed=0, batch=4)
        with (
            mock.patch.object(Ranks, "sum", timed(Ranks.sum)),
            mock.patch.object(Ranks, "broadcast", timed(Ranks.broadcast)),
        ):
            for _ in range(2):
                model, spent = copy.deepcopy(loaded.module), 0.0
                ranks.wait()
                began, spent = time.perf_counter(), 0.0
                iobs.prune(model, batches, 0.5, RUNS[name], holdout=0.0)
                seconds = time.perf_counter() - began
        if ranks.first:
            (folder / "times.json").write_text(json.dumps([seconds, spent]))
            matrices = {key: value.contiguous() for key, value in model.state_dict().items() if value.ndim > 1}
            save_file({key: value.clone() for key, value in matrices.items()}, folder / "weights.safetensors")


def launched(name: str, ranks: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        shared["MASTER_PORT"] = str(free.getsockname()[1])
        free.close()
        command = [sys.executable, __file__, "--child", name, folder]
        processes = [
            subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}) for rank in range(ranks)
        ]
        assert all(process.wait() == 0 for process in processes)
        seconds, spent = json.loads((Path(folder) / "times.json").read_text())
        return seconds, spent, load_file(Path(folder) / "weights.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        return run(options.child[0], Path(options.child[1]))
    for name in RUNS:
        before = os.times()
        one, _, alone = launched(name, 1)
        two, spent, shared = launched(name, 2)
        same = sum(int(((alone[key] == 0) == (shared[key] == 0)).sum()) for key in alone)
        equal = same / sum(value.numel() for value in alone.values())
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        record("ranks", name, used, one=one, two=two, communication=spent / two, equal=equal)
        print(f"{name}: {one:.1f} s, {two:.1f} s on two ranks, {spent / two:.1%} in communication, {equal:.4%} equal")


if __name__ == "__main__":
    main()
