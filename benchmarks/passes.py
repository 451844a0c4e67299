"""Forward passes that a recipe costs, by phase, on three real networks.

    python benchmarks/passes.py --data FOLDER [--minilm FOLDER] [--networks llama encoder vit] [--recipes one-shot ...]

The networks and their calibration data are those of `blocks.py`. A pass is one forward pass of the whole calibration
set through the network, counted at the projection of the queries of every block. A call inside a gradient step counts
three times: forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import blocks
import torch
from rows import Row, Rows, commit, machine, measured, require_data

import iobs
from iobs.pruning.recipe import Recipe
from iobs.pruning.samples import batches

RECIPES: dict[str, Recipe] = {
    "magnitude": Recipe(solver="magnitude"),
    "one-shot, own target": Recipe(),
    "one-shot": Recipe.preset("one-shot"),
    "fast": Recipe.preset("fast"),
    "best": Recipe.preset("best"),
}
NETWORKS = ("llama", "encoder", "encoder-128", "vit")
# The phase of a call is the first of these files among its callers, from the outermost on.
PHASES = {
    "allocation/": "allocation",
    "calibration/chains.py": "chain",
    "calibration/sweep.py": "sweep",
    "reconstruction/": "steps",
    "descent/descent.py": "steps",
    "calibration/losses.py": "losses",
}


def phase() -> str:
    """The phase of the run that calls this function."""
    files = []
    frame = sys._getframe(1)
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    for file in reversed(files):
        for part, name in PHASES.items():
            if f"iobs/pruning/{part}" in file:
                return name
    return "other"


def measure(case: blocks.Case, name: str, recipe: str, level: str, seed: int) -> Row:
    """Prune a copy of a network, and count its passes."""
    module = copy.deepcopy(case.module)
    samples = sum(batches.size(batch) for batch in case.batches)
    with measured() as one, torch.no_grad():
        batches.forward(module, case.batches[0])
    whole = one.forward / batches.size(case.batches[0]) * samples
    total = blocks.counted(module, case.queries, phase)
    with torch.no_grad():
        for batch in case.batches:
            batches.forward(module, batch)
    one_pass = total.total()
    total.clear()
    began = time.process_time()
    with measured() as work:
        iobs.prune(module, case.batches, level, RECIPES[recipe], seed=seed)
    seconds = time.process_time() - began
    phases = {part: round(count / one_pass, 2) for part, count in sorted(total.items())}
    return {
        "network": name,
        "recipe": recipe,
        "level": level,
        "seed": seed,
        "passes": round(total.total() / one_pass, 2),
        "phases": phases,
        "products": round((work.forward + 2 * work.backward) / whole, 2),
        "score": round(case.score(module), 4),
        "processor_seconds": round(seconds, 1),
        "commit": commit(),
        "machine": machine(),
    }


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md: one table."""
    names = [*dict.fromkeys(part for row in rows for part in row["phases"])]
    lines = [
        "# Passes of the calibration data",
        "",
        "Made by `python benchmarks/passes.py --data FOLDER`. A pass is one forward pass of all calibration samples, "
        "counted at attention; a gradient step counts three times. *products*: the same for the multiply-adds of all "
        "modules with weights. Networks and samples are those of the section on block reconstruction.",
        "",
        f"| network | recipe | level | passes | {' | '.join(names)} | products | score |",
        "|---" * (6 + len(names)) + "|",
    ]
    for row in rows:
        cells = [f"{row['phases'].get(part, 0):g}" for part in names]
        lines.append(
            f"| {row['network']} | {row['recipe']} | {row['level']} | **{row['passes']:g}** | {' | '.join(cells)} "
            f"| {row['products']:g} | {row['score']:.4g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minilm", type=Path, default=Path())
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--recipes", nargs="*", choices=[*RECIPES], default=[*RECIPES])
    parser.add_argument("--level", default="50%")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="measure rows of other commits anew")
    given = parser.parse_args()
    torch.set_num_threads(1)
    zoo = require_data(given.data)
    rows = Rows("passes", ("network", "recipe", "level", "seed"), given.again)
    for name in given.networks:
        case = blocks.CASES[name](given.data, zoo, given.minilm)
        for recipe in given.recipes:
            if not rows.has(network=name, recipe=recipe, level=given.level, seed=given.seed):
                row = measure(case, name, recipe, given.level, given.seed)
                rows.put(row)
                print(row["passes"], row["phases"], row["products"], flush=True)


if __name__ == "__main__":
    main()
