"""Prune a network of your own, from Python and from the command line.

python examples/prune_your_own.py
iobs prune examples/prune_your_own.py:network -o pruned --sparsity 70% \\
    --data examples/prune_your_own.py:batches --eval-data examples/prune_your_own.py:unseen
"""

import digits
import torch
from torch import Tensor, nn

import iobs


def network() -> nn.Module:
    """Return the trained model. Here it is trained in a second; load your own weights instead."""
    torch.manual_seed(0)
    model = digits.network()
    digits.train(model, *digits.digits(), steps=300)
    return model.eval()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Calibration data: inputs, and labels for the accuracy in the report; labels may be left out."""
    inputs, labels = digits.digits()
    return list(zip(inputs[:1000].split(100), labels[:1000].split(100), strict=True))


def unseen() -> list[tuple[Tensor, Tensor]]:
    """Test data, for the score only."""
    inputs, labels = digits.digits()
    return [(inputs[1200:], labels[1200:])]


def main() -> None:
    """Prune the model in place; keep the last layer dense."""
    model = network()
    print("dense: accuracy", digits.accuracy(model, *digits.digits()))
    report = iobs.prune(model, batches(), 0.7, rules=(iobs.Rule("4", dense=True),))
    print(report)
    print("pruned: accuracy", digits.accuracy(model, *digits.digits()))
    for row in iobs.audit(model):
        print(f"{row.name}: {row.zeros:,} of {row.weights:,} weights are zero")


if __name__ == "__main__":
    main()
