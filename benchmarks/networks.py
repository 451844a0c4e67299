"""Accuracy of whole networks against sparsity: ours, the paper's Algorithm 2 to the letter, and the peers.

    python benchmarks/networks.py --data FOLDER [--quick] [--networks resnet20 ...] [--methods best ...] [--seeds 0 1 2]

One row a run is appended to results/networks.jsonl, and runs that have a row are not repeated, so that the sweep can be
stopped and taken up again; the tables beside them (results/networks.md) are made from the rows. Calibration is drawn
by seed: 1,000 samples of the calibration files; scores are those of the test files, on which nothing is chosen.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import wilcoxon
from torch import Tensor, nn

import iobs
from iobs import models
from iobs.evaluate import perplexity
from iobs.pruning.recipe import CBS, CHITA, GlobalMagnitude, Recipe, WoodFisher

RESULTS = Path(__file__).parent / "results"
SAMPLES = 1000
WINDOW = 512
OTHER_COUNT = 5e-4  # a share of zeros further than this from the one asked for is told


@dataclass(frozen=True)
class Case:
    """A network to prune: the module, its calibration batches, its score, and where too few pictures tell scores apart
    the pictures (inputs, numbers) by which networks are compared one by one."""

    module: nn.Module
    batches: list[Any]
    score: Callable[[nn.Module], float]
    pictures: tuple[Tensor, list[int]] | None = None


@dataclass(frozen=True)
class Network:
    """What a sweep needs of a network: a case by seed, and its levels."""

    load: Callable[[Any, Path, int], Case]
    sparsities: tuple[str, ...]
    quick: tuple[str, ...]
    score: str
    peers: bool = True  # per-sample gradients of a language model's windows are no peer's setting
    ignore: str | None = None


def pictures(name: str, network: str) -> Callable[[Any, Path, int], Case]:
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
    """MobileNetV1: calibrated on half of the 600 pictures, scored on the other half."""
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
    "resnet20": Network(pictures("resnet20", "resnet20"), LEVELS, ("0.8", "0.9"), "accuracy", ignore="*downsample*"),
    "mlpnet": Network(digits, ("0.9", "0.95", "0.98"), ("0.95", "0.98"), "accuracy"),
    "vit": Network(pictures("vit_cifar", "vit"), ("0.5", "0.7"), ("0.5", "0.7"), "accuracy"),
    "llama_stories260K": Network(stories, ("0.5", "2:4", "0.7"), ("0.5", "0.7"), "perplexity", peers=False),
    "mobilenet": Network(thousand_classes, ("0.3", "0.4", "0.5", "0.6", "0.7", "0.8"), (), "accuracy"),
}

QUOTED = {
    "resnet20": "CHITA in 15 stages by its authors' own code, on one draw of 1,000 of these pictures: 91.1, 90.4, "
    "88.1, 83.8 and 71.4; its published figures, in which more pictures and augmented gradients have a part, quoted "
    "from memory: 91.04, 90.78, 90.38, 88.72 and 79.32.",
    "mlpnet": "CHITA in 15 stages by its authors' own code, on one draw of 1,000 digits: 92.9, 91.1 and 54.3.",
}
"""Figures of peers that were not measured by this script."""

BEST, FAST = Recipe.preset("best"), Recipe.preset("fast")
OURS: dict[str, Recipe] = {
    "best": BEST,
    "fast (one shot)": FAST,
    "one shot, allocation by error": Recipe(target="dense", allocation="error"),
    "one shot, allocation by Fisher": Recipe(target="dense", allocation="fisher"),
    "one shot, uniform": Recipe(target="dense"),
    "one shot, target of its own weights": FAST.but(target="layer"),
    "Algorithm 2 to the letter": Recipe.preset("paper"),
    "SparseGPT": Recipe(solver="sparsegpt"),
}
PEERS: dict[str, Recipe] = {
    "magnitude": Recipe(solver=GlobalMagnitude()),
    "WoodFisher": Recipe(solver=WoodFisher()),
    "CBS": Recipe(solver=CBS()),
    "CHITA": Recipe(solver=CHITA()),
    "CHITA, 15 stages": Recipe(solver=CHITA(stages=15)),
}


def stepped_by(**changes: Any) -> Recipe:
    """The recipe "best" with other settings of its gradient steps, between the rounds and after them."""
    rounds = replace(BEST.rounds, finetune=replace(BEST.rounds.finetune, **changes))
    return BEST.but(rounds=rounds, finetune=replace(BEST.finetune, **changes))


ABLATIONS: dict[str, Recipe] = {
    "best, uniform allocation": BEST.but(allocation="uniform"),
    "best, allocation without search": BEST.but(allocation=iobs.Allocation("auto", generations=0)),
    "best, target of its own weights": BEST.but(target="layer"),
    "best, growing sparsity": BEST.but(rounds=replace(BEST.rounds, schedule="cubic")),
    "best, no polish": Recipe(target="dense", allocation="auto"),
    "best, short polish": BEST.but(finetune=replace(BEST.finetune, most_steps=None)),
    "best, task loss": stepped_by(loss="task"),
    "best, no augmentation": stepped_by(augment=None),
}

JUDGED_OTHERWISE = ("best, no polish", "best, task loss", "best, no augmentation")  # another loss, or other samples
# Each recipe, and it with one choice made otherwise, as far as their held-out losses can be compared.
VARIANTS = {
    "fast (one shot)": [name for name in OURS if name.startswith("one shot")],
    "best": [name for name in ABLATIONS if name not in JUDGED_OTHERWISE],
}


def run(zoo: Any, folder: Path, name: str, method: str, level: str, seed: int) -> dict[str, Any]:
    """One run as a row."""
    ignore = NETWORKS[name].ignore
    case = NETWORKS[name].load(zoo, folder, seed)
    dense = case.score(case.module)
    answers = log_probabilities(case)
    started = time.perf_counter()
    recipe = {**OURS, **PEERS, **ABLATIONS}[method]
    holdout = 0.0 if method in PEERS else 0.1  # the peers use every sample
    report = iobs.prune(case.module, case.batches, level, recipe, ignore=ignore, holdout=holdout, seed=seed)
    seconds = time.perf_counter() - started
    row = {
        "network": name,
        "method": method,
        "level": level,
        "seed": seed,
        "score": case.score(case.module),
        "dense": dense,
        "seconds": seconds,
        "sparsity": report.sparsity,
        "heldout": [record.loss_heldout for record in report.rounds],
        "best_round": report.best_round,
        "notes": report.notes,
        "commit": commit(),
    }
    if case.pictures is not None:
        divergence = (answers.exp() * (answers - log_probabilities(case))).sum(1)
        row["kl"] = dict(zip(map(str, case.pictures[1]), (round(float(value), 5) for value in divergence), strict=True))
    return row


@torch.no_grad()
def log_probabilities(case: Case) -> Tensor:
    """What the network says of each picture, (pictures, classes)."""
    if case.pictures is None:
        return torch.empty(0)
    case.module.eval()
    return torch.cat([case.module(part).float().log_softmax(1) for part in case.pictures[0].split(50)])


def commit() -> str:
    """The commit that was measured."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def tables(rows: list[dict[str, Any]]) -> str:
    """All rows as one table a network: mean over seeds, spread, seconds."""
    lines = [
        "# Accuracy of whole networks",
        "",
        f"`python benchmarks/networks.py --ablations`: {SAMPLES} calibration samples (pictures, digits, stories) "
        "drawn by seed and nothing else, scores on the test files; of MobileNet's 600 pictures half are calibrated "
        "on. Each entry: mean over seeds (lowest to highest; their number where not all were run), seconds of the "
        "whole call on one thread of a machine shared with other work, so only their order says something. Columns "
        "are sparsities. Where one seed stands alone a difference under a point says nothing, on MobileNet, whose "
        "seeds score other pictures, one of several points. Algorithm 2 to the letter sees the same samples in every "
        "round, where the paper draws new ones, and ends with the best round by held-out samples. ResNet-20's two "
        "downsampling convolutions and MobileNet's depthwise ones stay dense and uncounted, for every method. "
        "SparseGPT, CHITA, CBS and WoodFisher are this library's own forms of those methods (`docs/accuracy.md`). "
        "Rows are of several commits, which `networks.jsonl` names: of those with an allocation some ablations, of the "
        "language model, ViT and MobileNet, are from before 2e48af6 and of an older one (LOG.md).",
    ]
    for name, network in NETWORKS.items():
        own = [row for row in rows if row["network"] == name]
        if not own:
            continue
        run_at = {row["level"] for row in own}
        levels = [*(level for level in network.sparsities if level in run_at), *sorted(run_at - {*network.sparsities})]
        seeds = sorted({row["seed"] for row in own})
        dense = next((row["dense"] for row in own if "dense" in row), None)
        stated = "" if dense is None else f", dense {dense:.2f}"
        lines += ["", f"## {name} ({network.score}{stated}; seeds {', '.join(map(str, seeds))})", ""]
        lines += [f"| method | {' | '.join(levels)} |", f"|---|{'---|' * len(levels)}"]
        for method in (*OURS, *PEERS, *ABLATIONS):
            entries = [
                entry([row for row in own if (row["method"], row["level"]) == (method, level)], len(seeds))
                for level in levels
            ]
            if any(entries):
                lines.append(f"| {method} | {' | '.join(entries)} |")
        lines += ["", QUOTED[name]] if name in QUOTED else []
        lines += divergences([row for row in own if "kl" in row], levels)
    lines += left_out(rows)
    return "\n".join(lines) + "\n"


