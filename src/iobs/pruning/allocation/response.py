"""Response of a model to errors of its layers: a scale on which the effects of the layers add up.

The damage (the loss that an error causes) is not proportional to the error: a confident model tolerates small errors
and fails under large ones. But errors of all layers add up on their way to the output, and the model responds to their
sum. So every layer has an additive *effect*, and the damage is one increasing function of the sum of the effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
from scipy.optimize import lsq_linear

from iobs.pruning.allocation.counts import Curve
from iobs.pruning.network.layers import Layer

_RESOLUTION = 1e-6  # smallest measurable damage, relative to the greatest; below it is rounding
DAMAGE_LIMIT = 100.0  # upper limit of a damage, in nats or in energies of the output
# Limits of d log effect / d log damage. At 1 the damage is proportional to the effect, as for small errors.
_SLOPES = (0.2, 1.0)
_MOST = 200.0  # largest logarithm of an effect: two trials of nearly equal errors may give any slope


@dataclass(frozen=True)
class Trial:
    """A layer pruned alone.

    Args:
        error: squared output error of the layer per input row.
        damage: increase of the model's loss.
    """

    error: float
    damage: float


@dataclass(frozen=True)
class Response:
    """The increasing function from the sum of all effects to the damage, stored as its inverse.

    On logarithmic scales the inverse is a parabola: d log effect / d log damage is linear in log damage. The effect of
    the greatest damage is this damage itself.

    Args:
        least: the smallest measurable damage.
        greatest: the greatest measured damage.
        early: d log effect / d log damage at the least damage.
        late: d log effect / d log damage at the greatest damage.
    """

    least: float
    greatest: float
    early: float = 1.0
    late: float = 1.0

    def log_effect(self, damage: float) -> float:
        """The logarithm of the effect that causes a damage by itself."""
        depth = math.log(min(max(damage, self.least), self.greatest) / self.greatest)
        span = math.log(self.greatest / self.least)
        return math.log(self.greatest) + self.late * depth + (self.late - self.early) * depth**2 / (2 * span)

    def monotone(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials of a layer with rising errors and rising damages, from the densest to the sparsest.

        Damages are limited to [least, greatest]; a damage that is not finite becomes the greatest. Of several trials
        without measurable damage only the sparsest is kept, and a trial with measurable damage replaces it.
        """
        found: list[Trial] = []
        for trial in sorted(trials, key=lambda trial: trial.error):
            damage = trial.damage if math.isfinite(trial.damage) else self.greatest
            damage = min(max(damage, self.least), self.greatest)
            if found:
                damage = max(damage, found[-1].damage)  # more error causes less damage only by noise
                if found[-1].damage <= self.least or trial.error <= found[-1].error:
                    found.pop()
            found.append(Trial(trial.error, damage))
        return found

    def effects(self, curve: Curve, trials: Sequence[Trial]) -> Curve:
        """The effect of a layer at each count of kept entries, from its output errors.

        Between trials the logarithm of the effect is interpolated over the logarithm of the error. Below the densest
        trial the effect is proportional to the error. Above the sparsest trial it continues with the slope of the
        sparsest two trials, which is at least 1.

        Args:
            curve: output errors of the layer.
            trials: of the layer.
        """
        trials = self.monotone(trials)
        if not trials:
            return Curve(curve.keeps, [0.0] * len(curve.keeps), 0.0)
        errors = [math.log(trial.error) for trial in trials]
        effects = [self.log_effect(trial.damage) for trial in trials]
        steepest = 1.0
        if len(trials) > 1:
            # Damage saturates if a layer is destroyed, so the effect must rise at least as fast as the error.
            effects[-1] = max(effects[-1], effects[-2] + errors[-1] - errors[-2])
            steepest = (effects[-1] - effects[-2]) / (errors[-1] - errors[-2])

        def effect(error: float) -> float:
            if error <= 0:
                return 0.0
            at = math.log(error)
            below, above = min(0.0, at - errors[0]), max(0.0, at - errors[-1])
            return math.exp(min(float(np.interp(at, errors, effects)) + below + steepest * above, _MOST))

        return Curve(curve.keeps, [effect(error) for error in curve.errors], effect(curve.energy))


def common_response(trials: Sequence[Sequence[Trial]]) -> Response:
    """The response under which the effects of each layer are as proportional to its errors as possible.

    Between two trials of a layer the logarithms of effect and error should rise equally. The two slopes of the response
    are the least-squares fit over all such pairs, within limits.

    Args:
        trials: of each layer.
    """
    damages = [min(trial.damage, DAMAGE_LIMIT) for own in trials for trial in own if math.isfinite(trial.damage)]
    greatest = max([1e-30, *damages])
    straight = Response(_RESOLUTION * greatest, greatest)
    span = -math.log(_RESOLUTION)
    rows, rises = [], []
    for own in trials:
        for dense, sparse in pairwise(straight.monotone(own)):
            low, high = (math.log(trial.damage / straight.least) for trial in (dense, sparse))
            if high > low:
                middle = (low + high) / (2 * span)
                rows.append([(high - low) * (1 - middle), (high - low) * middle])
                rises.append(math.log(sparse.error / dense.error))
    if not rows:
        return straight
    early, late = lsq_linear(np.array(rows), np.array(rises), bounds=_SLOPES).x
    return Response(straight.least, straight.greatest, float(early), float(late))


def complete(found: Mapping[Layer, Curve], curves: Mapping[Layer, Curve]) -> dict[Layer, Curve]:
    """Add effects for layers without a measured effect: their error curve, scaled to a typical effect.

    The typical effect is the geometric mean of the measured effects.

    Args:
        found: measured effects.
        curves: output errors of all layers.
    """
    known = [curve.energy for curve in found.values() if curve.energy > 0]
    typical = math.exp(fmean(map(math.log, known))) if known else 1.0
    return {
        layer: found[layer] if layer in found else curve.times(typical / max(curve.energy, 1e-30))
        for layer, curve in curves.items()
    }
