"""A small network and a small data set for the other examples."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def network() -> nn.Module:
    """Build the network; a pruned network is loaded into the same class."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def digits() -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits of 8 x 8 pixels, and their labels; the examples train on the first 1,200."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int) -> None:
    """Train with Adam on the first 1,200 digits."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        batch = torch.arange(64 * step, 64 * (step + 1)) % 1200
        optimizer.zero_grad()
        cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> str:
    """Accuracy on the last 597 digits, as text."""
    return f"{float((model.eval()(inputs[1200:]).argmax(1) == labels[1200:]).float().mean()):.1%}"
