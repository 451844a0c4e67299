"""Choice of a learning rate from short trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from iobs.errors import NonFiniteError
from iobs.pruning.decisions.learning_rate import kept_trial, try_rates
from iobs.pruning.recipe import BlockFit
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
NETWORK_RATES = (5e-5, 2e-4, 8e-4, 3e-3, 8e-3)
_LOWER_RATES, _LOWER_NETWORK_RATES = (3e-5, 1e-5, 3e-6), (1.5e-5, 5e-6)  # tried where no other rate gains
_TRIAL_SHARE, _TRIAL_STEPS = 5, 12  # a trial of a rate takes a fifth of the steps, and at least twelve
_NETWORK_SHARE = 20  # a trial of a rate of the whole network takes a twentieth of its steps
_ENOUGH = 0.95  # share of the best gain of a trial; a fit takes several times its steps, and needs a larger rate
_ENOUGH_OF_NETWORK = 0.75  # the same for steps of the whole network, which take twenty times the steps of a trial


def trial_steps(fit: BlockFit) -> int:
    """Gradient steps of one trial of a rate of blocks."""
    return max(_TRIAL_STEPS, fit.steps // _TRIAL_SHARE)


def network_trial_steps(fit: BlockFit) -> int:
    """Gradient steps of one trial of a rate of the whole network."""
    return max(_TRIAL_STEPS, fit.network_steps // _NETWORK_SHARE)


class Steps(Protocol):
    """Gradient steps that can be undone: of a window, or of the whole network."""

    def undo(self) -> None:
        """Return to the parameters before the steps."""

    def run(self, steps: int, rate: float) -> None:
        """Take steps with a learning rate."""

    def loss(self) -> float:
        """The held-out loss."""
        ...


@dataclass(frozen=True)
class RateTrials:
    """Short trials with several learning rates.

    Args:
        name: of the trials, for the progress.
        rates: ascending.
        steps: gradient steps of one trial.
        lower: descending rates, tried until one gains where none of `rates` does: wide layers need small rates.
        share: of the best gain that the trial of a useful rate has.
    """

    name: str
    rates: tuple[float, ...]
    steps: int
    lower: tuple[float, ...] = ()
    share: float = _ENOUGH

    def choose(
        self,
        fit: Steps,
        before: float,
        checkpoint: Checkpoint,
        key: str,
        on_trial: Callable[[str, int, int], object],
    ) -> JsonObject:
        """The largest rate with about the best gain of held-out loss, and the losses as text; the steps are undone.

        Args:
            fit: the steps.
            before: the held-out loss without steps.
            checkpoint: keeps the losses.
            key: of the trials in the checkpoint.
            on_trial: called with (name, number of the trial, count) before every trial.
        """
        rates = [*self.rates, *self.lower]

        def trial(rate: float) -> float:
            fit.undo()
            on_trial(self.name, rates.index(rate) + 1, len(rates))
            fit.run(self.steps, rate)
            return fit.loss()

        kept = kept_trial(trial, checkpoint, key)
        tried = try_rates(kept, self.rates, before)
        for rate in self.lower:
            if min(tried.values(), default=math.inf) < before:
                break
            tried |= try_rates(kept, (rate,), before)
        fit.undo()
        text = ", ".join(f"{rate:g}: {loss:.4g}" for rate, loss in tried.items())
        rate = useful_rate(tried, before, self.share) or self.rates[0]
        return {"rate": rate, "text": f"held-out loss {before:.4g}, after trials {text}"}


def block_trials(fit: BlockFit) -> RateTrials:
    """The trials of the rate of blocks."""
    return RateTrials("rate of block reconstruction", RATES, trial_steps(fit), _LOWER_RATES)


def network_trials(fit: BlockFit) -> RateTrials:
    """The trials of the rate of the whole network."""
    steps = network_trial_steps(fit)
    return RateTrials("rate of the whole network", NETWORK_RATES, steps, _LOWER_NETWORK_RATES, _ENOUGH_OF_NETWORK)


def loss_after(take: Callable[[], None], loss: Callable[[], float]) -> float:
    """The held-out loss after gradient steps; infinite if they diverge."""
    try:
        take()
        return loss()
    except NonFiniteError:
        return math.inf


def useful_rate(tried: Mapping[float, float], before: float, share: float = _ENOUGH) -> float | None:
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
