"""Prune a network of your own, from Python and from the command line.

python examples/prune_your_own.py
iobs prune examples/prune_your_own.py:network --data examples/prune_your_own.py:batches -o pruned --sparsity 70%
"""

import torch
from torch import nn

import iobs


def network() -> nn.Module:
    """Build the model for the command line; load your trained weights here."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).eval()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Calibration data: inputs, and labels, which only the task loss needs."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 64, generator=generator), torch.randint(0, 10, (64,), generator=generator)) for _ in range(8)
    ]


def main() -> None:
    """Prune the model in place; keep the last layer dense."""
    model = network()
    report = iobs.prune(model, batches(), 0.7, "fast", rules=(iobs.Rule("4", dense=True),))
    print(report)
    for row in iobs.audit(model):
        print(f"{row.name}: {row.zeros:,} of {row.weights:,} weights are zero")


if __name__ == "__main__":
    main()
