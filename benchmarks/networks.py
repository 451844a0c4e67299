"""Accuracy of whole networks against sparsity: ours, the paper's Algorithm 2 to the letter, and the peers.

    python benchmarks/networks.py --data FOLDER [--quick] [--networks resnet20 ...] [--methods best ...] [--seeds 0 1 2]

A row a run is added to results/networks.jsonl. Runs that have a row are skipped, so the sweep can be stopped and
continued; networks_report.py makes the tables. Calibration is drawn by seed: 1,000 samples of the calibration files.
Scores are those of the test files, on which nothing is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rows import Row, Rows, level_name, measured, parser, require_data, stamp, warm_up
from torch import Tensor, nn

import iobs
from iobs import models
from iobs.evaluate import perplexity
from iobs.pruning.recipe import CBS, CHITA, GlobalMagnitude, Recipe, WoodFisher

KEYS = ("network", "method", "level", "seed")
SAMPLES = 1000
WINDOW = 512


@dataclass(frozen=True)
class Case:
    """A network to prune: the module, its calibration batches, its score, and where too few images tell scores apart
    the images (inputs, numbers) by which networks are compared one by one."""

    module: nn.Module
    batches: list[Any]
    score: Callable[[nn.Module], float]
    images: tuple[Tensor, list[int]] | None = None


@dataclass(frozen=True)
class Network:
    """What a sweep needs of a network: a case by seed, and its levels."""

    load: Callable[[Any, Path, int], Case]
    sparsities: tuple[str, ...]
    quick: tuple[str, ...]
    score: str
    peers: bool = True  # per-sample gradients of a language model's windows are no peer's setting
    ignore: str | None = None


def image_classifier(name: str, network: str) -> Callable[[Any, Path, int], Case]:
    """A classifier of CIFAR-10."""

    def load(zoo: Any, folder: Path, seed: int) -> Case:
        images, labels = zoo.cifar10("train10k", network)
        test = zoo.cifar10("test5000", network)
        chosen = drawn(len(images), SAMPLES, seed)
        batches = [(images[i], labels[i]) for i in chosen.split(100)]
        return Case(getattr(zoo, name)(), batches, lambda model: zoo.accuracy(model, *test))

    return load


def digits(zoo: Any, folder: Path, seed: int) -> Case:
    """MLPNet on MNIST."""
    images, labels = zoo.mnist("train")
    test = zoo.mnist("test")
    chosen = drawn(len(images), SAMPLES, seed)
    batches = [(images[i], labels[i]) for i in chosen.split(100)]
    return Case(zoo.mlpnet(), batches, lambda model: zoo.accuracy(model, *test))


def stories(zoo: Any, folder: Path, seed: int) -> Case:
    """The 260 thousand parameter llama; 1,000 stories, concatenated and cut into windows."""
    loaded = models.load(str(folder / "llama_stories260K"), dtype=torch.float32)
    model, tokenizer = loaded.module, loaded.require_tokenizer()
    texts = zoo.stories("calibration")
    calibration = windows(tokenizer, [texts[i] for i in drawn(len(texts), SAMPLES, seed).tolist()])
    validation = windows(tokenizer, zoo.stories("validation"))
    batches = [{"input_ids": part} for part in calibration.split(16)]
    return Case(model, batches, lambda model: perplexity(model, validation))


def thousand_classes(zoo: Any, folder: Path, seed: int) -> Case:
    """MobileNetV1: calibrated on half of the 600 images, scored on the other half."""
    images, labels = zoo.imagenet_samples()
    order = drawn(len(images), len(images), seed)
    chosen, rest = order[:300], order[300:]
    data = [(images[i], labels[i]) for i in chosen.split(25)]
    return Case(
        zoo.mobilenet_v1(),
        data,
        lambda model: zoo.accuracy(model, images[rest], labels[rest], batch=50),
        (images[rest], rest.tolist()),
    )


def drawn(count: int, samples: int, seed: int) -> Tensor:
    """Indices of samples drawn by seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:samples]


def windows(tokenizer: Any, texts: list[str]) -> Tensor:
    """Tokens of all texts one after another, in rows of `WINDOW`."""
    tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
    count = len(tokens) // WINDOW
    return torch.tensor(tokens[: count * WINDOW]).view(count, WINDOW)


LEVELS = ("0.5", "0.6", "0.7", "0.8", "0.9")
NETWORKS = {
    "resnet20": Network(
        image_classifier("resnet20", "resnet20"), LEVELS, ("0.8", "0.9"), "accuracy", ignore="*downsample*"
    ),
    "mlpnet": Network(digits, ("0.9", "0.95", "0.98"), ("0.95", "0.98"), "accuracy"),
    "vit": Network(image_classifier("vit_cifar", "vit"), ("0.5", "0.7"), ("0.5", "0.7"), "accuracy"),
    "llama_stories260K": Network(stories, ("0.5", "2:4", "0.7"), ("0.5", "0.7"), "perplexity", peers=False),
    "mobilenet": Network(thousand_classes, ("0.3", "0.4", "0.5", "0.6", "0.7", "0.8"), (), "accuracy"),
}

