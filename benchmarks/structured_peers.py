"""Units that Torch-Pruning would remove, removed by our loop: the same widths, batch norms and steps as for ours.

The package torch-pruning computes the scores (`pip install torch-pruning`): GroupMagnitude, GroupTaylor from the
gradient of all labelled images, GroupHessian from gradients of 200 single images. "local" removes equal shares of
all sites; "global" removes the lowest scores of the whole network until the multiplications are as few as asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import iobs
from iobs.core.patterns import Pattern
from iobs.core.quadratic import Quadratic, Solution
from iobs.pruning.structure.sites import checked_sites
from iobs.pruning.structure.trace import shortened
from iobs.pruning.structure.units import Site
from iobs.pruning.widths.costs import Products
from iobs.solvers.grouped.scores import GivenScores

SCORES, SCOPES = ("GroupMagnitude", "GroupTaylor", "GroupHessian"), ("local", "global")
NORMS, STEPS = " + batch norms", " + batch norms + steps"
METHODS = tuple(f"{score}, {scope}{stage}" for score in SCORES for scope in SCOPES for stage in ("", NORMS, STEPS))
_SINGLE = 200  # gradients of single images


@dataclass(frozen=True)
class PeerUnits:
    """A solver that keeps the units of highest score; a layer is known by its weight.

    Args:
        choices: weight matrix of a layer that reads units, and the score of every unit.
    """

    choices: tuple[tuple[Tensor, Tensor], ...]

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Keep whole groups of the centre unchanged."""
        centre = problem.centre().float()
        alike = [(weight, own) for weight, own in self.choices if weight.shape == centre.shape]
        # Damping moves the centre a little.
        distances = [float((weight.to(centre.device) - centre).norm()) for weight, _ in alike]
        return GivenScores(alike[distances.index(min(distances))][1])(problem, pattern)


def solver_and_widths(
    method: str, model: nn.Module, images: Tensor, labels: Tensor, share: float
) -> tuple[PeerUnits, dict[str, int]]:
    """The solver of a method and the width of every site, by its name.

    Args:
        method: one of `METHODS`.
        model: the dense network; its gradients are lost.
        images: calibration images, (n, channels, height, width).
        labels: of the images, (n,).
        share: of the multiplications in the layers that hold units, to remove.
    """
    name, scope = method.split(" + ")[0].split(", ")
    every = checked_sites(model, [shortened(images[:2])], inner=True).sites
    sites = [site for site in every if len(site.readers) == 1 and site.inner]
    assert all(site.kind != "heads" for site in sites), "the package groups heads by options of its pruner"
    scores = _scores(name, model, images, labels, sites)
    cost = Products.count(model, images[:2], tuple(sites)).held
    widths = _widths(scores, cost, share, scope)
    modules = dict(model.named_modules())
    weights = {site.name: modules[site.reader].weight.detach().clone().flatten(1) for site in sites}
    return PeerUnits(tuple((weights[name], scores[name]) for name in weights)), widths


@contextmanager
def fixed(widths: Mapping[str, int]) -> Iterator[None]:
    """Give sites these widths in `iobs.prune`, in place of those that it would choose."""
    with mock.patch("iobs.pruning.plan.widths.chosen_widths", return_value=dict(widths)):
        yield


def changes_of(method: str, solver: PeerUnits, steps: iobs.FineTune) -> dict[str, Any]:
    """Settings of `iobs.prune` for a method: no weight is changed but by batch norms and by the steps."""
    found: dict[str, Any] = {"solver": solver, "target": "layer", "bias": "keep", "batch_norm": "keep"}
    found |= {"batch_norm": "update"} if NORMS in method else {}
    return found | ({"finetune": steps} if STEPS in method else {})


def _scores(name: str, model: nn.Module, images: Tensor, labels: Tensor, sites: Sequence[Site]) -> dict[str, Tensor]:
    """The package's score of every unit, (units,), by name of the site."""
    import torch_pruning

    score: Any = getattr(torch_pruning.importance, f"{name}Importance")()
    graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=images[:1])
    loss = nn.functional.cross_entropy
    model.zero_grad()
    if name == "GroupTaylor":
        for part, own in zip(images.split(50), labels.split(50), strict=True):
            (loss(model(part), own, reduction="sum") / len(images)).backward()
    if name == "GroupHessian":
        score.zero_grad()
        for part, own in zip(images[:_SINGLE].split(1), labels[:_SINGLE].split(1), strict=True):
            model.zero_grad()
            loss(model(part), own).backward()
            score.accumulate_grad(model)
    found = {}
    for site in sites:
        writer = _writer(model, site)
        kind = "conv" if isinstance(writer, nn.Conv2d) else "linear"
        prune = getattr(torch_pruning, f"prune_{kind}_out_channels")
        group = graph.get_pruning_group(writer, prune, idxs=list(range(len(writer.weight))))
        found[site.name] = score(group).detach().double()
    model.zero_grad()
    return found


def _writer(model: nn.Module, site: Site) -> nn.Conv2d | nn.Linear:
    """The linear layer or dense convolution that writes the units of a site."""
    modules = (model.get_submodule(one.path) for one in site.writers if one.parameter == "weight")
    dense = (one for one in modules if isinstance(one, (nn.Conv2d, nn.Linear)) and getattr(one, "groups", 1) == 1)
    return next(dense)


def _widths(scores: Mapping[str, Tensor], cost: Products, share: float, scope: str) -> dict[str, int]:
    """The most units whose cost is at most the rest: of the highest scores, or of equal shares of all sites."""
    order = {name: values.argsort(descending=True).argsort() / len(values) for name, values in scores.items()}
    if scope == "global":
        order = {name: -values for name, values in scores.items()}
    limits = torch.cat([values.double() for values in order.values()]).sort().values

    def at(place: int) -> dict[str, int]:
        return {name: max(1, int((values.double() <= limits[place]).sum())) for name, values in order.items()}

    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = cost.of(at(middle)) <= (1 - share) * cost.of({})
        low, high = (middle, high) if fits else (low, middle - 1)
    return at(low)
