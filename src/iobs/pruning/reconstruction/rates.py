"""Choice of a learning rate from short trials."""

from __future__ import annotations

from collections.abc import Mapping

_ENOUGH = 0.95  # share of the best gain of a trial; a fit takes several times its steps, and needs a larger rate


def useful_rate(tried: Mapping[float, float], before: float) -> float | None:
    """The largest rate whose trial gains nearly as much as the best one.

    Gains are compared, not losses: where steps gain little, a rate that gains nothing has about the least loss too.

    Args:
        tried: the held-out loss after a trial, by rate.
        before: the held-out loss without steps.

    Returns:
        The rate of least loss if no trial gains; None without trials.
    """
    if not tried:
        return None
    least = min(tried.values())
    enough = before - _ENOUGH * (before - least) if least < before else least
    return max(rate for rate, loss in tried.items() if loss <= enough)
