"""Torch-Pruning's scores on the channels of ResNet-20, with batch norms measured anew; no weight is updated.

    pip install torch-pruning
    python benchmarks/structured_peers.py                  one draw; also --quick, --seeds 0 1 2

GroupMagnitude, GroupTaylor (1,000 labelled pictures) and GroupHessian (200 gradients of one picture) are computed by
the package, on the channels inside every residual block. "local" removes equal shares of all blocks; "global" removes
the lowest scores of the whole network until the multiplications are as few. Pictures and test set are those of
`structured_networks.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rows import Row, Rows, measured, parser, require_data, stamp
from torch import Tensor, nn

from iobs.pruning.structure.removal import remove
from iobs.pruning.structure.sites import find_sites
from iobs.pruning.structure.units import Site
from iobs.pruning.widths.costs import Products

SCORES = ("GroupMagnitude", "GroupTaylor", "GroupHessian")
SHARES = (0.3, 0.5, 0.7)
SINGLE = 200  # gradients of single pictures


def scores_of(name: str, model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The package's score of every channel, by path of the layer that writes it."""
    import torch_pruning as tp

    kinds = {
        "GroupMagnitude": tp.importance.GroupMagnitudeImportance,
        "GroupTaylor": tp.importance.GroupTaylorImportance,
    }
    kinds["GroupHessian"] = tp.importance.GroupHessianImportance
    score: Any = kinds[name]()
    graph = tp.DependencyGraph().build_dependency(model, example_inputs=images[:1])
    model.zero_grad()
    loss = nn.functional.cross_entropy
    if name == "GroupTaylor":
        for part, own in zip(images.split(100), labels.split(100), strict=True):
            (loss(model(part), own, reduction="sum") / len(images)).backward()
    if name == "GroupHessian":
        score.zero_grad()
        for part, own in zip(images[:SINGLE].split(1), labels[:SINGLE].split(1), strict=True):
            model.zero_grad()
            loss(model(part), own).backward()
            score.accumulate_grad(model)
    found = {}
    for path, module in model.named_modules():
        if path.endswith("conv1") and "." in path:
            every = list(range(module.out_channels))
            group = graph.get_pruning_group(module, tp.prune_conv_out_channels, idxs=every)
            found[path] = score(group).detach()
    return found


def kept_units(sites: list[Site], scores: dict[str, Tensor], cost: Products, share: float, scope: str) -> Any:
    """Units to keep: the highest scores, at most the share of the cost that is left."""
    writers = {site.name: next(one.path for one in site.writers if one.parameter == "weight") for site in sites}
    own = {site.name: scores[writers[site.name]] for site in sites}
    ranks = {name: (-values).argsort().argsort().double() / len(values) for name, values in own.items()}
    order = ranks if scope == "local" else {name: -values.double() for name, values in own.items()}
    every = torch.cat(list(order.values())).sort().values  # thresholds, the narrowest network first
    low, high = 0, len(every) - 1

    def kept(place: int) -> dict[str, list[int]]:
        found = {name: (values <= every[place]).nonzero().flatten().tolist() for name, values in order.items()}
        return {name: units or [int(order[name].argmin())] for name, units in found.items()}

    while low < high:
        middle = (low + high + 1) // 2
        widths = {name: len(units) for name, units in kept(middle).items()}
        low, high = (middle, high) if cost.of(widths) <= (1 - share) * cost.of({}) else (low, middle - 1)
    return kept(low)


@torch.no_grad()
def measure_norms(model: nn.Module, images: Tensor) -> None:
    """Running statistics of all batch norms from the pictures alone."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative average
    model.train()
    for part in images.split(100):
        model(part)
    model.eval()


def measure(zoo: Any, name: str, scope: str, share: float, seed: int) -> Row:
    images, labels = zoo.cifar10("train10k", "resnet20")
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:1000]
    images, labels = images[chosen], labels[chosen]
    model = zoo.resnet20()
    with measured() as work:
        scores = scores_of(name, model, images, labels)
        model.zero_grad()
        sites = [site for site in find_sites(model, images[:2]) if site.kind == "channels"]
        cost = Products.count(model, images[:2], sites).held
        kept = kept_units(sites, scores, cost, share, scope)
        remove(model, sites, kept)
        measure_norms(model, images)
    widths = {name: len(units) for name, units in kept.items()}
    return {
        "method": name,
        "scope": scope,
        "share": share,
        "score": zoo.accuracy(model, *zoo.cifar10("test5000", "resnet20")),
        "macs": cost.of(widths) / cost.of({}),
        "widths": list(widths.values()),
        **work.fields(),
        **stamp(seed),
    }


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    text = [
        "# Scores of Torch-Pruning",
        "",
        "Made by `python benchmarks/structured_peers.py`: channels inside the blocks of ResNet-20 (dense 91.70), "
        "removed by the scores of the package torch-pruning, batch norms measured anew on the same 1,000 pictures. "
        "Accuracy; ours stand in the section before.",
        "",
        "| score | scope | seeds | "
        + " | ".join(f"{share:.0%} of the multiplications removed" for share in SHARES)
        + " |",
        "|---" * (3 + len(SHARES)) + "|",
    ]
    for method in SCORES:
        for scope in ("local", "global"):
            own = [row for row in rows if (row["method"], row["scope"]) == (method, scope)]
            cells = []
            for share in SHARES:
                found = [row["score"] for row in own if row["share"] == share]
                cells.append(f"{sum(found) / len(found):.2f}" if found else "-")
            text.append(f"| {method} | {scope} | {len({row['seed'] for row in own})} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    zoo = require_data(Path(arguments.data))
    rows = Rows("structured_peers", ("method", "scope", "share", "seed"), arguments.again)
    for seed in arguments.seeds or (0,):
        for share in (0.5,) if arguments.quick else SHARES:
            for name in SCORES:
                for scope in ("local", "global"):
                    if not rows.has(method=name, scope=scope, share=share, seed=seed):
                        rows.put(measure(zoo, name, scope, share, seed))


if __name__ == "__main__":
    main()
