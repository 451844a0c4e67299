"""Tables of grid.py, from its rows."""

from __future__ import annotations

import statistics

from grid import ALTERED, ONE_SHOT, PLAIN, RECIPES, SOLVERS, SQUARES, STEPPED, TARGETED, whole_network
from networks import NETWORKS
from networks_report import TITLES
from rows import Row

INTRODUCTION = """# Solver and recipe told apart

`python benchmarks/grid.py` (with `--quick`: seed 0 and the cheaper cells). What is worth how much: the solver of a
layer, or the recipe around it? Each column adds one part of the recipe to the column before it.

- **one shot**: each layer once, its own weights as target, the same sparsity everywhere. CHITA and global magnitude
  divide the zeros among the layers themselves and have no layer targets, so they have no entry in the next three
  columns.
- **+ allocation**: the counts per layer that `fast` chose with our solver, the same for all solvers.
- **+ targets**: a layer matches the dense network's output, or its sum with the residual where there is one.
- **+ blocks**: a short reconstruction of each block, which fits the weights that are left. With our solver: `fast`.
- **+ steps**: then the same gradient steps on the mask, for every solver (their number stands under the table).
- **best**: the recipe `best` with this solver, which also searches for the allocation with this solver.

"Magnitude", "Wanda", "SparseGPT" and "CHITA" are this library's own forms. "ALPS-like ADMM" is
`benchmarks/alps_like.py`, written from the paper; the authors' own code runs in the layer race. "Ours" is `ADMM()`.
A cell: mean over seeds (number of seeds), processor seconds. An empty cell was not measured yet."""

WORK = """The work of a run, medians over solvers. Gradient steps include the trials of learning rates. Passes are those
of one sample through the whole network. The columns before `best` do not include the measurements of the
allocation."""

HEADLINE = """`best` takes thousands of gradient steps on the calibration samples, which no one-shot peer does: up to
4,800 that are kept, 8,640 with the trials of learning rates. Along a line stands what the parts of the recipe are
worth with one solver. The last lines of each network are what the solver is worth in each recipe: the lead of ours
over the better of magnitude and SparseGPT, and over ALPS-like ADMM, which is much nearer."""


def tables(rows: list[Row]) -> str:
    """A table a network and sparsity, the work of each recipe, and batch norm."""
    lines = [INTRODUCTION, *worth(rows)]
    for network in NETWORKS:
        for level in sorted({row["level"] for row in rows if row["network"] == network}):
            own = [row for row in rows if (row["network"], row["level"]) == (network, level)]
            if any(row["recipe"] in RECIPES for row in own):
                lines += grid_table(network, level, own)
    lines += batch_norm(rows)
    return "\n".join(lines) + "\n"


def grid_table(network: str, level: str, own: list[Row]) -> list[str]:
    """Solvers by recipes, and the work of the recipes."""
    score, dense = NETWORKS[network].score, own[0]["dense"]
    lines = ["", f"## {TITLES[network]}, {float(level):.0%} zeros ({score}, dense {dense:.2f})", ""]
    lines += [f"| solver | {' | '.join(RECIPES)} |", "|---" * (len(RECIPES) + 1) + "|"]
    for solver in SOLVERS:
        cells = [cell(solver, recipe, own) for recipe in RECIPES]
        if any(cells):
            lines.append(f"| {solver} | {' | '.join(cells)} |")
    lines += ["", WORK]
    lines += ["", "| recipe | gradient steps | kept in the result | forward passes | backward passes |"]
    lines += ["|---|---|---|---|---|"]
    for recipe in RECIPES:
        found = [row for row in own if row["recipe"] == recipe]
        if found:
            names = ("steps", "steps_kept", "forward", "backward")
            medians = [f"{statistics.median(row[name] for row in found):,.0f}" for name in names]
            lines.append(f"| {recipe} | {' | '.join(medians)} |")
    return lines


def cell(solver: str, recipe: str, own: list[Row]) -> str:
    """Score, seeds and seconds."""
    if whole_network(solver) and recipe not in (ONE_SHOT, STEPPED):
        return "-"
    found = [row for row in own if (row["solver"], row["recipe"]) == (solver, recipe)]
    if not found:
        return ""
    score, seconds = (statistics.mean(row[name] for row in found) for name in ("score", "processor_seconds"))
    return f"{score:.2f} ({len(found)}), {seconds:.0f} s"


