"""Algorithm 2 to the letter on ResNet-20: SparseGPT, one SGD step of 0.01 on the task loss, and again.

    python benchmarks/paper_rounds.py --data FOLDER [--quick] [--seeds 0 1 2] [--rounds 8]

1,000 labelled calibration images drawn by seed from train10k, a tenth of them held out; all 22 convolution and linear
weights, batch norm untouched. A row a run is added to results/paper_rounds.jsonl: every round's losses, its layers'
errors against the dense weights, and its accuracy.
"""

from __future__ import annotations

import statistics

import torch
from networks import NETWORKS
from rows import Row, Rows, measured, parser, require_data, stamp, warm_up

import iobs

KEYS = ("sparsity", "rounds", "seed")
SPARSITIES = (0.6, 0.5)


class Accuracy(iobs.Callback):
    """Scores every round's projection."""

    def __init__(self, score) -> None:
        self.score, self.scores = score, []

    def on_round(self, record) -> None:
        self.scores.append(self.score())


def run(case, sparsity: float, seed: int, rounds: int) -> Row:
    """One run as a row; the seconds include the scores of the rounds."""
    watch = Accuracy(lambda: case.score(case.module))
    with measured() as work:
        report = iobs.prune(case.module, case.batches, sparsity, "paper", rounds=rounds, seed=seed, callbacks=[watch])
    found = {
        "heldout": [record.loss_heldout for record in report.rounds],
        "calibration": [record.loss_calibration for record in report.rounds],
        "layer_error": [statistics.mean(one.error_dense for one in record.layers) for record in report.rounds],
        "accuracy": watch.scores,
        "best_round": report.best_round,
    }
    return {"sparsity": sparsity, "rounds": rounds, **found, **work.fields(), **stamp(seed)}


def tables(rows: list[Row]) -> str:
    """Every round's losses, means over seeds."""
    lines = [
        "# Algorithm 2 to the letter, ResNet-20",
        "",
        '`python benchmarks/paper_rounds.py` (with `--quick`: seed 0, 60 %): `recipe="paper"`, means over seeds. '
        "Losses are the task loss. The layer error is the mean over layers of the relative output error against the "
        "dense weights, on the layer's own calibration inputs. Accuracy on test5000 is shown, not used: the "
        "held-out column chooses.",
    ]
    for sparsity, rounds in sorted({(row["sparsity"], row["rounds"]) for row in rows}):
        lines += section([row for row in rows if (row["sparsity"], row["rounds"]) == (sparsity, rounds)])
    return "\n".join(lines) + "\n"


def section(runs: list[Row]) -> list[str]:
    """The table of one sparsity."""
    seeds, seconds = (sorted(row[name] for row in runs) for name in ("seed", "processor_seconds"))
    lines = ["", f"## {runs[0]['sparsity']:.0%}", "", f"Seeds {seeds}, {statistics.median(seconds):.0f} s a run.", ""]
    lines += ["| round | held-out loss | calibration loss | layer error against dense | accuracy |"]
    lines += ["|---|---|---|---|---|"]
    for index in range(runs[0]["rounds"]):
        values = [
            statistics.mean(row[name][index] for row in runs)
            for name in ("heldout", "calibration", "layer_error", "accuracy")
        ]
        lines.append(f"| {index + 1} | {' | '.join(f'{value:.4f}' for value in values[:3])} | {values[3]:.2f} |")
    best = statistics.mean(min(row["heldout"][1:]) for row in runs)
    first = statistics.mean(row["heldout"][0] for row in runs)
    won = [row["best_round"] + 1 for row in runs]
    return [*lines, "", f"Best later round against round 1, held-out: {best:.4f} against {first:.4f}; best: {won}."]


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--rounds", type=int, default=8)
    options = options_of.parse_args()
    torch.set_num_threads(1)
    warm_up(iobs.Recipe(solver="sparsegpt"))
    zoo, rows = require_data(options.data), Rows("paper_rounds", KEYS, options.again)
    for sparsity in SPARSITIES[:1] if options.quick else SPARSITIES:
        for seed in options.seeds or ([0] if options.quick else [0, 1, 2]):
            if not rows.has(sparsity=sparsity, rounds=options.rounds, seed=seed):
                rows.put(run(NETWORKS["resnet20"].load(zoo, options.data, seed), sparsity, seed, options.rounds))


if __name__ == "__main__":
    main()
