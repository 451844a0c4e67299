"""Damage of the width of every site, from one pass of greedy removal on the layers that read its units.

Their rows are weighted by the Fisher information of the dense model, so that losses are nats of the model's loss. Units
that are gone at all positions of a picture make errors that add up behind a pooling layer. So the divergence of the
model is measured with some widths of one site alone, and corrects the losses. The trials of all sites share a fixed
number of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan.curves import CURVE_TOKENS, POSITIONS, TRIAL_SAMPLES, trial_answers, weights_written
from iobs.pruning.recipe import LossFunction
from iobs.pruning.report import JsonObject
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.structure.units import Site
from iobs.pruning.widths.readers import (
    Part,
    ReaderProblem,
    SiteCurve,
    damage,
    joint_quadratic,
    softened,
    temperature_of,
)
from iobs.pruning.workspace import Workspace
from iobs.solvers.grouped.removal import removal_path
from iobs.solvers.grouped.system import GroupSystem

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
        for group in sweep.groups():
            statistics = group.statistics()
            for layer in group.layers:
                free = layer in workspace.biases
                self.readers[layer] = ReaderProblem.of(
                    workspace.store.model,
                    layer,
                    statistics,
                    damping=workspace.recipe.damping,
                    bias=free,
                    fisher=workspace.fisher,
                )
                yield layer

    def parts(self, site: Site, removed: Mapping[str, Iterable[int]]) -> tuple[Part, ...]:
        """The readers of a site, after the removal of units of other sites."""
        sites = self.workspace.request.sites
        return tuple(
            Part(self.readers[layer], sites.columns(site, layer), sites.mask(layer, removed))
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
        tried = sorted({min(count - 1, round(share * count)) for share in LEVELS} - {0})
        if tried and self._answers.batches:

            def measured() -> JsonObject:
                return {"damages": [self._damage(site, parts, path.order[:removed]) for removed in tried]}

            damages = self.workspace.checkpoint.remembered(f"damages of {site.name}", measured)["damages"]
            points = [(losses[removed], value) for removed, value in zip(tried, damages, strict=True)]
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

    def _damage(self, site: Site, parts: tuple[Part, ...], gone: list[int]) -> float:
        """Softened divergence from the dense model to that without some units of a site, whose readers are refitted."""
        model, sites = self.workspace.store.model, self.workspace.request.sites
        weights, biases = dict[Layer, Tensor](), dict[str, Tensor]()
        for part in parts:
            layer = part.reader.layer
            weight, bias = part.reader.change(sites.mask(layer, {site.name: gone}))
            weights[layer] = layer.read(model).double() + weight
            if bias is not None:
                name = self.workspace.biases[layer]
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
    known, positive = (x > 0) & (y > 0), values > 0
    if known.any():
        x, factors = np.log(x[known]), np.log(y[known]) - np.log(x[known])
        values[positive] *= np.exp(np.interp(np.log(values[positive]), x, factors))
    return [float(value) for value in np.maximum.accumulate(values)]