def divergences(rows: list[dict[str, Any]], levels: list[str]) -> list[str]:
    """KL to the dense network by method, and whether "best" is below each peer on the same pictures."""
    if not rows:
        return []
    lines = [
        "",
        'KL to the dense network, nats, mean over the pictures that were not calibrated on; in brackets that of "best" '
        "on the same pictures, where not all its seeds are shared, and p of its being as large as this: Wilcoxon's "
        "signed-rank test over pictures (each one's mean over the seeds of both).",
        "",
        f"| method | {' | '.join(levels)} |",
        f"|---|{'---|' * len(levels)}",
    ]

    def by_picture(method: str, level: str, seeds: set[int]) -> dict[str, float]:
        found = defaultdict(list)
        for row in rows:
            if (row["method"], row["level"]) == (method, level) and row["seed"] in seeds:
                for picture, value in row["kl"].items():
                    found[picture].append(value)
        return {picture: statistics.mean(values) for picture, values in found.items()}

    def cell(method: str, level: str) -> str:
        seeds = {
            name: {row["seed"] for row in rows if (row["method"], row["level"]) == (name, level)}
            for name in ("best", method)
        }
        if not seeds[method]:
            return ""
        mean = f"{statistics.mean(by_picture(method, level, seeds[method]).values()):.3f}"
        shared = seeds["best"] & seeds[method]
        if method == "best" or not shared:
            return mean
        ours, theirs = by_picture("best", level, shared), by_picture(method, level, shared)
        if ours == theirs:  # "best" may be content with the projection of "fast"
            return f"{mean} (the same)"
        p = wilcoxon([ours[key] - theirs[key] for key in ours], alternative="less").pvalue
        beside = "" if shared == seeds["best"] else f"{statistics.mean(ours.values()):.3f}, "
        return f"{mean} ({beside}{p:.0e})"

    for method in (*OURS, *PEERS, *ABLATIONS):
        cells = [cell(method, level) for level in levels]
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def left_out(rows: list[dict[str, Any]]) -> list[str]:
    """One network left out at a time: of a recipe and its variants, the one that the others' held-out samples choose.

    Its rank among those of a network, by the mean logarithm of the held-out loss, is averaged over the other networks;
    the least is chosen. Test scores are read only afterwards.
    """
    lines = [
        "",
        "## One network left out",
        "",
        "What the held-out samples of the other networks choose among a recipe and its variants (least mean rank), and "
        "what it scores on the network left out. Each network at the sparsity with most variants, on the seeds that "
        "all of them have; of the variants those that were run on every network of the table.",
        "",
        "| left out | recipe | chosen on the others | its score | the recipe's | the best variant's, in hindsight |",
        "|---|---|---|---|---|---|",
    ]
    for recipe, ablations in VARIANTS.items():
        compared = {name: compare(rows, name, [recipe, *ablations]) for name in NETWORKS}
        compared = {name: table for name, table in compared.items() if len(table) > 1}
        variants = [each for each in (recipe, *ablations) if all(each in table for table in compared.values())]
        compared = {name: {each: table[each] for each in variants} for name, table in compared.items()}
        for name in compared if len(compared) > 1 and recipe in variants else ():
            others = [table for left, table in compared.items() if left != name]
            ranks = {method: sum(rank(table, method) for table in others) for method in variants}
            winners = [method for method in variants if ranks[method] == min(ranks.values())]
            scores = {method: score for method, (_, score) in compared[name].items()}
            hindsight = (min if NETWORKS[name].score == "perplexity" else max)(scores.values())
            found = " or ".join(f"{scores[winner]:.2f}" for winner in winners)
            lines.append(
                f"| {name} | {recipe} | {' or '.join(winners)} | {found} | {scores[recipe]:.2f} | {hindsight:.2f} |"
            )
    return lines