BEST, FAST = Recipe.preset("best"), Recipe.preset("fast")
# The same recipes without block reconstruction: targets of the whole network's drift, rounds and fine-tuning.
PLAIN_FAST = Recipe(allocation="auto", curvature="fisher", target="dense")
PLAIN_BEST = Recipe(allocation="auto", curvature="fisher", target="model", rounds=BEST.rounds, finetune=BEST.finetune)
OURS: dict[str, Recipe] = {
    "best": BEST,
    "fast": FAST,
    "fast, equal rows": FAST.but(curvature="layer"),
    "best without blocks": PLAIN_BEST,
    "fast without blocks": PLAIN_FAST,
    "one shot, layers by Fisher": Recipe(target="dense", allocation="fisher"),
    "one shot, layers and rows by Fisher": Recipe(target="dense", allocation="fisher", curvature="fisher"),
    "one shot, uniform": Recipe(target="dense"),
    "one shot, target of its own weights": PLAIN_FAST.but(target="layer"),
    "Algorithm 2 to the letter": Recipe.preset("paper"),
    "SparseGPT": Recipe(solver="sparsegpt"),
}
PEERS: dict[str, Recipe] = {
    "magnitude": Recipe(solver=GlobalMagnitude()),
    "WoodFisher": Recipe(solver=WoodFisher()),
    "CBS": Recipe(solver=CBS()),
    "CHITA": Recipe(solver=CHITA()),
    "CHITA, searched mask": Recipe(solver=CHITA(searches=10)),
    "CHITA, 15 stages": Recipe(solver=CHITA(stages=15)),
}


def stepped_by(**changes: Any) -> Recipe:
    """The recipe "best without blocks" with other settings of its gradient steps, between the rounds and after them."""
    rounds = replace(PLAIN_BEST.rounds, finetune=replace(PLAIN_BEST.rounds.finetune, **changes))
    return PLAIN_BEST.but(rounds=rounds, finetune=replace(PLAIN_BEST.finetune, **changes))


ABLATIONS: dict[str, Recipe] = {
    "best without blocks, uniform allocation": PLAIN_BEST.but(allocation="uniform"),
    "best without blocks, equal rows": PLAIN_BEST.but(curvature="layer"),
    "best without blocks, target of its own weights": PLAIN_BEST.but(target="layer"),
    "best without blocks, growing sparsity": PLAIN_BEST.but(rounds=replace(PLAIN_BEST.rounds, schedule="cubic")),
    "best without blocks, no polish": Recipe(target="dense", allocation="auto"),
    "best without blocks, short polish": PLAIN_BEST.but(finetune=replace(PLAIN_BEST.finetune, most_steps=None)),
    "best without blocks, task loss": stepped_by(loss="task"),
    "best without blocks, no augmentation": stepped_by(augment=None),
}


def run(zoo: Any, folder: Path, name: str, method: str, level: str, seed: int) -> Row:
    """One run as a row."""
    ignore = NETWORKS[name].ignore
    case = NETWORKS[name].load(zoo, folder, seed)
    dense, per_sample, answers = case.score(case.module), dense_work(case), log_probabilities(case)
    recipe = {**OURS, **PEERS, **ABLATIONS}[method]
    holdout = 0.0 if method in PEERS else 0.1  # the peers use every sample
    with measured() as work:
        report = iobs.prune(case.module, case.batches, level, recipe, ignore=ignore, holdout=holdout, seed=seed)
    row = {
        "network": name,
        "method": method,
        "level": level,
        "score": case.score(case.module),
        "dense": dense,
        "sparsity": report.sparsity,
        "heldout": [record.loss_heldout for record in report.rounds],
        "best_round": report.best_round,
        "steps_kept": len(report.best.step_losses),
        "notes": report.notes,
        **work.fields(per_sample),
        **stamp(seed),
    }
    if case.images is not None:
        divergence = (answers.exp() * (answers - log_probabilities(case))).sum(1)
        row["kl"] = dict(zip(map(str, case.images[1]), (round(float(value), 5) for value in divergence), strict=True))
    return row


def dense_work(case: Case) -> float:
    """Layer multiply-adds of a forward pass, per sample."""
    batch = case.batches[0]
    inputs = batch["input_ids"] if isinstance(batch, dict) else batch[0]
    with measured() as work, torch.no_grad():
        case.module(inputs[:1])
    return work.forward


@torch.no_grad()
def log_probabilities(case: Case) -> Tensor:
    """Log-probabilities of the images' classes, (images, classes)."""
    if case.images is None:
        return torch.empty(0)
    case.module.eval()
    return torch.cat([case.module(part).float().log_softmax(1) for part in case.images[0].split(50)])


def methods_of(network: Network, options: Any) -> list[str]:
    """The methods that the options ask for."""
    if options.methods:
        return options.methods
    return [*OURS, *(PEERS if network.peers else {}), *(ABLATIONS if options.ablations else {})]


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    options_of.add_argument("--methods", nargs="*", help="by name; ours and the peers' by default")
    options_of.add_argument("--ablations", action="store_true", help="also with one ingredient changed at a time")
    options_of.add_argument("--levels", nargs="*", type=level_name, help="sparsities or N:M")
    options = options_of.parse_args()
    torch.set_num_threads(1)
    warm_up(iobs.Recipe(), iobs.Recipe(solver="sparsegpt"))
    zoo, rows = require_data(options.data), Rows("networks", KEYS, options.again)
    for name in options.networks:
        network = NETWORKS[name]
        for seed in options.seeds or ([0] if options.quick else [0, 1, 2]):
            for level in options.levels or (network.quick if options.quick else network.sparsities):
                for method in methods_of(network, options):
                    key = {"network": name, "method": method, "level": level, "seed": seed}
                    if not rows.has(**key) and not (method in PEERS and ":" in level):
                        rows.put(run(zoo, options.data, name, method, level, seed))


if __name__ == "__main__":
    main()
