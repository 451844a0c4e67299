"""The width of every site of a run that removes units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from iobs.core.column_groups import Groups
from iobs.core.patterns import Pattern
from iobs.core.structured import Structured
from iobs.errors import ModelError, PatternError
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.layerwise.problem import solver_of_groups
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.curves import CURVE_TOKENS, POSITIONS, TRIAL_SAMPLES, trial_answers, weights_written
from iobs.pruning.recipe import LossFunction
from iobs.pruning.report import AllocationRecord, JsonObject, allocation_record
from iobs.pruning.samples.batches import Samples
from iobs.pruning.structure.expected import can_copy
from iobs.pruning.structure.units import Site, take_biases
from iobs.pruning.widths.costs import CostModel, Products
from iobs.pruning.widths.knapsack import WidthChoice, choices_of, chosen_widths, possible_widths, require_reachable
from iobs.pruning.widths.latency import NAMES, Latency, measure, narrowed, shares_of
from iobs.pruning.widths.readers import (
    ReaderProblem,
    ReaderShare,
    SiteCurve,
    damage,
    joint_quadratic,
    softened,
    temperature_of,
)
from iobs.pruning.workspace import Workspace
from iobs.solvers import solve
from iobs.solvers.grouped.removal import removal_path
from iobs.solvers.grouped.system import GroupSystem, kept_groups

TIMINGS = 4  # most measurements of the whole network in an allocation by time
_CLOSE = 1.01  # measured times differ by this factor from run to run


def allocate_widths(workspace: Workspace, pattern: Structured) -> tuple[dict[Layer, Pattern], list[AllocationRecord]]:
    """Groups of every reader with the number of units to keep; for an allocation also the measurements behind it.

    Units that several layers read, or that share a reader with others, are chosen here. Their joint quadratic on the
    inputs of the dense model decides. All other units are chosen by the solver of their reader.
    """
    sites = workspace.request.sites

    def planned() -> JsonObject:
        widths, records, curves = _planned(workspace, pattern)
        chosen = _chosen_units(workspace, widths, curves)
        return {"widths": widths, "chosen": chosen, "records": [asdict(record) for record in records]}

    values = workspace.remembered("allocation", planned)
    widths, chosen = values["widths"], values["chosen"]
    if workspace.request.require_counts is not None:
        # Each width alone was tried before, all of them together were not.
        _require_counts(workspace.request.require_counts, widths)
    workspace.decided = replace(
        workspace.decided, widths={**widths, **{name: len(units) for name, units in chosen.items()}}
    )
    plan: dict[Layer, Pattern] = {}
    for layer, groups in workspace.request.patterns.items():
        assert isinstance(groups, Groups)
        read = sites.of(layer)
        if not read:  # refitted with all its columns
            plan[layer] = groups
        elif any(site.name in chosen for site in read):
            plan[layer] = sites.chosen(layer, chosen)
        else:
            plan[layer] = replace(groups, keep=widths[read[0].name], sparsity=None, multiple_of=1)
    return plan, [allocation_record(record) for record in values["records"]]


def _require_counts(require: Callable[[Mapping[str, int]], None], widths: Mapping[str, int]) -> None:
    """Raise, before any layer is solved, unless the model's class can have the widths together.

    Raises:
        ModelError: it cannot.
    """
    try:
        require(widths)
    except ModelError as error:
        raise ModelError(
            f"{error} The widths that fit this share cannot be loaded: ask for a slightly larger share, or for "
            "multiple_of=8; with uniform=False the network can be exported."
        ) from error


def _planned(workspace: Workspace, pattern: Structured) -> tuple[dict[str, int], list[AllocationRecord], Curves]:
    every = workspace.request.sites.sites
    latency, offered = None, dict(workspace.request.offered)
    if pattern.of == "latency":
        latency, offered = _timed(workspace, pattern, every)
    equal = workspace.recipe.division.criterion == "uniform"
    products = Products.count(workspace.store.model, workspace.fit.batches[0], every).held
    cost: CostModel = latency or (products.entries if pattern.of == "parameters" else products)
    limit = (1 - pattern.sparsity) * cost.of({})
    plain = choices_of(every, pattern, workspace.request.tied, None, offered)
    require_reachable(plain, cost, limit)  # before the curves, which can take minutes
    measuring = Curves(workspace)
    curves = {} if equal else measuring.measured()
    choices = plain if equal else choices_of(every, pattern, workspace.request.tied, curves, offered)
    if latency is not None:
        widths = _within_time(workspace, pattern, choices, latency, equal)
    else:
        widths = chosen_widths(choices, cost, limit, equal)
        _note_uncounted(workspace, choices, cost, widths)
    return widths, [_record(curve, widths[name]) for name, curve in curves.items()], measuring


def _note_uncounted(workspace: Workspace, choices: list[WidthChoice], cost: CostModel, widths: dict[str, int]) -> None:
    """Note the sites that keep all units because the samples that the cost is counted on do not call their layers."""
    for choice in choices:
        narrowest, *others = choice.widths
        if others and cost.of(choice.at(narrowest)) == cost.of({}) and widths[choice.sites[0]] == choice.widths[-1]:
            workspace.note(
                f"{', '.join(choice.sites)}: all units are kept, since no sample of the first calibration batch "
                "reaches them, so their removal would save nothing of the cost."
            )


def _chosen_units(workspace: Workspace, widths: dict[str, int], curves: Curves) -> dict[str, list[int]]:
    """Units that are kept, by name of the site, for the sites whose units no reader can choose alone.

    The sites are chosen one after another; columns of units that an earlier site lost are gone for the later ones.
    """
    sites = workspace.request.sites
    several = [site for site in sites.sites if not sites.single(site)]
    unread = [site for site in several if any(layer not in curves.readers for layer in sites.readers(site))]
    for _ in curves.read(unread):
        pass
    removed: dict[str, list[int]] = {}
    kept: dict[str, list[int]] = {}
    for site in several:
        width = widths[site.name]
        if width == site.count or any(layer not in curves.readers for layer in sites.readers(site)):
            kept[site.name] = list(range(site.count))
            continue
        problem, labels = joint_quadratic(curves.parts(site, removed))
        solution = solve(problem, Groups(tuple(labels.tolist()), keep=width), solver_of_groups(workspace.recipe.solver))
        kept[site.name] = kept_groups(solution.mask, labels).nonzero().flatten().tolist()
        removed[site.name] = sorted(set(range(site.count)) - set(kept[site.name]))
    return kept


def _timed(
    workspace: Workspace, pattern: Structured, sites: tuple[Site, ...]
) -> tuple[Latency, dict[str, tuple[int, ...]]]:
    """Times of the blocks of all sites, and the widths that are worth choosing."""
    offered = {site: possible_widths(pattern, site, offered=workspace.request.offered.get(site.name)) for site in sites}
    with _without_added(workspace):
        latency = measure(
            workspace.store.model, workspace.fit.batches[0], offered, pattern.runtime, samples=pattern.batch
        )
    for site in offered:
        if site.name not in latency.times:
            workspace.note(f"{site.name} keeps all units: the first sample does not call its block, so it has no time.")
    return latency, {site.name: latency.useful(site, widths) for site, widths in offered.items()}


@contextmanager
def _without_added(workspace: Workspace) -> Iterator[None]:
    """Context in which a model is without the biases of the run.

    The dense network does not compute them, and those of layers that also write units would not become narrower.
    """
    model = workspace.store.model
    taken = take_biases(model, workspace.request.added)
    try:
        yield
    finally:
        for path, bias in taken.items():
            model.get_submodule(path).register_parameter("bias", bias)


def _within_time(
    workspace: Workspace, pattern: Structured, choices: list[WidthChoice], latency: Latency, equal: bool
) -> dict[str, int]:
    """Widths whose network was measured to take at most the time that is asked.

    The times of blocks add up to the time of the network only roughly. So the limit is corrected by measurements of the
    whole network with the chosen widths.

    Args:
        workspace: state of the run; the model is dense.
        pattern: what is asked.
        choices: widths of every site, without those that a wider one beats.
        latency: measured times.
        equal: True for equal shares of all sites.
    """
    model, sites = workspace.store.model, workspace.request.sites.sites
    limit = (1 - pattern.sparsity) * latency.dense
    widths = chosen_widths(choices, latency, limit, equal)
    if not can_copy(model):
        return widths
    fastest: tuple[float, dict[str, int]] | None = None
    for _ in range(TIMINGS):
        with _without_added(workspace):
            narrow = narrowed(model, sites, widths)
            before, after = shares_of(model, narrow, workspace.fit.batches[0], pattern.runtime, samples=pattern.batch)
        share = after / before
        if fastest is None or share < fastest[0]:
            fastest = share, widths
        if share <= (1 - pattern.sparsity) * _CLOSE:
            return widths
        limit -= (share - 1 + pattern.sparsity) * latency.dense
        try:
            widths = chosen_widths(choices, latency, limit, equal)
        except PatternError:
            break
    assert fastest is not None
    workspace.note(
        f"The network takes {fastest[0]:.0%} of the dense time in {NAMES[pattern.runtime]}; asked were "
        f"{1 - pattern.sparsity:.0%}."
    )
    return fastest[1]


def _record(curve: SiteCurve, width: int) -> AllocationRecord:
    count = len(curve.damages) - 1
    shown = sorted({round(count * step / 16) for step in range(16)} | {count - width})
    return AllocationRecord(
        name=curve.layer.name,
        shape=curve.layer.shape,
        sparsities=[removed / count for removed in reversed(shown)],
        errors=[curve.damages[removed] / max(curve.energy, 1e-30) for removed in reversed(shown)],
        effects=[curve.damages[removed] for removed in reversed(shown)],
        chosen=1 - width / count,
    )


# ---- damage of the width of every site
# One pass of greedy removal on the layers that read the units gives it. Their rows are weighted by the Fisher
# information of the dense model, so that losses are nats of the model's loss. Units that are gone at all positions of a
# picture make errors that add up behind a pooling layer. So the divergence of the model is measured with some widths of
# one site alone, and corrects the losses. The trials of all sites share a fixed number of samples.
LEVELS = (0.25, 0.5, 0.75, 0.9)  # removed shares of a site at which the divergence is measured


@dataclass
class Curves:
    """Measurements of all sites of a dense model.

    Args:
        workspace: state of the run; the model is dense.

    Attributes:
        readers: problems of readers. Each holds a float64 Hessian, so a problem is dropped after the last use.
    """

    workspace: Workspace
    readers: dict[Layer, ReaderProblem] = field(default_factory=dict, init=False)

    @torch.no_grad()
    def measured(self) -> dict[str, SiteCurve]:
        """The curve of every site whose readers receive input, by its name.

        Only the problems of sites that several layers read, or that share a reader, are kept for the choice of units.
        """
        sites, curves = self.workspace.request.sites, dict[str, SiteCurve]()
        for layer in self.read(sites.sites):
            for site in sites.of(layer):
                if all(reader in self.readers for reader in sites.readers(site)):
                    curves[site.name] = self._curve(site)
                    if sites.single(site):
                        del self.readers[layer]
                    self.workspace.callbacks.on_measure("effects of widths", len(curves), len(sites.sites))
        return curves

    @torch.no_grad()
    def read(self, sites: Iterable[Site]) -> Iterator[Layer]:
        """Collect the problems of the readers of some sites, and name each layer once its problem is known."""
        workspace = self.workspace
        layers = dict.fromkeys(layer for site in sites for layer in workspace.request.sites.readers(site))
        if not layers:
            return
        sweep = Sweep(
            workspace.store.model,
            workspace.fit.first(workspace.fit.samples, CURVE_TOKENS),
            Samples([], []),
            tuple(layers),
            workspace.chain,
            moments=Moments(workspace.request.seed, POSITIONS, means=True),
        )
        biases = workspace.biases()
        for group in sweep.groups():
            statistics = group.statistics()
            for layer in group.layers:
                free = layer in biases
                self.readers[layer] = ReaderProblem.of(
                    workspace.store.model,
                    layer,
                    statistics,
                    damping=workspace.recipe.damping,
                    bias=free,
                    fisher=workspace.fisher,
                )
                yield layer

    def parts(self, site: Site, removed: Mapping[str, Iterable[int]]) -> tuple[ReaderShare, ...]:
        """The readers of a site, after the removal of units of other sites."""
        sites = self.workspace.request.sites
        return tuple(
            ReaderShare(self.readers[layer], sites.columns(site, layer), sites.mask(layer, removed))
            for layer in sites.readers(site)
        )

    def _curve(self, site: Site) -> SiteCurve:
        parts, sites = self.parts(site, {}), self.workspace.request.sites
        reader = parts[0].reader
        if sites.single(site):
            problem, labels = reader.problem, sites.groups(reader.layer).labels(reader.layer.shape[1])
        else:
            problem, labels = joint_quadratic(parts)
        path = removal_path(GroupSystem.of(problem, labels))
        losses, count = [0.0, *path.losses], len(path.order)
        removals = sorted({min(count - 1, round(share * count)) for share in LEVELS} - {0})
        if removals and self._answers.batches:

            def measured() -> JsonObject:
                return {"damages": [self._damage(site, parts, path.order[:removed]) for removed in removals]}

            damages = self.workspace.checkpoint.remembered(f"damages of {site.name}", measured)["damages"]
            points = [(losses[removed], value) for removed, value in zip(removals, damages, strict=True)]
            losses = corrected(losses, points)
        return SiteCurve(reader.layer, losses, sum(part.reader.energy for part in parts))

    @cached_property
    def _answers(self) -> Samples:
        """Samples of the trials with the outputs of the dense model; none if the trials of all sites cost too much."""
        samples = 2 * TRIAL_SAMPLES // (len(LEVELS) * len(self.workspace.request.sites.sites))
        return trial_answers(self.workspace, samples)

    @cached_property
    def _loss(self) -> LossFunction:
        return softened(temperature_of(self._answers))

    def _damage(self, site: Site, parts: tuple[ReaderShare, ...], gone: list[int]) -> float:
        """Softened divergence from the dense model to that without some units of a site, whose readers are refitted."""
        model, sites = self.workspace.store.model, self.workspace.request.sites
        weights, biases = dict[Layer, Tensor](), dict[str, Tensor]()
        names = self.workspace.biases()
        for part in parts:
            layer = part.reader.layer
            weight, bias = part.reader.change(sites.mask(layer, {site.name: gone}))
            weights[layer] = layer.read(model).double() + weight
            if bias is not None:
                name = names[layer]
                biases[name] = model.get_parameter(name).detach() + bias
        with weights_written(model, weights, biases):
            return damage(model, self._answers, self._loss)


def corrected(losses: list[float], points: list[tuple[float, float]]) -> list[float]:
    """Losses times a factor that is interpolated, over their logarithm, between measured (loss, damage).

    The damages rise with the losses: a measured fall is noise.
    """
    values = np.maximum.accumulate(np.array(losses))
    x, y = (np.array(side) for side in zip(*points, strict=True))
    y = np.maximum.accumulate(y)
    usable, positive = (x > 0) & (y > 0), values > 0
    if usable.any():
        x, factors = np.log(x[usable]), np.log(y[usable]) - np.log(x[usable])
        values[positive] *= np.exp(np.interp(np.log(values[positive]), x, factors))
    return [float(value) for value in np.maximum.accumulate(values)]
