"""Accuracy at equal bytes: dense grids, sparse grids and rates, beside GPTQ and SparseGPT's joint pass.

    python benchmarks/equal_bytes.py --data FOLDER [--minilm FOLDER] [--networks resnet20 ...] [--methods rate ...]

Networks: an MLP (MNIST), ResNet-20 and a ViT (CIFAR-10), a Llama of 260 thousand parameters (perplexity / dense on
unseen stories), all-MiniLM-L6-v2 (mean cosine to the dense embeddings of unseen texts). A level counts the bits of
values and masks of each weight; scales come on top, and cost the same in all rows of a level. Rates get these bytes,
too. Scores are those of test files, on which nothing is chosen.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import blocks
import networks
import torch
from rows import Row, Rows, measured, parser, require_data, stamp, warm_up

import iobs
from iobs.pruning.recipe import FineTune, Recipe

KEYS = ("network", "method", "level", "seed")
# Patterns by bits a weight. Nothing is dense at 1.5 and 2.5 bits: int2 has fewer bytes than 2.5, and is shown there.
DENSE = {"2.5": "int2", "3": "int3", "4": "int4", "8": "int8"}
SPARSE = {"1.5": "75%+int2", "2.5": "50%+int3", "3": "50%+int4", "4": "25%+int4", "8": "12.5%+int8"}
POLISH = FineTune(
    lr="auto", optimizer="adam", steps=120, loss="kl", decay=True, batch_size="auto", augment="auto", parameters="all"
)
OURS = Recipe(target="residual")
METHODS: dict[str, tuple[str, Recipe]] = {
    "GPTQ": ("dense", Recipe(solver="gptq")),
    "joint pass": ("sparse", Recipe(solver="sparsegpt")),
    "dense grid": ("dense", OURS),
    "sparse grid": ("sparse", OURS),
    "rate": ("rate", OURS.but(allocation="auto")),
    "dense grid, polished": ("dense", OURS.but(finetune=POLISH)),
    "sparse grid, polished": ("sparse", OURS.but(finetune=POLISH)),
    "rate, polished": ("rate", OURS.but(allocation="auto", finetune=POLISH)),
}
IGNORED = {"resnet20": "*downsample*"}
BATCHES = {"resnet20": 4, "vit": 4, "llama_stories260K": 8, "minilm": 12}  # 400 images, 128 windows, 192 texts


def cases(zoo: Any, folder: Path, minilm: Path | None) -> dict[str, Callable[[], Any]]:
    """The networks by name; each case has a module, calibration batches and a score."""
    found: dict[str, Callable[[], Any]] = {
        "mlpnet": lambda: networks.digits(zoo, folder, 0),
        "resnet20": lambda: networks.image_classifier("resnet20", "resnet20")(zoo, folder, 0),
        "vit": lambda: networks.image_classifier("vit_cifar", "vit")(zoo, folder, 0),
        "llama_stories260K": lambda: blocks.llama(folder, zoo, folder),
    }
    return found if minilm is None else {**found, "minilm": lambda: blocks.encoder(folder, zoo, minilm)}


def overhead(case: Any, ignore: str | None) -> float:
    """Bits of scales for each weight."""
    module = copy.deepcopy(case.module)
    given = case.batches[:1]
    quick = Recipe(solver="magnitude")
    report = iobs.prune(module, given, iobs.Grid(4), quick, ignore=ignore, holdout=0.0)
    assert report.bits_per_weight is not None
    return report.bits_per_weight - 4


def measure(case: Any, name: str, method: str, level: str) -> Row:
    """One run as a row; the case keeps its dense network."""
    kind, recipe = METHODS[method]
    ignore = IGNORED.get(name)
    pattern: Any = {"dense": DENSE, "sparse": SPARSE}[kind][level] if kind != "rate" else None
    if kind == "rate":
        pattern = iobs.Rate(float(level) + overhead(case, ignore))
    module = copy.deepcopy(case.module)
    dense = case.score(module)
    with measured() as work:
        report = iobs.prune(module, case.batches, pattern, recipe, ignore=ignore, seed=0)
    return {
        "network": name,
        "method": method,
        "level": level,
        "pattern": str(pattern),
        "score": case.score(module),
        "dense": dense,
        "bits": report.bits_per_weight,
        "sparsity": report.sparsity,
        "heldout": report.best.loss_heldout,
        "layers": {row.name: round((row.bits or 0) / row.weights, 3) for row in report.audit},
        "notes": report.notes,
        **work.fields(),
        **stamp(0),
    }


SCORES = {
    "mlpnet": "MLP, MNIST: accuracy, %",
    "resnet20": "ResNet-20, CIFAR-10: accuracy, %",
    "vit": "ViT, CIFAR-10: accuracy, %",
    "llama_stories260K": "Llama 260K, stories: perplexity / dense (lower is better)",
    "minilm": "MiniLM, C4: cosine to the dense embeddings",
}
LOWER = ("llama_stories260K",)  # networks with scores of which less is better


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    found = {(row["network"], row["level"], row["method"]): row for row in rows}
    text = [
        "# Accuracy at equal bytes",
        "",
        "Made by `python benchmarks/equal_bytes.py`. The level counts the bits of values and masks (one bit for each "
        "entry of a layer with zeros); 16-bit scales of each row and 128 columns come on top, the same for every "
        "method. A rate has these bytes in all layers together. Dense grids: "
        f"{_named(DENSE)}; int2 has fewer bytes than its level, since nothing is dense at 1.5 and 2.5 bits. Sparse "
        f'grids: {_named(SPARSE)}. GPTQ and SparseGPT\'s joint pass are one-shot and uniform. "Polished" takes '
        f"{POLISH.steps} gradient steps on the KL divergence with values kept on the grid. Seed 0, test files.",
    ]
    for name, title in SCORES.items():
        levels = [level for level in SPARSE if any(key[:2] == (name, level) for key in found)]
        if not levels:
            continue
        dense = next(row["dense"] for key, row in found.items() if key[0] == name)
        text += ["", f"## {title}", "", f"Dense: {dense:.4g}.", ""]
        text += [f"| bits | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
        for level in levels:
            own = {method: found[name, level, method] for method in METHODS if (name, level, method) in found}
            scores = {method: row["score"] for method, row in own.items()}
            best = (min if name in LOWER else max)(scores.values())
            cells = [_cell(scores[method], scores[method] == best) if method in scores else "-" for method in METHODS]
            text.append(f"| {level} | {' | '.join(cells)} |")
    return "\n".join([*text, *verdict(found)])


def verdict(found: dict[tuple[str, str, str], Row]) -> list[str]:
    """Cells in which zeros on a grid are better than more bits."""
    text = ["", "## What the zeros are worth", ""]
    for ending, label in (("", "one shot"), (", polished", "polished")):
        cells = {
            f"{name} {level}": [
                found[name, level, f"{kind}{ending}"]["score"] for kind in ("dense grid", "sparse grid")
            ]
            for name in SCORES
            for level in SPARSE
            if all((name, level, f"{kind}{ending}") in found for kind in ("dense grid", "sparse grid"))
        }
        better = [
            cell
            for cell, (dense, sparse) in cells.items()
            if (dense > sparse if cell.startswith(LOWER) else sparse > dense)
        ]
        text.append(
            f"- {label}, {len(cells)} cells: the sparse grid beats the dense grid in {', '.join(better) or 'none'}."
        )
    return text


def _named(patterns: dict[str, str]) -> str:
    return ", ".join(f"{pattern} at {level}" for level, pattern in patterns.items())


def _cell(value: float, best: bool) -> str:
    text = f"{value:.2f}" if value >= 10 else f"{value:.3f}" if value >= 1 else f"{value:.4f}"
    return f"**{text}**" if best else text


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    zoo, rows = require_data(options.data), Rows("equal_bytes", KEYS, options.again)
    warm_up(Recipe(), Recipe(solver="sparsegpt"))
    for name, load in cases(zoo, options.data, options.minilm).items():
        if options.networks and name not in options.networks:
            continue
        case = load()
        case = replace(case, batches=case.batches[: BATCHES.get(name)])
        for level in options.levels:
            for method in options.methods:
                possible = METHODS[method][0] != "dense" or level in DENSE
                if possible and not rows.has(network=name, method=method, level=level, seed=0):
                    rows.put(measure(case, name, method, level))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2; without it the network is left out")
    options.add_argument("--networks", nargs="*", help="by name; all by default")
    options.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    options.add_argument("--levels", nargs="*", default=["2.5", "3", "4"], choices=list(SPARSE))
    run(options.parse_args())


if __name__ == "__main__":
    main()
