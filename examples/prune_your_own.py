"""Prune a network of your own, from Python and from the command line.

python examples/prune_your_own.py
iobs prune examples/prune_your_own.py:network --data examples/prune_your_own.py:batches -o pruned --sparsity 0.7
"""

import torch
from torch import nn

import iobs


def network() -> nn.Module:
    """What the command line calls to get the model; load your trained weights here."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).eval()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Calibration batches: inputs, and targets if a task loss is wanted."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(64, 64, generator=generator), torch.randint(0, 10, (64,), generator=generator)) for _ in range(8)
    ]


def main() -> None:
    model = network()
    report = iobs.prune(model, batches(), iobs.Unstructured(0.7), target="dense")
    for layer in report.best.layers:
        print(f"{layer.name:4} {layer.sparsity:.1%} zeros, output error {layer.error_heldout:.2e} on held-out samples")
    print(f"{report.loss_name}: {report.best.loss_heldout:.2e} on held-out samples")


if __name__ == "__main__":
    main()
