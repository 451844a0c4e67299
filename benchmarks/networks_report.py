"""Tables of networks.py, from its rows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

from networks import ABLATIONS, NETWORKS, OURS, PEERS, SAMPLES
from rows import UNRECORDED
from scipy.stats import wilcoxon

OTHER_COUNT = 5e-4  # a share of zeros further than this from the one asked for is told
TITLES = {
    "resnet20": "ResNet-20, CIFAR-10",
    "mlpnet": "MLPNet, MNIST",
    "vit": "A small vision transformer, CIFAR-10",
    "llama_stories260K": "Llama of 260 thousand parameters, stories",
    "mobilenet": "MobileNetV1, 0.75 wide, ImageNet",
}
PLAIN = "best without blocks"
JUDGED_OTHERWISE = [f"{PLAIN}, {name}" for name in ("no polish", "task loss", "no augmentation")]  # loss or samples
# Each recipe, and it with one choice made otherwise, as far as their held-out losses can be compared.
VARIANTS = {
    "fast without blocks": [name for name in OURS if name.startswith("one shot")],
    PLAIN: [name for name in ABLATIONS if name not in JUDGED_OTHERWISE],
}


NOTES = {
    "resnet20": "The two downsampling convolutions stay dense and are not counted, for every method. One draw of 1,000 "
    "images differs much from another for CHITA: see the section on its own figures.",
    "mobilenet": "Each seed calibrates on 300 of 600 images and scores the other 300, on which the dense network has "
    "85.33, 86.33 and 86.33 (mean 86.00). Depthwise convolutions stay dense and are not counted. **At 30 and 40 % "
    "peers lead**: CBS, CHITA and SparseGPT have more accuracy than `best` at 30 %, SparseGPT at 40 %, by less than "
    "two points. By KL divergence (below) `best` leads at every sparsity.",
}


def tables(rows: list[dict[str, Any]]) -> str:
    """A table a network: mean over seeds, spread, seconds."""
    lines = [
        "# Accuracy of whole networks",
        "",
        "`python benchmarks/networks.py --ablations` (with `--quick`: seed 0, two sparsities).",
        "",
        f"- Calibration: {SAMPLES} samples (images, digits, stories), drawn by seed, and nothing else.",
        "- Scores: of the test files, on which nothing is chosen.",
        "- A cell: mean over seeds (lowest to highest; their number where not all were run), then seconds of the whole "
        "call on one thread: processor seconds (s), or for rows from before these were recorded wall seconds on a "
        "shared "
        "machine (s wall). Of wall seconds only the order of magnitude says something.",
        "- `best` takes some thousand gradient steps on the calibration samples (2,050 to 10,080 with the trials of "
        "learning rates; up to 4,800 on the whole network are kept), and `fast` some hundred on single blocks. The "
        "peers take none. The recipes *without blocks* have targets of the whole network's drift in place "
        "of block reconstruction; `fast` without blocks takes no step.",
        "- With one seed a difference under a point says nothing; on MobileNet one of several points.",
        "- Algorithm 2 to the letter sees the same samples in every round, where the paper draws new ones. It ends "
        "with "
        "the best round by held-out samples.",
        "- SparseGPT, CHITA, CBS and WoodFisher are this library's own forms of these methods (`docs/accuracy.md`).",
        "- **Stale rows.** The rows are of several commits, which `networks.jsonl` names. Made by older code: some "
        "ablations of the language model, of ViT and of MobileNet (an allocation from before 2e48af6, LOG.md), and "
        "`best without blocks` on the language model at 2:4. `make benchmarks AGAIN=--again` measures all rows of "
        "other commits anew.",
    ]
    for name, network in NETWORKS.items():
        own = [row for row in rows if row["network"] == name]
        if own:
            lines += network_table(name, network.score, list(network.sparsities), own)
    return "\n".join([*lines, *left_out(rows)]) + "\n"


def network_table(name: str, score: str, sparsities: list[str], own: list[dict[str, Any]]) -> list[str]:
    """The section of one network."""
    run_at = {row["level"] for row in own}
    levels = [*(level for level in sparsities if level in run_at), *sorted(run_at - {*sparsities})]
    seeds = sorted({row["seed"] for row in own})
    dense = {row["seed"]: row["dense"] for row in own if "dense" in row}
    stated = "" if not dense else f", dense {statistics.mean(dense.values()):.2f}"
    lines = ["", f"## {TITLES[name]} ({score}{stated}; seeds {', '.join(map(str, seeds))})", ""]
    lines += [NOTES[name], ""] if name in NOTES else []
    lines += [f"| method | {' | '.join(levels)} |", f"|---|{'---|' * len(levels)}"]
    for method in (*OURS, *PEERS, *ABLATIONS):
        entries = [
            entry([row for row in own if (row["method"], row["level"]) == (method, level)], len(seeds))
            for level in levels
        ]
        if any(entries):
            lines.append(f"| {method} | {' | '.join(entries)} |")
    return lines + divergences([row for row in own if "kl" in row], levels)


def divergences(rows: list[dict[str, Any]], levels: list[str]) -> list[str]:
    """KL to the dense network by method, and whether "best" is below each peer on the same images."""
    if not rows:
        return []
    lines = [
        "",
        'KL to the dense network, nats, mean over the images that were not calibrated on; in brackets that of "best" '
        "on the same images, where not all its seeds are shared, and p of its being as large as this: Wilcoxon's "
        "signed-rank test over images (each one's mean over the seeds of both).",
        "",
        f"| method | {' | '.join(levels)} |",
        f"|---|{'---|' * len(levels)}",
    ]

    def by_picture(method: str, level: str, seeds: set[int]) -> dict[str, float]:
        found = defaultdict(list)
        for row in rows:
            if (row["method"], row["level"]) == (method, level) and row["seed"] in seeds:
                for image, value in row["kl"].items():
                    found[image].append(value)
        return {image: statistics.mean(values) for image, values in found.items()}

    leader = "best" if any(row["method"] == "best" for row in rows) else PLAIN

    def cell(method: str, level: str) -> str:
        seeds = {
            name: {row["seed"] for row in rows if (row["method"], row["level"]) == (name, level)}
            for name in (leader, method)
        }
        if not seeds[method]:
            return ""
        mean = f"{statistics.mean(by_picture(method, level, seeds[method]).values()):.3f}"
        shared = seeds[leader] & seeds[method]
        if method == leader or not shared:
            return mean
        ours, theirs = by_picture(leader, level, shared), by_picture(method, level, shared)
        if ours == theirs:  # leader may be content with the projection of "fast"
            return f"{mean} (the same)"
        p = wilcoxon([ours[key] - theirs[key] for key in ours], alternative="less").pvalue
        beside = "" if shared == seeds[leader] else f"{statistics.mean(ours.values()):.3f}, "
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
    """Number of variants with a lower held-out loss."""
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
    return f"{statistics.mean(scores):.2f}{spread}{zeros}, {seconds_of(rows)}"


def seconds_of(rows: list[dict[str, Any]]) -> str:
    """Mean processor seconds; wall seconds where a row has no others."""
    if any(row["machine"] == UNRECORDED for row in rows):
        return f"{statistics.mean(row['seconds'] for row in rows):.0f} s wall"
    return f"{statistics.mean(row['processor_seconds'] for row in rows):.0f} s"