def rank(table: dict[str, tuple[float, float]], method: str) -> int:
    """How many variants have a lower held-out loss."""
    return sum(loss < table[method][0] for loss, _ in table.values())


def compare(rows: list[dict[str, Any]], name: str, variants: list[str]) -> dict[str, tuple[float, float]]:
    """Held-out loss (mean logarithm) and test score by variant, of one network at one sparsity, over common seeds."""
    own = [row for row in rows if row["network"] == name and row["method"] in variants]
    tried = defaultdict(set)
    for row in own:
        tried[row["level"]].add(row["method"])
    # The last of those with most variants, which is the hardest.
    known = [level for level in NETWORKS[name].sparsities if level in tried]
    level = max(known, key=lambda level: (len(tried[level]), known.index(level)), default="")
    by_seed = defaultdict(dict)
    for row in own:
        if row["level"] == level:
            by_seed[row["seed"]][row["method"]] = row
    complete = [table for table in by_seed.values() if len(table) == len(tried[level])]
    return {
        method: (
            statistics.mean(math.log(table[method]["heldout"][table[method]["best_round"]]) for table in complete),
            statistics.mean(table[method]["score"] for table in complete),
        )
        for method in (tried[level] if complete else ())
    }


def entry(rows: list[dict[str, Any]], draws: int) -> str:
    """One cell; its number of seeds where several were run and not all draws, and its zeros where they are others."""
    if not rows:
        return ""
    scores = [row["score"] for row in rows]
    several = f"; {len(scores)}" if len(scores) < draws else ""
    spread = f" ({min(scores):.2f}-{max(scores):.2f}{several})" if len(scores) > 1 else ""
    asked = None if ":" in rows[0]["level"] else float(rows[0]["level"])
    off = [row["sparsity"] for row in rows if asked is not None and abs(row["sparsity"] - asked) > OTHER_COUNT]
    zeros = f", {max(off):.1%} zeros" if off else ""
    return f"{statistics.mean(scores):.2f}{spread}{zeros}, {statistics.mean(row['seconds'] for row in rows):.0f} s"


