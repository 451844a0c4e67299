"""The measurements of one layer, as values that a checkpoint holds: a stopped run measures no layer twice."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from iobs.pruning.allocation.counts import Curve
from iobs.pruning.allocation.response import Trial
from iobs.pruning.calibration.gram import Statistics
from iobs.pruning.report import JsonObject
from iobs.pruning.samples.subsets import Samples, split

CURVE_ROWS = 1024  # least number of rows that stand for a layer in an error without a trial
EVALUATION_SHARE = 0.2  # share of the calibration samples that measure errors and damages, besides the held-out ones


def fit_and_evaluation(calibration: Samples, heldout: Samples, seed: int) -> tuple[Samples, Samples]:
    """Samples that layers are solved for, and samples that errors are measured on: the rest, and the held-out ones."""
    fit, rest = split(calibration, EVALUATION_SHARE, seed)
    return fit, Samples(rest.batches + heldout.batches, rest.numbers + heldout.numbers)


def row_step(rows: int, groups: int) -> int:
    """Every how many-th row of a layer is solved for an error without a trial; 1: all rows.

    Rows have the same Hessian, so a thousand of them show the error of all.

    Args:
        rows: of the layer's matrix.
        groups: of a convolution, which have Hessians of their own.
    """
    return 1 if groups > 1 else max(1, rows // CURVE_ROWS)


@dataclass
class Measured:
    """The measurements of one layer.

    Args:
        curve: its output errors.
        trials: trials in which only this layer was pruned.
        statistics: its Grams, if a search needs them; otherwise None.
    """

    curve: Curve
    trials: list[Trial]
    statistics: Statistics | None = None

    def values(self) -> JsonObject:
        """JSON values of the curve and the trials."""
        return {"curve": asdict(self.curve), "trials": [asdict(trial) for trial in self.trials]}

    @classmethod
    def of(cls, values: JsonObject, statistics: Statistics | None = None) -> Measured:
        """The measurements with these values, and the Grams."""
        return cls(Curve(**values["curve"]), [Trial(**trial) for trial in values["trials"]], statistics)


@dataclass(frozen=True)
class LayerCurves:
    """Measurements of one layer on grids.

    Attributes:
        curves: output errors by bits.
        trials: errors with the damages that they cause.
    """

    curves: dict[int, Curve]
    trials: list[Trial]

    def values(self) -> JsonObject:
        """JSON values of the curves and the trials."""
        curves = {str(bits): asdict(curve) for bits, curve in self.curves.items()}
        return {"curves": curves, "trials": [asdict(trial) for trial in self.trials]}

    @classmethod
    def of(cls, values: JsonObject) -> LayerCurves:
        """The measurements with these values."""
        curves = {int(bits): Curve(**curve) for bits, curve in values["curves"].items()}
        return cls(curves, [Trial(**trial) for trial in values["trials"]])
