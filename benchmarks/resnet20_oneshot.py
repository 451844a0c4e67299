"""ResNet-20 on CIFAR-10 in one shot: every solver, uniform sparsity over all 22 convolution and linear weights.

1,000 calibration images drawn by seed from train10k, no labels, batch-norm untouched; accuracy on test5000.

    python benchmarks/resnet20_oneshot.py --data ../shared/data
"""

import argparse
import importlib.util
import statistics
import time
from pathlib import Path

import torch

import iobs

SPARSITIES = (0.5, 0.6, 0.7, 0.8)
SOLVERS = ("magnitude", "sparsegpt", "admm")


def load_zoo(folder: Path):
    spec = importlib.util.spec_from_file_location("zoo", folder / "zoo.py")
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    return zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/resnet20_oneshot.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    zoo = load_zoo(options.data)
    images, _ = zoo.cifar10("train10k", "resnet20")
    test = zoo.cifar10("test5000", "resnet20")
    lines = [
        "# ResNet-20, one shot, uniform sparsity",
        "",
        f"`python benchmarks/resnet20_oneshot.py`, seeds {options.seeds}, one thread; mean accuracy on test5000 "
        "(spread), dense 91.70. All 22 layers are pruned, the downsampling convolutions too. Seconds are the median of "
        "whole `iobs.prune` calls, with their measurements.",
        "",
        "| sparsity | " + " | ".join(SOLVERS) + " |",
        "|---" * (len(SOLVERS) + 1) + "|",
    ]
    for sparsity in SPARSITIES:
        cells = []
        for solver in SOLVERS:
            scores, seconds = [], []
            for seed in options.seeds:
                drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:1000]
                model = zoo.resnet20()
                began = time.perf_counter()
                batches = [images[rows] for rows in drawn.split(125)]
                report = iobs.prune(model, batches, sparsity, "one-shot", solver=solver, seed=seed)
                seconds.append(time.perf_counter() - began)
                assert len(report.audit) == 22
                scores.append(zoo.accuracy(model, *test))
                print(sparsity, solver, seed, scores[-1], round(seconds[-1], 1), flush=True)
            spread = f"({min(scores):.2f}-{max(scores):.2f})"
            cells.append(f"{statistics.mean(scores):.2f} {spread}, {statistics.median(seconds):.0f} s")
        lines.append(f"| {sparsity:.0%} | " + " | ".join(cells) + " |")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