def load_zoo(folder: Path) -> Any:
    """The loaders that live beside the networks."""
    spec = importlib.util.spec_from_file_location("zoo", folder / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of zoo.py")
    parser.add_argument("--quick", action="store_true", help="one seed, two sparsities a network, no ablations")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="*", help="by name; ours and the peers' by default")
    parser.add_argument("--ablations", action="store_true", help="take one ingredient away at a time")
    parser.add_argument("--levels", nargs="*", help="sparsities or N:M")
    parser.add_argument("--seeds", nargs="*", type=int, default=None)
    parser.add_argument("--rows", type=Path, default=RESULTS / "networks.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    zoo = load_zoo(options.data)
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    done = defaultdict(set)
    for row in rows:
        done[row["network"]].add((row["method"], row["level"], row["seed"]))
    for name in options.networks:
        network = NETWORKS[name]
        methods = options.methods or [
            *OURS,
            *(PEERS if network.peers else {}),
            *(ABLATIONS if options.ablations else {}),
        ]
        for seed in options.seeds or ([0] if options.quick else [0, 1, 2]):
            for level in options.levels or (network.quick if options.quick else network.sparsities):
                for method in methods:
                    if (method, level, seed) in done[name] or (method in PEERS and ":" in level):
                        continue
                    rows.append(run(zoo, options.data, name, method, level, seed))
                    with options.rows.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print(f"{name} {method} {level} seed {seed}: {rows[-1]['score']:.3f}, {rows[-1]['seconds']:.0f} s")
                    sys.stdout.flush()
                    options.rows.with_suffix(".md").write_text(tables(rows), encoding="utf8")
    options.rows.with_suffix(".md").write_text(tables(rows), encoding="utf8")


if __name__ == "__main__":
    main()
