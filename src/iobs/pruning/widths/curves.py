"""Effect of the width of every site on the loss, from one pass of greedy removal and a few trials.

Greedy removal gives the error of the reader at all widths. The divergence from the dense network is measured with some
widths of one site alone. Between them it is interpolated as a power of the error, which makes it monotone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import nn

from iobs.pruning.allocation.measurements import fit_and_evaluation
from iobs.pruning.allocation.sensitivity import CURVE_TOKENS, PROBE, PROBE_TOKENS
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.losses import answered
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import LossFunction
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.structure.units import Site
from iobs.pruning.structure.units_of_layers import SitesOfLayers
from iobs.pruning.widths.readers import Part, ReaderProblem, Solved, joint_quadratic
from iobs.pruning.widths.softened import damage, softened, temperature_of
from iobs.solvers.grouped.removal import RemovalPath, removal_path
from iobs.solvers.grouped.system import GroupSystem

LEVELS = (0.25, 0.5, 0.75, 0.9)  # removed shares at which the divergence is measured
_POSITIONS = 16  # positions per sample of a convolution


@dataclass(frozen=True)
class SiteCurve:
    """Error of the readers and effect on the loss at every width of a site.

    Attributes:
        layer: the first reader.
        errors: (units + 1,), squared output error of the reader per input row after 0, 1, ... removals. For several
            readers the sum of their relative errors.
        effects: (units + 1,), KL divergence from the dense network in nats.
        energy: squared output per input row, or the number of readers.
    """

    layer: Layer
    errors: list[float]
    effects: list[float]
    energy: float

    def effect(self, width: int) -> float:
        """The effect with `width` units left."""
        return self.effects[len(self.effects) - 1 - width]


@dataclass(frozen=True)
class _Path:
    """Greedy removal of the units of a site.

    Attributes:
        site: the site.
        removal: its units in the order of their removal.
        parts: its readers.
    """

    site: Site
    removal: RemovalPath
    parts: tuple[Part, ...]

    def gone(self, width: int) -> list[int]:
        """The removed units with `width` units left."""
        return self.removal.order[: self.site.count - width]


@dataclass
class Curves:
    """Measurements of all sites of a dense model.

    Args:
        model: the dense model; restored after every trial.
        sites: with the layers that read them.
        biases: names of the biases that are refitted, by reader.
        chain: blocks along which the model can be run.
        calibration: calibration samples.
        heldout: held-out samples of the run.
        damping: relative to the mean of each Hessian's diagonal.
        seed: of every random choice.
        on_progress: called with (task, done, total).
        checkpoint: keeps the damages of every site.
    """

    model: nn.Module
    sites: SitesOfLayers
    biases: Mapping[Layer, str]
    chain: list[Block]
    calibration: Samples
    heldout: Samples
    damping: float
    seed: int
    on_progress: Callable[[str, int, int], None]
    checkpoint: Checkpoint
    # Problems of readers: each holds a float64 Hessian, so a problem is dropped after the last use.
    readers: dict[Layer, ReaderProblem] = field(default_factory=dict, init=False)
    _paths: dict[str, _Path] = field(default_factory=dict, init=False)

    @cached_property
    def _parts(self) -> tuple[Samples, Samples]:
        """Samples that readers are solved for, and samples that divergences are measured on."""
        fit, judged = fit_and_evaluation(self.calibration, self.heldout, self.seed)
        return fit, judged if judged.batches else fit

    @cached_property
    def _answered(self) -> Samples:
        """Samples with the outputs of the dense model."""
        return answered(self.model, self._parts[1].first(PROBE, PROBE_TOKENS))

    @cached_property
    def _loss(self) -> LossFunction:
        """The damage of a trial."""
        return softened(temperature_of(self._answered))

    @torch.no_grad()
    def measured(self) -> dict[str, SiteCurve]:
        """The curve of every site whose readers receive input, by its name.

        Only the problems of sites that several layers read, or that share a reader, are kept for the choice of units.
        """
        untouched = self.damage({})
        found: dict[str, SiteCurve] = {}
        for layer in self.read(self.sites.sites):
            for site in self.sites.of(layer):
                if all(one in self.readers for one in self.sites.readers(site)):
                    found[site.name] = self._curve(site, untouched)
                    del self._paths[site.name]
                    if self.sites.single(site):
                        del self.readers[layer]
                    self.on_progress("effects of widths", len(found), len(self.sites.sites))
        return found

    @torch.no_grad()
    def read(self, sites: Iterable[Site]) -> Iterator[Layer]:
        """Collect the problems of the readers of some sites, and name each layer once its problem is known."""
        wanted = dict.fromkeys(layer for site in sites for layer in self.sites.readers(site))
        if not wanted:
            return
        fit = self._parts[0]
        sweep = Sweep(
            self.model,
            fit.first(fit.samples, CURVE_TOKENS),
            Samples([], []),
            tuple(wanted),
            self.chain,
            moments=Moments(self.seed, _POSITIONS, means=True),
        )
        for group in sweep.groups():
            statistics = group.statistics()
            for layer in group.layers:
                bias = self.biases.get(layer)
                self.readers[layer] = ReaderProblem.of(self.model, layer, statistics, self.damping, bias)
                yield layer

    def damage(self, widths: Mapping[str, int]) -> float:
        """KL divergence from the dense model if some sites, by name, have other widths; readers are solved alone."""
        removed = {name: self._paths[name].gone(width) for name, width in widths.items()}
        parts = [part.reader for name in widths for part in self._paths[name].parts]
        solved = {one.layer: one.on(self.sites.mask(one.layer, removed)) for one in parts}
        with self._written(solved):
            return damage(self.model, self._answered, self._loss)

    def parts(self, site: Site, removed: Mapping[str, Iterable[int]]) -> tuple[Part, ...]:
        """The readers of a site, after the removal of units of other sites."""
        return tuple(
            Part(self.readers[layer], self.sites.columns(site, layer), self.sites.mask(layer, removed))
            for layer in self.sites.readers(site)
        )

    def _curve(self, site: Site, untouched: float) -> SiteCurve:
        parts = self.parts(site, {})
        reader = parts[0].reader
        if self.sites.single(site):
            problem, labels = reader.problem, self.sites.groups(reader.layer).labels(reader.layer.shape[1])
        else:
            problem, labels = joint_quadratic(parts)
        path = removal_path(GroupSystem.of(problem, labels))
        self._paths[site.name] = _Path(site, path, parts)
        errors = [0.0, *path.losses]
        count = len(path.order)
        tried = sorted({min(count - 1, round(share * count)) for share in LEVELS} - {0})

        def measured() -> JsonObject:
            return {"damages": [self.damage({site.name: count - removed}) for removed in tried]}

        damages = self.checkpoint.remembered(f"damages of {site.name}", measured)["damages"]
        points = [(errors[removed], max(0.0, one - untouched)) for removed, one in zip(tried, damages, strict=True)]
        energy = reader.energy if self.sites.single(site) else float(len(parts))
        return SiteCurve(reader.layer, errors, interpolated(errors, [(0.0, 0.0), *points]), energy)

    @contextmanager
    def _written(self, solved: Mapping[Layer, Solved]) -> Iterator[None]:
        """Write other weights and biases into readers; those of the model are restored on exit."""
        kept = {layer: layer.tensor(self.model).clone() for layer in solved}
        biases = {layer: self.model.get_parameter(self.biases[layer]) for layer in solved if layer in self.biases}
        before = {layer: bias.detach().clone() for layer, bias in biases.items()}
        with torch.no_grad():
            try:
                for layer, one in solved.items():
                    layer.write(self.model, one.weight)
                    if layer in biases and one.bias is not None:
                        biases[layer].copy_(one.bias)
                yield
            finally:
                for layer, tensor in kept.items():
                    layer.tensor(self.model).copy_(tensor)
                    if layer in biases:
                        biases[layer].copy_(before[layer])


def interpolated(errors: list[float], points: list[tuple[float, float]]) -> list[float]:
    """Effects at all errors, monotone: a power of the error between measured (error, effect), and beyond them."""
    values = np.array(errors)
    x, y = (np.array(side) for side in zip(*sorted(points), strict=True))
    y = np.maximum.accumulate(y)
    known = (x > 0) & (y > 0)
    found = np.zeros_like(values)
    if known.any():
        x, y = np.log(x[known]), np.log(y[known])
        given = values > 0
        at = np.log(values[given])
        slope = max(1.0, (y[1] - y[0]) / max(x[1] - x[0], 1e-12)) if len(x) > 1 else 1.0
        power = np.interp(at, x, y) + slope * np.minimum(at - x[0], 0) + np.maximum(at - x[-1], 0)
        found[given] = np.exp(power)
    # Equal effects are told apart by the error, so that fewer units never look as good as more.
    scale = 1e-9 * max(float(found[-1]), 1e-12) / max(float(values[-1]), 1e-30)
    return [float(value) for value in np.maximum.accumulate(found) + scale * values]
