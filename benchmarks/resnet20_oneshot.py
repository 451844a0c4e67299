"""ResNet-20 on CIFAR-10 in one shot: three solvers, the same sparsity in all 22 convolution and linear weights.

    python benchmarks/resnet20_oneshot.py --data FOLDER [--quick] [--seeds 0 1 2]

1,000 calibration images drawn by seed from train10k, no labels, batch norm untouched; accuracy on test5000. A row a run
is added to results/resnet20_oneshot.jsonl.
"""

from __future__ import annotations

import statistics

import torch
from networks import NETWORKS
from rows import Row, Rows, measured, parser, require_data, stamp, warm_up

import iobs

KEYS = ("solver", "sparsity", "seed")
SPARSITIES = (0.8, 0.5, 0.6, 0.7)
SOLVERS = ("magnitude", "sparsegpt", "admm")


def run(case, solver: str, sparsity: float, seed: int) -> Row:
    """One run as a row."""
    with measured() as work:
        report = iobs.prune(case.module, case.batches, sparsity, iobs.Recipe(solver=solver), seed=seed)
    assert len(report.audit) == 22
    score = {"score": case.score(case.module), "zeros": report.sparsity}
    return {"solver": solver, "sparsity": sparsity, **score, **work.fields(), **stamp(seed)}


def tables(rows: list[Row]) -> str:
    """Accuracy by solver and sparsity."""
    lines = [
        "# ResNet-20, one shot, uniform sparsity",
        "",
        "`python benchmarks/resnet20_oneshot.py` (with `--quick`: seed 0, 80 %). All 22 layers are pruned to the same "
        "sparsity, the downsampling convolutions too, each once, with its own weights as target. Mean accuracy on "
        "test5000 (lowest to highest, number of seeds), processor seconds; dense 91.70.",
        "",
        f"| sparsity | {' | '.join(SOLVERS)} |",
        "|---" * (len(SOLVERS) + 1) + "|",
    ]
    for sparsity in sorted({row["sparsity"] for row in rows}):
        found = [[row for row in rows if (row["solver"], row["sparsity"]) == (solver, sparsity)] for solver in SOLVERS]
        lines.append(f"| {sparsity:.0%} | {' | '.join(cell(runs) for runs in found)} |")
    return "\n".join(lines) + "\n"


def cell(runs: list[Row]) -> str:
    """Mean, spread and seconds."""
    if not runs:
        return ""
    scores, seconds = ([row[name] for row in runs] for name in ("score", "processor_seconds"))
    spread = f"{min(scores):.2f}-{max(scores):.2f}, " if len(runs) > 1 else ""
    return f"{statistics.mean(scores):.2f} ({spread}{len(runs)}), {statistics.median(seconds):.0f} s"


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    warm_up(*(iobs.Recipe(solver=solver) for solver in SOLVERS))
    zoo, rows = require_data(options.data), Rows("resnet20_oneshot", KEYS, options.again)
    for sparsity in SPARSITIES[:1] if options.quick else SPARSITIES:
        for solver in SOLVERS:
            for seed in options.seeds or ([0] if options.quick else [0, 1, 2]):
                if not rows.has(solver=solver, sparsity=sparsity, seed=seed):
                    rows.put(run(NETWORKS["resnet20"].load(zoo, options.data, seed), solver, sparsity, seed))


if __name__ == "__main__":
    main()
