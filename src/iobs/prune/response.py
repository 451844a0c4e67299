"""How a network responds to errors of its layers: the scale on which what each layer loses alone adds up.

A network does not answer in proportion to errors: one that is sure of its answers bears small ones, and breaks under
large ones. But it answers alike to the errors of all layers, which add up on their way to the output. So every layer
has an *effect* that adds to the others', and the damage, what the network loses, is one rising function of their sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import lsq_linear

from iobs.prune.allocation import Curve

_TOLD = 1e-6  # of the greatest damage: below it is rounding
_LOST = 100.0  # nats, or energies of the output: a network cannot lose more
_BENDS = (0.2, 1.0)  # what d log effect / d log damage may be: small errors do damage in proportion, none does less


@dataclass(frozen=True)
class Trial:
    """A layer pruned alone: its squared output error per input row, and the damage, what the network then loses."""

    error: float
    damage: float


@dataclass(frozen=True)
class Response:
    """The rising function from the sum of all effects to the damage, by its inverse.

    On logarithmic scales the inverse is a parabola: d log effect / d log damage goes straight from `early` at the
    `least` damage that can be told from rounding to `late` at the `greatest` that was seen, which is its own effect.
    """

    least: float
    greatest: float
    early: float = 1.0
    late: float = 1.0

    def log_effect(self, damage: float) -> float:
        """Logarithm of the effect that does so much damage by itself."""
        depth = math.log(min(max(damage, self.least), self.greatest) / self.greatest)
        span = math.log(self.greatest / self.least)
        return math.log(self.greatest) + self.late * depth + (self.late - self.early) * depth**2 / (2 * span)

    def told(self, trials: Sequence[Trial]) -> list[Trial]:
        """What a layer's trials tell, from the densest to the sparsest: errors and damages rise.

        A trial whose damage cannot be told from none tells something only where no sparser one does harm either. A
        damage that is not finite is the greatest.
        """
        found: list[Trial] = []
        for trial in sorted(trials, key=lambda trial: trial.error):
            damage = trial.damage if math.isfinite(trial.damage) else self.greatest
            damage = min(max(damage, self.least), self.greatest)
            if found:
                damage = max(damage, found[-1].damage)  # noise aside, more error never does less damage
                if found[-1].damage <= self.least or trial.error <= found[-1].error:
                    found.pop()
            found.append(Trial(trial.error, damage))
        return found

    def effects(self, curve: Curve, trials: Sequence[Trial]) -> Curve:
        """A layer's effect by its count of kept entries, in place of its output error.

        Between trials the logarithm of the effect is interpolated over that of the error. Beyond them the effect is in
        proportion to the error, or steeper where the sparsest two trials are.

        Args:
            curve: the layer's output errors.
            trials: of this layer.
        """
        trials = self.told(trials)
        if not trials:
            return Curve(curve.keeps, [0.0] * len(curve.keeps), 0.0)
        errors = [math.log(trial.error) for trial in trials]
        effects = [self.log_effect(trial.damage) for trial in trials]
        steepest = 1.0
        if len(trials) > 1:
            # A layer as good as lost shows less than it would cost beside others that still work.
            effects[-1] = max(effects[-1], effects[-2] + errors[-1] - errors[-2])
            steepest = (effects[-1] - effects[-2]) / (errors[-1] - errors[-2])

        def effect(error: float) -> float:
            if error <= 0:
                return 0.0
            at = math.log(error)
            below, above = min(0.0, at - errors[0]), max(0.0, at - errors[-1])
            return math.exp(float(np.interp(at, errors, effects)) + below + steepest * above)

        return Curve(curve.keeps, [effect(error) for error in curve.errors], effect(curve.energy))


def common_response(trials: Sequence[Sequence[Trial]]) -> Response:
    """The response that fits the trials of all layers best: effects are in proportion to errors within each layer.

    Between two trials of a layer the logarithm of its effect should rise as that of its error does; the bend of the
    response is found by least squares over all such pairs, within what makes sense.

    Args:
        trials: of each layer.
    """
    damages = [min(trial.damage, _LOST) for own in trials for trial in own if math.isfinite(trial.damage)]
    greatest = max([1e-30, *damages])
    straight = Response(_TOLD * greatest, greatest)
    span = -math.log(_TOLD)
    rows, rises = [], []
    for own in trials:
        for dense, sparse in pairwise(straight.told(own)):
            low, high = (math.log(trial.damage / straight.least) for trial in (dense, sparse))
            if high > low:
                middle = (low + high) / (2 * span)
                rows.append([(high - low) * (1 - middle), (high - low) * middle])
                rises.append(math.log(sparse.error / dense.error))
    if not rows:
        return straight
    early, late = lsq_linear(np.array(rows), np.array(rises), bounds=_BENDS).x
    return Response(straight.least, straight.greatest, float(early), float(late))
