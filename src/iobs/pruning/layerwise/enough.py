"""The check that calibration data are enough for the layers that are fitted to them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from iobs.pruning.report import LayerRecord

_LEAST = 2  # inputs for each column of a layer, below which its fit is mostly to the noise of the data
_ENOUGH = 8  # inputs for each column with which it generalises


def too_few(layers: Sequence[LayerRecord], samples: int) -> str:
    """A sentence if layers saw too few inputs for their columns, with the number of samples that would do.

    Args:
        layers: records of a projection.
        samples: number of the samples that the layers were fitted to.

    Returns:
        The sentence; "" if the data are enough.
    """
    fitted = [layer for layer in layers if layer.inputs and "rule" not in layer.stats and "tokens" not in layer.stats]
    short = [layer for layer in fitted if layer.inputs < _LEAST * layer.shape[1]]
    if not short:
        return ""
    worst = max(short, key=lambda layer: layer.shape[1] / layer.inputs)
    factor = _ENOUGH * worst.shape[1] / worst.inputs
    others = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
    return (
        f"Few calibration data: layer {worst.name}{others} saw {worst.inputs:,} inputs for {worst.shape[1]:,} columns, "
        f"and may fail on unseen data. {math.ceil(factor * samples):,} samples in place of {samples:,} would "
        f"give {_ENOUGH} inputs for each column."
    )
