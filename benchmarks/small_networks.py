"""Small networks of seven kinds, trained here on scikit-learn's digits, by every method.

    python benchmarks/small_networks.py [--networks mixer ...] [--methods best ...] [--sparsity 0.9] [--seeds 0 1 2]

Needs no files beside this folder. A thousand digits train the networks; half of those, drawn by seed, calibrate; the
other 797 score. A row a run is added to results/small_networks.jsonl, and runs that have a row are skipped.
"""

from __future__ import annotations

import statistics

import torch
from networks import OURS, PEERS, drawn
from rows import Row, Rows, measured, parser, stamp, warm_up
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import iobs

KEYS = ("network", "method", "sparsity", "seed")
CLASSES, SIDE = 10, 8
TRAINING, CALIBRATION, BATCH = 1000, 500, 50
EPOCHS, RATE = 40, 3e-3
METHODS = (
    "best",
    "fast",
    "best without blocks",
    "fast without blocks",
    "Algorithm 2 to the letter",
    "SparseGPT",
    *PEERS,
)
LONG = ("best", "best without blocks", "CHITA, searched mask", "CHITA, 15 stages")


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first_norm, self.second_norm = (nn.GroupNorm(4, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.gelu(self.first_norm(self.first(x)))
        return functional.gelu(x + self.second_norm(self.second(inner)))


class Recurrent(nn.Module):
    """An image read row by row; the recurrent cell stays dense, what is before and after it is pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Linear(SIDE, 48), nn.GRU(48, 48, batch_first=True)
        self.head = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(functional.relu(self.embed(x[:, 0])))
        return self.head(states[:, -1])


class Attentive(nn.Module):
    """A vision transformer of 2 x 2 patches, norms first."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, (SIDE // 2) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).mT + self.places).mean(1))


class Mixer(nn.Module):
    """Perceptrons over places and over channels by turns."""

    def __init__(self, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        places = (SIDE // 2) ** 2
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.over_places = nn.ModuleList(self._perceptron(places) for _ in range(depth))
        self.over_channels = nn.ModuleList(self._perceptron(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    @staticmethod
    def _perceptron(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for index, (places, channels) in enumerate(zip(self.over_places, self.over_channels, strict=True)):
            x = x + places(self.norms[2 * index](x).mT).mT
            x = x + channels(self.norms[2 * index + 1](x))
        return self.head(x.mean(1))


def plain(width: int = 16) -> nn.Module:
    """Convolutions with batch norm and pooling between, then a perceptron with dropout."""
    stages = [
        layer
        for inputs, outputs in ((1, width), (width, 2 * width), (2 * width, 2 * width))
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))
    ]
    head = (nn.Linear(2 * width, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, CLASSES))
    return nn.Sequential(*stages, nn.Flatten(), *head)


def residual() -> nn.Module:
    """Residual blocks with group norm, which has no statistics to set right."""
    narrow, wide = (nn.Conv2d(1, 16, 3, padding=1), Residual(16)), (nn.Conv2d(16, 24, 3, 2, 1), Residual(24))
    return nn.Sequential(*narrow, *wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES))


def separable() -> nn.Module:
    """Depthwise and pointwise convolutions by turns; six thousand weights, so 90 % is a great deal."""
    layers = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()]
    for inputs, outputs, stride in ((16, 32, 2), (32, 48, 1), (48, 64, 1)):
        layers += [
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.SiLU(),
        ]
        layers += [nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def perceptron(width: int = 64, depth: int = 5) -> nn.Module:
    """Many narrow layers with tanh, whose errors add up."""
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, width), nn.Tanh(), *hidden, nn.Linear(width, CLASSES))


NETWORKS = {
    "convolutions, batch norm": plain,
    "residual, group norm": residual,
    "depthwise separable": separable,
    "deep perceptron, tanh": perceptron,
    "recurrent": Recurrent,
    "vision transformer": Attentive,
    "mixer": Mixer,
}


def digits() -> tuple[Tensor, Tensor]:
    """All images (1797, 1, 8, 8) in a fixed order, of mean 0 and variance 1, and their classes."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    order = drawn(len(images), len(images), 0)
    return ((images - images.mean()) / images.std())[order], torch.tensor(data.target)[order]


def trained(name: str, inputs: Tensor, labels: Tensor) -> nn.Module:
    """A network of this kind in eval mode; the same at every call."""
    torch.manual_seed(0)
    network = NETWORKS[name]()
    optimizer = torch.optim.AdamW(network.parameters(), RATE)
    batches = [part for _ in range(EPOCHS) for part in torch.randperm(len(inputs)).split(BATCH)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=len(batches))
    for part in batches:
        optimizer.zero_grad()
        functional.cross_entropy(network(inputs[part]), labels[part]).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


@torch.no_grad()
def accuracy(network: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Per cent."""
    return 100 * float((network(inputs).argmax(1) == labels).float().mean())


def run(name: str, method: str, sparsity: float, seed: int) -> Row:
    """One run as a row."""
    inputs, labels = digits()
    network = trained(name, inputs[:TRAINING], labels[:TRAINING])
    test = inputs[TRAINING:], labels[TRAINING:]
    dense = accuracy(network, *test)
    calibration = [(inputs[part], labels[part]) for part in drawn(TRAINING, CALIBRATION, seed).split(BATCH)]
    holdout = 0.0 if method in PEERS else 0.1  # the peers use every sample
    with measured() as work, torch.no_grad():
        network(inputs[:1])
    per_sample = work.forward
    with measured() as work:
        report = iobs.prune(network, calibration, sparsity, {**OURS, **PEERS}[method], holdout=holdout, seed=seed)
    row = {"network": name, "method": method, "sparsity": sparsity, "score": accuracy(network, *test), "dense": dense}
    found = {"reached": report.sparsity, "steps_kept": len(report.best.step_losses), "notes": report.notes}
    return row | found | work.fields(per_sample) | stamp(seed)


def tables(rows: list[Row]) -> str:
    """A table a sparsity: methods by networks."""
    lines = [
        "# Small networks of seven kinds",
        "",
        f"`python benchmarks/small_networks.py` (with `--quick`: seed 0 and the methods without gradient steps). Seven "
        f"small networks, trained by the script on {TRAINING} of scikit-learn's digits; {CALIBRATION} of these, "
        f"drawn by "
        "seed, calibrate. Per cent of the other 797 that are right, mean over seeds (lowest to highest), and the "
        "median "
        "seconds of a method's runs (processor seconds, or wall seconds for older rows).",
        "",
        "**What these figures show, and what not.** The seven networks were used, by held-out samples, to design how "
        "divergences become weights of layers (LOG.md). So they are a development set, and no evidence for networks "
        "that were never looked at. They have learnt their samples by heart, which leaves methods that live on "
        "gradients "
        "(WoodFisher, CBS, CHITA) little to go by. These three are this library's own forms. `best` takes gradient "
        "steps and the peers take none.",
    ]
    for sparsity in sorted({row["sparsity"] for row in rows}):
        own = [row for row in rows if row["sparsity"] == sparsity]
        names = [name for name in NETWORKS if any(row["network"] == name for row in own)]
        lines += ["", f"## {sparsity:.0%} zeros", "", f"| method | {' | '.join(names)} | seconds |"]
        lines += ["|---|" + "---|" * (len(names) + 1)]
        dense = [next(row["dense"] for row in own if row["network"] == name) for name in names]
        lines += [f"| dense | {' | '.join(f'{score:.1f}' for score in dense)} | |"]
        for method in METHODS:
            found = [row for row in own if row["method"] == method]
            if found:
                cells = [entry([row["score"] for row in found if row["network"] == name]) for name in names]
                seconds = [row["processor_seconds"] or row["seconds"] for row in found]
                lines.append(f"| {method} | {' | '.join(cells)} | {statistics.median(seconds):.1f} |")
    return "\n".join(lines) + "\n"


def entry(scores: list[float]) -> str:
    """One cell."""
    spread = f" ({min(scores):.1f}-{max(scores):.1f})" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.1f}{spread}" if scores else ""


def main() -> None:
    options_of = parser(__doc__, data=False)
    options_of.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    options_of.add_argument("--methods", nargs="*", choices=METHODS)
    options_of.add_argument("--sparsity", nargs="*", type=float, default=[0.9])
    options = options_of.parse_args()
    torch.set_num_threads(1)
    warm_up(iobs.Recipe(), iobs.Recipe(solver="sparsegpt"))
    rows = Rows("small_networks", KEYS, options.again)
    for sparsity in options.sparsity:
        for seed in options.seeds or ([0] if options.quick else [0, 1, 2]):
            for name in options.networks:
                for method in options.methods or [one for one in METHODS if not options.quick or one not in LONG]:
                    key = {"network": name, "method": method, "sparsity": sparsity, "seed": seed}
                    if not rows.has(**key):
                        rows.put(run(name, method, sparsity, seed))


if __name__ == "__main__":
    main()
