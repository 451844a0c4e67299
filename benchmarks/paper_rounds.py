"""Algorithm 2 to the letter on ResNet-20: SparseGPT, one SGD step of 0.01 on the task loss, and again.

1,000 labelled calibration images drawn by seed from train10k, a tenth of them held out; all 22 convolution and linear
weights, batch-norm untouched. Every round's losses, its layers' errors against the dense weights, and its accuracy.

    python benchmarks/paper_rounds.py --data ../shared/data
"""

import argparse
import statistics
from pathlib import Path

import torch
from resnet20_oneshot import load_zoo

import iobs


class Accuracy(iobs.Callback):
    """Scores every round's projection."""

    def __init__(self, score) -> None:
        self.score, self.scores = score, []

    def on_round(self, record) -> None:
        self.scores.append(self.score())


def run(zoo, sparsity: float, seed: int, rounds: int):
    images, labels = zoo.cifar10("train10k", "resnet20")
    test = zoo.cifar10("test5000", "resnet20")
    drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:1000]
    model = zoo.resnet20()
    watch = Accuracy(lambda: zoo.accuracy(model, *test))
    batches = [(images[rows], labels[rows]) for rows in drawn.split(125)]
    report = iobs.prune(model, batches, sparsity, "paper", rounds=rounds, seed=seed, callbacks=[watch])
    return report, watch.scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.6])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/paper_rounds.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    zoo = load_zoo(options.data)
    lines = [
        "# Algorithm 2 to the letter, ResNet-20",
        "",
        f'`python benchmarks/paper_rounds.py`: `recipe="paper"` with {options.rounds} rounds, seeds {options.seeds}, '
        "means. Losses are the task loss; layer error is the mean over layers of the relative output error against "
        "the dense weights, on the layer's own calibration inputs. Accuracy on test5000 is shown, not used: the "
        "held-out column chooses.",
    ]
    for sparsity in options.sparsities:
        runs = []
        for seed in options.seeds:
            runs.append(run(zoo, sparsity, seed, options.rounds))
            heldout = [round(record.loss_heldout, 4) for record in runs[-1][0].rounds]
            print(sparsity, seed, heldout, runs[-1][1], flush=True)
        lines += [
            "",
            f"## {sparsity:.0%}",
            "",
            "| round | held-out loss | calibration loss | layer error against dense | accuracy |",
            "|---|---|---|---|---|",
        ]
        for index in range(options.rounds):
            records = [report.rounds[index] for report, _ in runs]
            errors = [statistics.mean(layer.error_dense for layer in record.layers) for record in records]
            lines.append(
                f"| {index + 1} | {statistics.mean(r.loss_heldout for r in records):.4f} "
                f"| {statistics.mean(r.loss_calibration for r in records):.4f} | {statistics.mean(errors):.4f} "
                f"| {statistics.mean(scores[index] for _, scores in runs):.2f} |"
            )
        best = [min(record.loss_heldout for record in report.rounds[1:]) for report, _ in runs]
        first = [report.rounds[0].loss_heldout for report, _ in runs]
        won = [report.best_round + 1 for report, _ in runs]
        lines += [
            "",
            f"Best later round against round 1, held-out: {statistics.mean(best):.4f} against "
            f"{statistics.mean(first):.4f}; rounds that won: {won}.",
        ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("\n".join(lines) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
