"""Solver and recipe told apart: every solver in every recipe, on every network, with the work that each run takes.

    python benchmarks/grid.py --data FOLDER [--quick] [--networks mlpnet ...] [--solvers magnitude ...] [--seeds 0 1 2]

A row a run is appended to results/grid.jsonl. Runs that have a row are skipped, so the grid can be stopped and
continued. The recipes build on each other:

    one shot        each layer once, its own weights as target; solvers of one layer give every layer the same sparsity
    + allocation    the same solver under the counts per layer that "fast" chose with ours
    + targets       residual sums and outputs of the dense network as targets
    + blocks        the short block reconstruction of "fast"; with our solver this is "fast"
    + batch norm    batch-norm statistics estimated again on the calibration images; a branch, which nothing builds on
    + steps         the same gradient steps on the final mask for every solver
    best            the recipe "best" with this solver

A solver of the whole network (CHITA, global magnitude) divides the zeros itself and has no layer targets, so it skips
the second and the third recipe.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from alps_like import ALPSLike
from networks import BEST, FAST, NETWORKS, Case, dense_work
from rows import Row, Rows, Work, level_name, measured, parser, require_data, stamp, warm_up
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import iobs

SOLVERS: dict[str, Any] = {
    "magnitude": "magnitude",
    "global magnitude": iobs.GlobalMagnitude(),
    "Wanda": "wanda",
    "SparseGPT": "sparsegpt",
    "CHITA": iobs.CHITA(),
    "ALPS-like ADMM": ALPSLike(),
    "ours (ADMM)": "admm",
}
OURS = "ours (ADMM)"
ONE_SHOT, ALLOCATED, TARGETED, FITTED, STEPPED, WHOLE = (
    "one shot",
    "+ allocation",
    "+ targets",
    "+ blocks",
    "+ steps",
    "best",
)
RECIPES = (ONE_SHOT, ALLOCATED, TARGETED, FITTED, STEPPED, WHOLE)
PLAIN, ALTERED = "batch norm on the images", "batch norm on altered images"
KEYS = ("network", "level", "solver", "recipe", "seed")


@dataclass(frozen=True)
class Square:
    """One network of the grid: its sparsity, its gradient steps, and those of its recipes that `--quick` runs."""

    level: str
    steps: iobs.FineTune
    quick: tuple[str, ...] = ()


def steps(count: int, **changes: Any) -> iobs.FineTune:
    """The fine-tuning of "best" with `count` steps."""
    return replace(BEST.finetune, steps=count, most_steps=None, **changes)


ADAM = {"optimizer": "adam", "lr": 1e-3}
SQUARES = {
    "mlpnet": Square("0.98", BEST.finetune, RECIPES),
    "resnet20": Square("0.8", steps(300, **ADAM), RECIPES[:4]),
    "vit": Square("0.7", steps(300, **ADAM), (ONE_SHOT, TARGETED)),
    "mobilenet": Square("0.6", steps(60, **{**ADAM, "lr": 1e-4}), ()),
    "llama_stories260K": Square("0.5", steps(100, **ADAM), ()),
}


def whole_network(solver: str) -> bool:
    """Check that a solver prunes all layers together."""
    return isinstance(SOLVERS[solver], iobs.GlobalMagnitude | iobs.CHITA)


def recipe_of(square: Square, solver: str, recipe: str, keeps: dict[str, int] | None) -> iobs.Recipe:
    """The recipe of a run.

    Args:
        square: of the network.
        solver: key of `SOLVERS`.
        recipe: one of `RECIPES`.
        keeps: number of kept entries by layer, for the recipes with an allocation.
    """
    chosen = SOLVERS[solver]
    if recipe == WHOLE:
        return BEST.but(solver=chosen)
    found = iobs.Recipe(solver=chosen)
    if recipe != ONE_SHOT and keeps is not None:
        rules = tuple(iobs.Rule(f"re:{re.escape(name)}", iobs.Unstructured(keep=keep)) for name, keep in keeps.items())
        found = found.but(rules=rules)
    if recipe in (TARGETED, FITTED, STEPPED) and not whole_network(solver):
        found = found.but(target=FAST.target)
    if recipe in (FITTED, STEPPED) and not whole_network(solver):
        found = found.but(blocks=FAST.blocks)
    return found.but(finetune=square.steps) if recipe == STEPPED else found


def recipes_of(solver: str) -> tuple[str, ...]:
    """The recipes that a solver can run in."""
    return (ONE_SHOT, STEPPED) if whole_network(solver) else RECIPES


def allocation(case: Case, level: str, ignore: str | None, seed: int) -> dict[str, int]:
    """The number of entries that every layer keeps by the recipe "fast"."""
    report = iobs.prune(case.module, case.batches, level, FAST, ignore=ignore, seed=seed)
    return {row.name: row.weights - row.zeros for row in report.audit}


def run(case: Case, recipe: iobs.Recipe, level: str, ignore: str | None, seed: int) -> tuple[iobs.Report, Work]:
    """Prune the network of a case in place."""
    holdout = 0.0 if recipe.network_solver is not None and recipe.finetune is None else 0.1
    with measured() as work:
        report = iobs.prune(case.module, case.batches, level, recipe, ignore=ignore, holdout=holdout, seed=seed)
    return report, work


def normed(network: str, case: Case, seed: int) -> Iterator[tuple[str, float, Work]]:
    """Scores with batch-norm statistics estimated again; the weights stay, and the statistics come back."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in case.module.modules()):
        return
    before = copy.deepcopy(case.module.state_dict())
    images = torch.cat([batch[0] for batch in case.batches])
    choices: dict[str, Callable[[], Tensor]] = {PLAIN: lambda: images}
    if network == "resnet20":
        choices[ALTERED] = lambda: altered(images, seed)
    for name, make in choices.items():
        with measured() as work:
            update_bn(make().split(100), case.module)
            case.module.eval()
        yield name, case.score(case.module), work
        case.module.load_state_dict(before)


