"""Networks and images for the tables of vision models, and small stand-ins for both."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from iobs.errors import DataError
from paper_tables.experiment import Request
from paper_tables.rounds import Settings, calibration, stand_in_folder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from iobs.data import Batch

# Module, calibration batches, function that returns top-1 accuracy in per cent, and description of the origin.
Network: TypeAlias = "tuple[nn.Module, Sequence[Batch], Callable[[nn.Module], float], str]"


def on_images(settings: Settings, request: Request) -> Network:
    """The network of a table with the user's images; a timm network uses its own transform.

    Raises:
        DataError: --data or --eval-data is missing.
    """
    if not request.data or not request.eval_data:
        raise DataError(
            f"{settings.model} needs images: --data FOLDER to calibrate on (of ImageNet's training images) and "
            "--eval-data FOLDER to score on (its validation images, a folder a class); or run with --stand-in."
        )
    from dataclasses import replace

    from iobs.data import open_source
    from iobs.evaluate import evaluate
    from iobs.models import load

    loaded = load(settings.model)
    test = open_source([*request.eval_data], "evaluation", loaded)

    def accuracy(module: nn.Module) -> float:
        return evaluate(replace(loaded, module=module), test, limit=request.limit)["accuracy"]

    return loaded.module, calibration(loaded, settings, request, batch=16), accuracy, settings.model


def stand_in(kind: str, request: Request, samples: int) -> Network:
    """A small network with images: a real network from $IOBS_SHARED_DATA if set, else one that is trained here.

    Args:
        kind: "vit" or "mobilenet".
        request: its seed determines the network that is trained here.
        samples: number of calibration samples.
    """
    folder = stand_in_folder()
    if folder is None:
        return _made(kind, request, samples)
    spec = importlib.util.spec_from_file_location("zoo", folder / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    if kind == "vit":
        images, labels = zoo.cifar10("train10k", "vit")
        test, answers = zoo.cifar10("test5000", "vit")
        calibration = _batches(images[:samples], labels[:samples])
        scored = _accuracy_on(_batches(test[:1000], answers[:1000]))
        return zoo.vit_cifar(), calibration, scored, "a ViT of width 128, scored on 1,000 images of CIFAR-10"
    import torch

    images, labels = zoo.imagenet_samples()
    # The images are sorted by class: without shuffling, calibration and evaluation would see different classes.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(request.seed))
    images, labels = images[order], labels[order]
    scored = _accuracy_on(_batches(images[-200:], labels[-200:], 16))
    calibration = _batches(images[:samples], labels[:samples], 16)
    return zoo.mobilenet_v1(), calibration, scored, "MobileNetV1 of width 0.75, scored on 200 images"


def _accuracy_on(images: Sequence[Batch]) -> Callable[[nn.Module], float]:
    from iobs.evaluate import accuracy

    return lambda module: accuracy(module, images)


def _batches(images: Tensor, labels: Tensor, size: int = 64) -> list[Batch]:
    return [(images[start : start + size], labels[start : start + size]) for start in range(0, len(images), size)]


def _made(kind: str, request: Request, samples: int) -> Network:
    """A tiny network, trained briefly to classify noisy random patterns."""
    import torch
    from torch import nn
    from torch.nn import functional

    generator = torch.Generator().manual_seed(request.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)
        network = _tiny_transformer() if kind == "vit" else _tiny_convolutional()
    patterns = torch.randn(10, 3, 8, 8, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 10, (count,), generator=generator)
        return patterns[labels] + 1.5 * torch.randn(count, 3, 8, 8, generator=generator), labels

    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(150):
        images, labels = draw(64)
        optimizer.zero_grad()
        functional.cross_entropy(network(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert isinstance(network, nn.Module)
    scored = _accuracy_on(_batches(*draw(1000)))
    return network.eval(), _batches(*draw(samples)), scored, f"a tiny {kind} trained on made patterns"


def _tiny_convolutional() -> nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 32, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def _tiny_transformer() -> nn.Module:
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
            self.fc1, self.fc2, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

        def forward(self, hidden: Tensor) -> Tensor:
            query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
            hidden = hidden + self.proj(nn.functional.scaled_dot_product_attention(query, key, value))
            hidden = hidden + self.fc2(self.fc1(hidden).relu())
            return hidden

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.head = nn.Conv2d(3, 32, 2, 2), nn.Linear(32, 10)
            self.place = nn.Parameter(nn.init.normal_(nn.Parameter(self.patch.weight.new_empty(1, 16, 32)), std=0.5))
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, images: Tensor) -> Tensor:
            hidden = self.patch(images).flatten(2).transpose(1, 2) + self.place
            for block in self.blocks:
                hidden = block(hidden)
            scores: Tensor = self.head(hidden.mean(1))
            return scores

    return Transformer()
