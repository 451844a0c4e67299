"""Kill a pruning run at random moments, resume it every time, and compare the bits with an undisturbed run.

    python benchmarks/resume_kills.py [--kills 25] [--seed 0] [--ranks 1] [--recipe NAME]

Recipe "rounds": three rounds with gradient steps and fine-tuning of a perceptron. "blocks": growing masks, windows and
whole-network steps of a small Llama; "low-memory": the same from files. "fast": the preset of this name on the Llama,
with its curves, trials of rates and windows; "fast-low-memory": the same from files.

The moment is drawn uniformly over the work of an undisturbed run, which is timed first: from the first file of the
checkpoint to the last weights. A run that ends before its moment, because the machine was quicker, is drawn again and
counted. With several ranks all of them are killed. Runs are processes of their own, forked from one that has imported
what they need and has one thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from scale_report import record

import iobs
from iobs.models.streamed import StreamedStore
from iobs.pruning.recipe import BlockFit
from iobs.pruning.reconstruction import fits
from iobs.pruning.runtime.ranks import joined

FORKED = multiprocessing.get_context("fork")
Processes = list[multiprocessing.context.ForkProcess]


def prune(recipe: str, output: Path, checkpoint: Path) -> None:
    """The run that is killed; it writes its weights into `output` when it ends."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    RECIPES[recipe](output, checkpoint)


FIT = BlockFit(masks=2, between=4, steps=10, lr=1e-3, network_steps=30, network_lr=1e-4)
OPTIONS: Any = {"solver": "sparsegpt", "target": "residual", "blocks": FIT, "holdout": 0.25}


def llama() -> Any:
    """A random Llama of four blocks, and its calibration data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, vocab_size=128)).eval()
    return model, [{"input_ids": torch.randint(0, 128, (8, 32))} for _ in range(8)]


def prune_blocks(recipe: str, changes: Any, output: Path, checkpoint: Path) -> None:
    model, data = llama()
    with often_saved():
        iobs.prune(model, data, 0.6, recipe, checkpoint=checkpoint, **changes)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, output)


def prune_files(recipe: str, changes: Any, output: Path, checkpoint: Path) -> None:
    model, data = llama()
    folder = Path(tempfile.mkdtemp(dir=output.parent))
    model.save_pretrained(folder / "model")
    with often_saved(), StreamedStore.open(folder / "model", folder / "out") as store:
        iobs.prune(store, data, 0.6, recipe, checkpoint=checkpoint, **changes)
    (folder / "out" / "model.safetensors").rename(output)


def often_saved() -> Any:
    """States of whole-network steps every five steps: the runs are short."""
    return mock.patch.object(fits, "STEPS_BETWEEN_SAVES", 5)


def prune_rounds(output: Path, checkpoint: Path) -> None:
    layers = [module for _ in range(4) for module in (torch.nn.Linear(96, 96), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(96, 8))
    data = [(torch.randn(128, 96), torch.randint(0, 8, (128,))) for _ in range(4)]
    step = iobs.FineTune(lr=1e-3, optimizer="adam", steps=10, loss="kl")
    last = iobs.FineTune(lr=1e-3, optimizer="adam", steps=20, loss="kl", parameters="all")
    with joined() as ranks:
        rounds = iobs.Rounds(3, finetune=step)
        iobs.prune(model, data, 0.7, "best", rounds=rounds, finetune=last, checkpoint=checkpoint)
        if ranks.first:
            save_file({name: value.contiguous() for name, value in model.state_dict().items()}, output)


RECIPES: dict[str, Callable[[Path, Path], None]] = {
    "rounds": prune_rounds,
    "blocks": partial(prune_blocks, "one-shot", OPTIONS),
    "low-memory": partial(prune_files, "one-shot", OPTIONS),
    "fast": partial(prune_blocks, "fast", {}),
    "fast-low-memory": partial(prune_files, "fast", {}),
}


def rank(recipe: str, number: int, ranks: int, port: int, output: Path, checkpoint: Path) -> None:
    """One process of a run."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "RANK": str(number)}
    os.environ.update(shared)
    prune(recipe, output, checkpoint)


def start(recipe: str, output: Path, checkpoint: Path, ranks: int) -> Processes:
    """The processes of one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [FORKED.Process(target=rank, args=(recipe, i, ranks, port, output, checkpoint)) for i in range(ranks)]
    for process in processes:
        process.start()
    return processes


def wait(processes: Processes) -> None:
    for process in processes:
        process.join()
        assert process.exitcode == 0


def wait_for(file: Path, processes: Processes) -> None:
    """Wait for a file that the processes write.

    Raises:
        RuntimeError: a process failed before the file was there.
    """
    while not file.exists():
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"A run ended before it wrote {file.name}; its own output says why.")
        time.sleep(0.005)


def seconds(recipe: str, output: Path, checkpoint: Path, ranks: int) -> float:
    """An undisturbed run: how long it works after its first file."""
    processes = start(recipe, output, checkpoint, ranks)
    wait_for(checkpoint, processes)
    began = time.perf_counter()
    wait_for(output, processes)
    ended = time.perf_counter()
    wait(processes)
    return ended - began


def killed(recipe: str, output: Path, checkpoint: Path, ranks: int, delay: float) -> bool:
    """Kill one run after so many seconds of work; returns whether it was still at it."""
    processes = start(recipe, output, checkpoint, ranks)
    wait_for(checkpoint, processes)
    time.sleep(delay)
    working = not output.exists() and all(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    return working


def same(a: Path, b: Path) -> bool:
    left, right = load_file(a), load_file(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--recipe", choices=RECIPES, default="rounds")
    options = parser.parse_args()
    recipe = options.recipe
    if recipe != "rounds" and options.ranks > 1:
        parser.error("several ranks only with the recipe rounds")
    generator = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prune(
            recipe, folder / "import.safetensors", folder / "import.checkpoint"
        )  # whatever is imported late is now there
        reference = folder / "0.safetensors"
        length = statistics.median(
            seconds(recipe, folder / f"{i}.safetensors", folder / f"{i}.undisturbed", options.ranks) for i in range(3)
        )
        good = late = 0
        entries = []
        for number in range(options.kills):
            output = folder / f"killed {number}.safetensors"
            while True:
                checkpoint = Path(tempfile.mkdtemp(dir=folder)) / "checkpoint"
                if killed(recipe, output, checkpoint, options.ranks, generator.uniform(0, length)):
                    break
                output.unlink(missing_ok=True)
                late += 1
            entries.append(len(list(checkpoint.glob("*.safetensors"))))
            wait(start(recipe, output, checkpoint, options.ranks))
            good += same(output, reference)
            print(f"kill {number + 1}: {entries[-1]} entries, {good} equal so far", flush=True)
        whole = len(list((folder / "0.undisturbed").glob("*.safetensors")))
    found = {"kills": options.kills, "good": good, "seconds": length, "late": late, "entries": entries, "whole": whole}
    used = os.times()
    spent = used.user + used.system + used.children_user + used.children_system
    name = f"{options.ranks} ranks, {options.kills} kills" + (f", {recipe}" if recipe != "rounds" else "")
    record("kills", name, spent, options.seed, ranks=options.ranks, **found)
    print(f"{options.ranks} rank(s), seed {options.seed}: {good} of {options.kills} resumed runs equal the undisturbed")
    print(
        f"one bit for bit; all were killed at work, at a moment drawn over its {length:.1f} s ({late} draws came late"
    )
    print(f"and were drawn again); of {whole} entries the journals held {sorted(entries)}")
    if good != options.kills:
        sys.exit(1)


if __name__ == "__main__":
    main()
