"""Choice of a learning rate from short trials."""

from __future__ import annotations

from collections.abc import Mapping

ENOUGH = 0.95  # share of the best gain of a trial; a fit takes several times its steps, and needs a larger rate
ENOUGH_OF_NETWORK = 0.75  # the same for steps of the whole network, which take twenty times the steps of a trial


def useful_rate(tried: Mapping[float, float], before: float, share: float = ENOUGH) -> float | None:
    """The largest rate whose trial gains nearly as much as the best one.

    Gains are compared, not losses: where steps gain little, a rate that gains nothing has about the least loss too.

    Args:
        tried: the held-out loss after a trial, by rate.
        before: the held-out loss without steps.
        share: of the best gain that the trial of a useful rate has.

    Returns:
        The rate of least loss if no trial gains; None without trials.
    """
    if not tried:
        return None
    least = min(tried.values())
    enough = before - share * (before - least) if least < before else least
    return max(rate for rate, loss in tried.items() if loss <= enough)
