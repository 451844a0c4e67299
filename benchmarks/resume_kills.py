"""Kill a pruning run at random moments, resume it every time, and compare the bits with an undisturbed run.

python benchmarks/resume_kills.py [--kills 25] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import iobs


def prune(output: Path, checkpoint: Path) -> None:
    """The run that is killed: three rounds with gradient steps on a small perceptron."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
    data = [(torch.randn(64, 64), torch.randint(0, 8, (64,))) for _ in range(4)]
    step = iobs.GradientStep(lr=1e-3, optimizer="adam", steps=5, loss="kl")
    polish = iobs.GradientStep(lr=1e-3, optimizer="adam", steps=10, loss="kl", parameters="all")
    iobs.prune(model, data, iobs.Unstructured(0.7), rounds=3, step=step, polish=polish, checkpoint=checkpoint)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, output)


def start(output: Path, checkpoint: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--child", str(output), str(checkpoint)])


def same(a: Path, b: Path) -> bool:
    left, right = load_file(a), load_file(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def killed_once(folder: Path, number: int, delay: float) -> tuple[bool, int, Path]:
    """Kill one run after so many seconds of work, resume it; returns whether the kill came in time, and the entries."""
    output, checkpoint = folder / f"{number}.safetensors", folder / f"{number}.checkpoint"
    child = start(output, checkpoint)
    while child.poll() is None and not checkpoint.exists():
        time.sleep(0.01)  # the moment is drawn over the run's work, not over the start of Python
    time.sleep(delay)
    in_time = child.poll() is None
    child.kill()
    child.wait()
    entries = len(list(checkpoint.glob("*.safetensors")))
    assert start(output, checkpoint).wait() == 0
    return in_time, entries, output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=2, type=Path)
    options = parser.parse_args()
    if options.child:
        return prune(*options.child)
    generator = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference, checkpoint = folder / "undisturbed.safetensors", folder / "undisturbed.checkpoint"
        child = start(reference, checkpoint)
        while not checkpoint.exists():
            time.sleep(0.01)
        began = time.perf_counter()
        assert child.wait() == 0
        length = time.perf_counter() - began
        good = in_time = 0
        moments = []
        for number in range(options.kills):
            hit, entries, output = killed_once(folder, number, generator.uniform(0, length))
            good += same(output, reference)
            in_time += hit
            moments.append(entries)
        print(f"{good} of {options.kills} resumed runs equal the undisturbed one bit for bit ({in_time} were killed")
        print(f"while they worked); entries in the journal at the kills: {sorted(moments)}")
        if good != options.kills:
            sys.exit(1)


if __name__ == "__main__":
    main()
