"""Measurements of layers that are not measured, from those of layers of their kind.

Relative errors and damages are interpolated geometrically: between two blocks over the number of the block, between two
experts over the logarithm of their loads. The load of an expert is about the energy of its outputs. It says how often
the errors of the expert reach the output and how large they are, and, with its tokens, how well it can be fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from iobs.pruning.allocation.counts import Curve
from iobs.pruning.allocation.measurements import Measured
from iobs.pruning.allocation.response import Trial

MEASURED_EXPERTS = 6  # most experts of a stack whose curves are measured
_LEAST = 1e-12  # relative error or damage below which its logarithm says nothing


@dataclass(frozen=True)
class Expert:
    """A measured expert.

    Args:
        load: number of its tokens times the squared norm of its matrix.
        measured: its measurements.
    """

    load: float
    measured: Measured


def measured_experts(loads: Sequence[float]) -> list[int]:
    """The places that are measured: evenly spread over the experts in the order of their loads, with both ends.

    Experts without a load are left out if any has one.
    """
    order = sorted(range(len(loads)), key=lambda place: (loads[place], place))
    order = [place for place in order if loads[place] > 0] or order
    last = len(order) - 1
    steps = min(len(order), MEASURED_EXPERTS)
    return sorted(order[round(last * step / max(1, steps - 1))] for step in range(steps))


def between(first: Measured, second: Measured, share: float, count: int) -> Measured:
    """Interpolated measurements, at the counts of the first; their energy is 1.

    Args:
        first: of the layer before.
        second: of the layer behind.
        share: of the second, in [0, 1].
        count: number of nonzero weights of the layer, at which the error is 0.
    """

    def mixed(one: float, other: float) -> float:
        return math.exp((1 - share) * math.log(max(one, _LEAST)) + share * math.log(max(other, _LEAST)))

    left, right = first.curve, second.curve
    scales = [1 / max(curve.energy, 1e-30) for curve in (left, right)]
    keeps = [keep for keep in left.keeps[:-1] if keep < count]
    errors = [mixed(left.at(keep) * scales[0], right.at(keep) * scales[1]) for keep in keeps]
    # Trials of both are at the same densities, unless one of them did no harm.
    pairs = [*zip(first.trials, second.trials, strict=False)] if len(first.trials) == len(second.trials) else []
    trials = [
        Trial(mixed(one.error * scales[0], other.error * scales[1]), mixed(one.damage, other.damage))
        for one, other in pairs
    ]
    return Measured(Curve([*keeps, count], [*errors, 0.0], 1.0), trials)


def among(experts: Sequence[Expert], load: float, count: int) -> Measured:
    """The measurements of an expert with a load; their energy is 1.

    Beyond the loads of the measured experts, damages are proportional to the load. Experts whose errors did no harm, as
    the trial samples hold no token for them, do not count. Nor does an expert without a load have trials.

    Args:
        experts: the measured ones.
        load: of the expert.
        count: number of its nonzero weights, at which the error is 0.
    """
    known = [one for one in experts if any(trial.damage > 0 for trial in one.measured.trials)] or experts
    order = sorted(known, key=lambda one: one.load)
    before = next((one for one in reversed(order) if one.load <= load), order[0])
    after = next((one for one in order if one.load >= load), order[-1])
    low, own, high = (math.log(max(value, 1e-30)) for value in (before.load, load, after.load))
    found = between(before.measured, after.measured, (own - low) / (high - low) if high > low else 0.0, count)
    beyond = math.exp(own - min(max(own, low), high))
    trials = [Trial(trial.error, trial.damage * beyond) for trial in found.trials]
    return Measured(found.curve, trials if load > 0 else [])
