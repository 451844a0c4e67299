"""Effect of the width of every site on the loss, from one pass of greedy removal and a few trials.

Greedy removal gives the error of the reader at all widths. The divergence from the dense network is measured with some
widths of one site alone, and interpolated between them as a power of the error, which makes it monotone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from iobs.core.column_groups import Groups
from iobs.core.quadratic import Quadratic
from iobs.pruning.allocation.sensitivity import CURVE_TOKENS, PROBE, PROBE_TOKENS
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.gram import Statistics
from iobs.pruning.calibration.losses import answered, mean_loss
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import LossFunction
from iobs.pruning.samples.subsets import Samples, split
from iobs.pruning.widths.softened import softened, temperature_of
from iobs.solvers.grouped.removal import RemovalPath, removal_path
from iobs.solvers.grouped.system import GroupSystem, refitted

LEVELS = (0.25, 0.5, 0.75, 0.9)  # removed shares at which the divergence is measured
_EVALUATION_SHARE = 0.2  # share of the calibration samples that only measure divergences
_ANSWERS = 2**26  # most numbers in the stored outputs of the dense model
_POSITIONS = 16  # positions per sample of a convolution


@dataclass(frozen=True)
class SiteCurve:
    """Error of a reader and effect on the loss at every width of its site.

    Attributes:
        layer: the reader.
        errors: (units + 1,), squared output error of the reader per input row after 0, 1, ... removals.
        effects: (units + 1,), KL divergence from the dense network in nats.
        energy: squared output per input row.
    """

    layer: Layer
    errors: list[float]
    effects: list[float]
    energy: float

    def effect(self, width: int) -> float:
        """The effect with `width` units left."""
        return self.effects[len(self.effects) - 1 - width]


@dataclass(frozen=True)
class _Solved:
    """A reader at one width."""

    weight: Tensor
    bias: Tensor | None


@dataclass
class _Site:
    """Site that is solved at several widths.

    Attributes:
        problem: damped, of the dense reader on its dense inputs.
        labels: group of every column.
        path: greedy removal.
        mean: mean inputs, if the bias is free; otherwise None.
        bias: of the dense reader, or None.
    """

    problem: Quadratic
    labels: Tensor
    path: RemovalPath
    mean: Tensor | None
    bias: Tensor | None

    def at(self, width: int) -> _Solved:
        """Exact weights and bias with `width` units left."""
        count = len(self.path.order)
        if width == count:
            return _Solved(self.problem.centre(), self.bias)
        weight = refitted(self.problem, self.labels, self.path.kept(count, width)).weight
        if self.mean is None or self.bias is None:
            return _Solved(weight, self.bias)
        return _Solved(weight, self.bias.double() + (self.problem.centre().double() - weight.double()) @ self.mean)


@dataclass
class Curves:
    """Measurements of all sites of a dense model.

    Args:
        model: the dense model; restored after every trial.
        patterns: groups of the columns of every reader.
        biases: names of the biases that are refitted, by reader.
        chain: blocks along which the model can be run.
        calibration: calibration samples.
        heldout: held-out samples of the run.
        damping: relative to the mean of each Hessian's diagonal.
        seed: of every random choice.
        on_progress: called with (task, done, total).
    """

    model: nn.Module
    patterns: Mapping[Layer, Groups]
    biases: Mapping[Layer, str]
    chain: list[Block]
    calibration: Samples
    heldout: Samples
    damping: float
    seed: int
    on_progress: Callable[[str, int, int], None]
    _sites: dict[Layer, _Site] = field(default_factory=dict, init=False)

    @cached_property
    def _parts(self) -> tuple[Samples, Samples]:
        """Samples that readers are solved for, and samples that divergences are measured on."""
        fit, rest = split(self.calibration, _EVALUATION_SHARE, self.seed)
        judged = Samples(rest.batches + self.heldout.batches, rest.numbers + self.heldout.numbers)
        return fit, judged if judged.batches else fit

    @cached_property
    def _answered(self) -> Samples:
        """Samples with the outputs of the dense model."""
        return answered(self.model, self._parts[1].first(PROBE, PROBE_TOKENS), _ANSWERS)

    @cached_property
    def _loss(self) -> LossFunction:
        """The damage of a trial."""
        return softened(temperature_of(self._answered))

    @torch.no_grad()
    def measured(self) -> dict[Layer, SiteCurve]:
        """The curve of every reader that receives input."""
        fit = self._parts[0]
        untouched = self.damage({})
        sweep = Sweep(
            self.model,
            fit.first(fit.samples, CURVE_TOKENS),
            Samples([], []),
            tuple(self.patterns),
            self.chain,
            moments=Moments(self.seed, _POSITIONS, means=True),
        )
        found: dict[Layer, SiteCurve] = {}
        for group in sweep.groups():
            statistics = group.statistics()
            for layer in group.layers:
                found[layer] = self._curve(layer, statistics, untouched)
                self.on_progress("effects of widths", len(found), len(self.patterns))
        return found

    def damage(self, widths: Mapping[Layer, int]) -> float:
        """KL divergence from the dense model if some readers have other widths, each solved alone."""
        with self._written({layer: self._sites[layer].at(width) for layer, width in widths.items()}):
            return mean_loss(self.model, self._answered, self._loss)

    def _curve(self, layer: Layer, statistics: Statistics, untouched: float) -> SiteCurve:
        pattern, weight = self.patterns[layer], layer.read(self.model).double()
        free = layer in self.biases and statistics.calibration.means is not None
        gram = (statistics.centred if free else statistics).calibration
        hessian = gram.own[0].double().clone()
        hessian.diagonal().add_(max(self.damping, 1e-6) * float(hessian.diagonal().mean()) + 1e-30)
        problem = Quadratic.at(weight, hessian)
        labels = pattern.labels(layer.shape[1])
        path = removal_path(GroupSystem.of(problem, labels))
        mean = gram.means.own[0] if free and gram.means is not None else None
        bias = self.model.get_parameter(self.biases[layer]).detach().clone() if layer in self.biases else None
        self._sites[layer] = _Site(problem, labels, path, mean, bias)
        errors = [0.0, *path.losses]
        count = len(path.order)
        points = [(0.0, 0.0)]
        for removed in sorted({min(count - 1, round(share * count)) for share in LEVELS} - {0}):
            points.append((errors[removed], max(0.0, self.damage({layer: count - removed}) - untouched)))
        energy = float(((weight @ hessian) * weight).sum())
        return SiteCurve(layer, errors, interpolated(errors, points), energy)

    @contextmanager
    def _written(self, solved: Mapping[Layer, _Solved]) -> Iterator[None]:
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
