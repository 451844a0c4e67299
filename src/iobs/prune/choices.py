"""Choices that a run makes from its own calibration data."""

from __future__ import annotations

from collections.abc import Callable

from iobs.errors import NonFiniteError

_RATES = (5e-5, 1.5e-4, 5e-4, 1.5e-3, 4e-3)
_HOPELESS = 1.3  # a rate this much worse than the best ends the search: larger ones are worse still


def best_rate(trial: Callable[[float], float]) -> tuple[float, dict[float, float]]:
    """The learning rate with the least loss after a short run; rates are tried upwards until they do harm.

    Args:
        trial: rate -> held-out loss after the run.

    Returns:
        The rate, and the loss of every rate that was tried.
    """
    losses: dict[float, float] = {}
    for rate in _RATES:
        try:
            losses[rate] = trial(rate)
        except NonFiniteError:  # diverged: no larger rate can do better
            break
        if losses[rate] > _HOPELESS * min(losses.values()):
            break
    return min(losses, key=lambda rate: losses[rate], default=_RATES[0]), losses
