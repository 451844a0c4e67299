"""Accuracy at equal bytes: dense grids, sparse grids and budgets of bits, beside GPTQ and SparseGPT's joint pass.

    python benchmarks/equal_bytes.py --data FOLDER [--minilm FOLDER] [--networks resnet20 ...] [--methods budget ...]

Networks: an MLP (MNIST), ResNet-20 and a ViT (CIFAR-10), a Llama of 260 thousand parameters (perplexity / dense on unseen
stories), all-MiniLM-L6-v2 (mean cosine to the dense embeddings of unseen texts). A level counts the bits of values and
masks of each weight; scales come on top, and cost the same in all rows of a level. Budgets get these bytes, too. Scores
are those of test files, on which nothing is chosen.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blocks
import networks
import torch
from rows import Row, Rows, measured, parser, require_data, stamp, warm_up

import iobs
from iobs.pruning.recipe import FineTune, Recipe

KEYS = ("network", "method", "level", "seed")
# Dense and sparse patterns by bits a weight. Nothing is dense at 2.5 bits: int2 has fewer bytes, and is shown beside.
DENSE = {"2.5": "int2", "3": "int3", "4": "int4"}
SPARSE = {"2.5": "50%+int3", "3": "50%+int4", "4": "25%+int4"}
POLISH = FineTune(lr="auto", steps=200, loss="kl", decay=True, batch_size="auto", augment="auto", parameters="all")
OURS = Recipe(target="residual")
METHODS: dict[str, tuple[str, Recipe]] = {
    "GPTQ": ("dense", Recipe(solver="gptq")),
    "joint pass": ("sparse", Recipe(solver="sparsegpt")),
    "dense grid": ("dense", OURS),
    "sparse grid": ("sparse", OURS),
    "budget": ("budget", OURS.but(allocation="kl")),
    "dense grid, polished": ("dense", OURS.but(finetune=POLISH)),
    "sparse grid, polished": ("sparse", OURS.but(finetune=POLISH)),
    "budget, polished": ("budget", OURS.but(allocation="kl", finetune=POLISH)),
}
IGNORED = {"resnet20": "*downsample*"}


def cases(zoo: Any, folder: Path, minilm: Path | None) -> dict[str, Callable[[], Any]]:
    """The networks by name; each case has a module, calibration batches and a score."""
    found: dict[str, Callable[[], Any]] = {
        "mlpnet": lambda: networks.digits(zoo, folder, 0),
        "resnet20": lambda: networks.pictures("resnet20", "resnet20")(zoo, folder, 0),
        "vit": lambda: networks.pictures("vit_cifar", "vit")(zoo, folder, 0),
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
    pattern: Any = {"dense": DENSE, "sparse": SPARSE}[kind][level] if kind != "budget" else None
    if pattern is None:
        pattern = iobs.Budget(float(level) + overhead(case, ignore))
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


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    return "# Accuracy at equal bytes"


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    zoo, rows = require_data(options.data), Rows("equal_bytes", KEYS, options.again)
    warm_up(Recipe(), Recipe(solver="sparsegpt"))
    for name, load in cases(zoo, options.data, options.minilm).items():
        if options.networks and name not in options.networks:
            continue
        case = load()
        for level in options.levels:
            for method in options.methods:
                if not rows.has(network=name, method=method, level=level, seed=0):
                    rows.put(measure(case, name, method, level))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2; without it the network is left out")
    options.add_argument("--networks", nargs="*", help="by name; all by default")
    options.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    options.add_argument("--levels", nargs="*", default=list(DENSE), choices=list(DENSE))
    run(options.parse_args())


if __name__ == "__main__":
    main()