def mean_of(rows: list[Row], network: str, solver: str, recipe: str) -> float | None:
    """The mean score over seeds, at the network's own level; None if it was not measured."""
    level = SQUARES[network].level
    key = (network, solver, recipe, level)
    found = [row["score"] for row in rows if (row["network"], row["solver"], row["recipe"], row["level"]) == key]
    return statistics.mean(found) if found else None


OURS, NEAREST = "ours (ADMM)", "ALPS-like ADMM"
COMPARED = ("magnitude", "SparseGPT", NEAREST, OURS)
BEATEN = {"the better of magnitude and SparseGPT": ("magnitude", "SparseGPT"), NEAREST: (NEAREST,)}


def worth(rows: list[Row]) -> list[str]:
    """The headline: the scores along the recipes, with the simplest solver, two peers and ours."""
    lines = ["", "## What each part is worth", "", HEADLINE, ""]
    for network in NETWORKS:
        scores = {(solver, recipe): mean_of(rows, network, solver, recipe) for solver in COMPARED for recipe in RECIPES}
        for solver in COMPARED:
            chain = [
                f"{recipe} {scores[solver, recipe]:.1f}" for recipe in RECIPES if scores[solver, recipe] is not None
            ]
            if len(chain) > 1:
                lines.append(f"- {TITLES[network]}, {solver}: {', '.join(chain)}.")
        for name, others in BEATEN.items():
            solvers = (*others, OURS)
            leads = [(recipe, lead(network, [scores[solver, recipe] for solver in solvers])) for recipe in RECIPES]
            told = [f"{recipe} {value:+.1f}" for recipe, value in leads if value is not None]
            if told:
                lines.append(f"- {TITLES[network]}, lead of our solver over {name}: {', '.join(told)}.")
    return lines


def lead(network: str, scores: list[float | None]) -> float | None:
    """How much better the last score is than the best of the others; None if it or one of them was not measured."""
    if any(score is None for score in scores):
        return None
    sign = -1 if NETWORKS[network].score == "perplexity" else 1
    return sign * scores[-1] - max(sign * score for score in scores[:-1])


def batch_norm(rows: list[Row]) -> list[str]:
    """Scores with batch-norm statistics estimated again."""
    bases = [(ONE_SHOT, "one shot"), (TARGETED, TARGETED)]
    own = [row for row in rows if any(row["recipe"] == f"{base}, {PLAIN}" for base, _ in bases)]
    if not own:
        return []
    lines = [
        "",
        "## Batch-norm statistics estimated again",
        "",
        "After pruning, the running statistics are averaged over the calibration images, and nothing else changes "
        '(`torch.optim.swa_utils.update_bn`, or `batch_norm="update"` in a recipe). The checkpoint of ResNet-20 was '
        "trained on altered images (mirrored, shifted by up to 4 pixels), and has the statistics of such images. "
        "Estimated again on plain images the *dense* network falls from 91.70 to 87.98; on altered images it keeps "
        "91.70 (measured once). So the last column is the fair one there. Magnitude gains most: the statistics repair "
        "what pruning without dense targets does to the scale of each channel.",
        "",
        "| network, sparsity | solver | recipe | statistics kept | on the images | on altered images |",
        "|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((row["network"], row["level"], row["solver"], row["recipe"].split(", ")[0]) for row in own)
    for network, level, solver, base in keys:
        means = []
        for recipe in (base, f"{base}, {PLAIN}", f"{base}, {ALTERED}"):
            key = (network, level, solver, recipe)
            scores = [r["score"] for r in rows if (r["network"], r["level"], r["solver"], r["recipe"]) == key]
            means.append(f"{statistics.mean(scores):.2f}" if scores else "")
        name = f"{TITLES[network].split(',')[0]}, {float(level):.0%}"
        lines.append(f"| {name} | {solver} | {base} | {' | '.join(means)} |")
    return lines
