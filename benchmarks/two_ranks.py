"""Several processes against one: speed, the share spent in communication, solve seconds of each rank, equal masks.

    python benchmarks/two_ranks.py                # two ranks, on the embedded language model
    python benchmarks/two_ranks.py --solves       # solves of one block of 1,024 columns, on one, two and four ranks

Every process has one thread. On the language model each prunes twice, and the second time counts, so that nothing is
cold. Solve seconds are processor time of a rank, which another load of the machine does not change.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from scale_report import record

import iobs
from iobs.core.quadratic import Quadratic
from iobs.data import calibration_batches, open_source
from iobs.models import load
from iobs.pruning.layerwise import projection
from iobs.pruning.runtime.ranks import Ranks, joined

STEP = iobs.FineTune(lr=1e-4, optimizer="adam", steps=10, loss="task")
RUNS: dict[str, iobs.Recipe] = {
    "one shot, SparseGPT": iobs.Recipe(solver="sparsegpt"),
    "one shot, ADMM": iobs.Recipe(solver="admm"),
    "three rounds, 10 Adam steps between": iobs.Recipe(solver="sparsegpt", rounds=iobs.Rounds(3, finetune=STEP)),
}

SOLVES = {"layers": False, "rows": True}  # ways of dividing the work: True if ranks divide the rows of a layer


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


def never(*args: Any) -> bool:
    """Divide the rows of no layer."""
    return False


def run_solves(divided: bool, folder: Path) -> None:
    """One rank: prune one block, and note the processor seconds of its solves; `divided`: ranks divide rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1, "num_attention_heads": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=16384)).eval()
    data = [{"input_ids": torch.randint(0, 16384, (4, 256))} for _ in range(4)]
    used = 0.0

    def timed(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal used
            began = time.process_time()
            try:
                return function(*args)
            finally:
                used += time.process_time() - began

        return call

    with joined() as ranks, ExitStack() as stack:
        for name in ("solve_layer", "solve_together"):
            stack.enter_context(mock.patch.object(projection, name, timed(getattr(projection, name))))
        if not divided:
            stack.enter_context(mock.patch.object(projection, "can_divide", never))
        iobs.solve(Quadratic.at(torch.randn(64, 256), torch.eye(256)), iobs.Unstructured(0.5))  # compiles
        iobs.prune(model, data, 0.5, "one-shot", holdout=0.0)
        spent = torch.zeros(ranks.size, dtype=torch.float64)
        spent[ranks.rank] = used
        ranks.sum(spent)
        if ranks.first:
            (folder / "times.json").write_text(json.dumps([max(spent.tolist()), spent.tolist()]))
            matrices = {key: value.contiguous() for key, value in model.state_dict().items() if "proj" in key}
            save_file({key: value.clone() for key, value in matrices.items()}, folder / "weights.safetensors")


def launched(name: str, ranks: int) -> tuple[float, Any, dict[str, torch.Tensor]]:
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


def solves() -> None:
    """Solve seconds of one block on several ranks, with a layer for each rank and with divided rows."""
    before = os.times()
    alone, _, reference = launched("rows", 1)

    def equal(weights: dict[str, torch.Tensor]) -> float:
        same = sum(int(((reference[key] == 0) == (weights[key] == 0)).sum()) for key in reference)
        return same / sum(value.numel() for value in reference.values())

    for ranks in (2, 4):
        found = {name: launched(name, ranks) for name in SOLVES}
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        values = {"one": alone, "layers": found["layers"][0], "rows": found["rows"][0], "by_rank": found["rows"][1]}
        masks = {"equal_layers": equal(found["layers"][2]), "equal": equal(found["rows"][2])}
        record("solves", f"{ranks} ranks", used, ranks=ranks, **masks, **values)
        print(f"{ranks} ranks: {values}, {masks}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--solves", action="store_true")
    options = parser.parse_args()
    if options.child and options.child[0] in SOLVES:
        return run_solves(SOLVES[options.child[0]], Path(options.child[1]))
    if options.child:
        return run(options.child[0], Path(options.child[1]))
    if options.solves:
        return solves()
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
