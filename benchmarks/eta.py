"""Time left as it is foretold during a run, against the truth.

    python benchmarks/eta.py --data FOLDER [--networks resnet20 ...] [--recipes fast best] [--samples 300]

Every row is one run: the whole time that was foretold (spent so far and left) divided by the true whole time, at shares
of the run. Times are processor time of one thread, so that a busy machine does not matter. With --most-steps the
fine-tuning of "best" is shorter than usual.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networks
import torch
from rows import require_data

import iobs
from iobs.pruning.callbacks import ProgressBar
from iobs.pruning.cost import prices
from iobs.pruning.recipe import Recipe

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)
LEVELS = {"resnet20": 0.8, "vit": 0.7, "mobilenet": 0.7, "llama_stories260K": 0.5}


class Watch(ProgressBar):
    """Keeps the time and the time left at every update."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        super().__init__(SimpleNamespace(update=self._keep), clock=time.process_time)  # type: ignore[arg-type]

    def _keep(self, share: float, total: float, text: str | None, left: float | None) -> None:
        if left is not None:
            self.seen.append((time.process_time(), left))


def run(name: str, recipe: Recipe, samples: int, zoo: Any, folder: Path) -> tuple[float, list[float]]:
    """Seconds of a run, and the ratio foretold / true at each of `SHARES`."""
    networks.SAMPLES = samples
    network = networks.NETWORKS[name]
    case = network.load(zoo, folder, 0)
    batches = case.batches[: max(1, samples // 25)] if name == "mobilenet" else case.batches
    watch = Watch()
    began = time.process_time()
    iobs.prune(case.module, batches, LEVELS[name], recipe, callbacks=[watch], ignore=network.ignore)
    whole = time.process_time() - began
    ratios = []
    for share in SHARES:
        now, left = next((entry for entry in watch.seen if entry[0] - began >= share * whole), watch.seen[-1])
        ratios.append((now - began + left) / whole)
    return whole, ratios


def main() -> None:
    """Run the networks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--networks", nargs="*", default=[*LEVELS])
    parser.add_argument("--recipes", nargs="*", default=["fast", "best"])
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--most-steps", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prices.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    zoo = require_data(arguments.data)
    print(f"| network | recipe | seconds | {' | '.join(f'at {share:.0%}' for share in SHARES)} |")
    print(f"| --- | --- |{' ---: |' * (len(SHARES) + 1)}")
    for name in arguments.networks:
        for preset in arguments.recipes:
            recipe = Recipe.preset(preset)
            if recipe.finetune is not None and arguments.most_steps is not None:
                recipe = recipe.but(finetune=replace(recipe.finetune, steps=200, most_steps=arguments.most_steps))
            whole, ratios = run(name, recipe, arguments.samples, zoo, arguments.data)
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {name} | {preset} | {whole:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