def altered(images: Tensor, seed: int) -> Tensor:
    """Images as the checkpoint was trained on them: mirrored and shifted by up to 4 pixels, at random."""
    generator = torch.Generator().manual_seed(seed)
    size, count = images.shape[-1], len(images)
    framed = nn.functional.pad(images, (4, 4, 4, 4), value=-1.0)
    places = torch.randint(0, 9, (count, 2), generator=generator).tolist()
    cut = torch.stack([one[:, y : y + size, x : x + size] for one, (y, x) in zip(framed, places, strict=True)])
    mirrored = torch.rand(count, generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], cut.flip(3), cut)


def fill(rows: Rows, zoo: Any, options: Any, network: str, level: str, seed: int) -> None:
    """Run what is missing of one network at one sparsity with one seed."""
    square, ignore = SQUARES[network], NETWORKS[network].ignore
    dense: dict[str, float] = {}
    wanted = options.recipes or (square.quick if options.quick else RECIPES)
    for recipe in wanted:
        for solver in options.solvers:
            key = {"network": network, "level": level, "solver": solver, "recipe": recipe, "seed": seed}
            if recipe not in recipes_of(solver) or rows.has(**key):
                continue
            keeps = shared_counts(rows, zoo, options, key) if recipe not in (ONE_SHOT, WHOLE) else None
            case = NETWORKS[network].load(zoo, options.data, seed)
            dense = dense or {"dense": case.score(case.module), "work": dense_work(case)}
            asked = recipe_of(square, solver, recipe, None if whole_network(solver) else keeps)
            report, work = run(case, asked, level, ignore, seed)
            taken = sum(len(record.step_losses) for record in report.rounds)
            kept = len(report.best.step_losses)
            common = {"dense": dense["dense"], "sparsity": report.sparsity, **stamp(seed)}
            counts = {"steps_after": taken, "steps_kept": kept, **work.fields(dense["work"])}
            score = case.score(case.module)
            after = list(normed(network, case, seed)) if recipe in (ONE_SHOT, TARGETED) else []
            for name, value, extra in after:
                branch = {**key, "recipe": f"{recipe}, {name}"}
                rows.put({**branch, "score": value, **common, **extra.fields(dense["work"])})
            rows.put({**key, "score": score, **common, **counts})


def shared_counts(rows: Rows, zoo: Any, options: Any, key: Row) -> dict[str, int]:
    """The counts per layer that all solvers share, from the rows or measured now."""
    asked = {**key, "solver": OURS, "recipe": "fast"}
    if not rows.has(**asked):
        network, level, seed = key["network"], key["level"], key["seed"]
        case = NETWORKS[network].load(zoo, options.data, seed)
        dense, per_sample = case.score(case.module), dense_work(case)
        with measured() as work:
            keeps = allocation(case, level, NETWORKS[network].ignore, seed)
        found = {"score": case.score(case.module), "dense": dense, "keeps": keeps}
        rows.put({**asked, **found, **stamp(seed), **work.fields(per_sample)})
    return next(row["keeps"] for row in rows.all if all(row.get(name) == asked[name] for name in KEYS))


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--networks", nargs="*", default=list(SQUARES), choices=list(SQUARES))
    options_of.add_argument("--solvers", nargs="*", default=list(SOLVERS), choices=list(SOLVERS))
    options_of.add_argument("--recipes", nargs="*", choices=RECIPES)
    options_of.add_argument("--levels", nargs="*", type=level_name, help="sparsities; by default one a network")
    options = options_of.parse_args()
    torch.set_num_threads(1)
    warm_up(*(iobs.Recipe(solver=solver) for solver in SOLVERS.values()))
    zoo, rows = require_data(options.data), Rows("grid", KEYS, options.again)
    for network in options.networks:
        for seed in options.seeds or ([0] if options.quick else [0, 1, 2]):
            for level in options.levels or [SQUARES[network].level]:
                fill(rows, zoo, options, network, level, seed)


if __name__ == "__main__":
    main()
