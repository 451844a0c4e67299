"""Learning rates: short trials with several of them, and the choice among their held-out losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from iobs.errors import NonFiniteError
from iobs.pruning.descent import OPTIMIZERS, Descent
from iobs.pruning.recipe import BlockFit, FineTune, Optimizer
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint

_AUTO: tuple[Optimizer, ...] = ("adam", "momentum")
_LEAST_STEPS = 12  # of a trial
# A trial takes this share of the steps: much shorter runs need smaller rates.
_SHARE_OF_BLOCK, _SHARE_OF_FINETUNE, _SHARE_OF_NETWORK = 5, 10, 20
_ENOUGH = 0.95  # share of the best gain of a trial; a fit takes several times its steps, and needs a larger rate
_ENOUGH_OF_NETWORK = 0.75  # the same for steps of the whole network, which take twenty times the steps of a trial
_AS_GOOD = 0.02  # held-out losses of fine-tuning within this relative distance of the least count as equal to it
_STOP_WORSE = 0.15  # stop trying larger rates once the loss is this much worse (relative)


@dataclass(frozen=True)
class RateTrials:
    """Short trials with several learning rates.

    Args:
        name: of the trials, for the progress.
        optimizer: name of the optimizer, to which the rates belong.
        steps: gradient steps of one trial.
        enough: share of the best gain that the trial of a useful rate has.
    """

    name: str
    optimizer: str
    steps: int
    enough: float = _ENOUGH

    @property
    def rates(self) -> tuple[float, ...]:
        """The usual rates, ascending."""
        return OPTIMIZERS[self.optimizer].rates

    @property
    def lower_rates(self) -> tuple[float, ...]:
        """The rates that are tried where none of the usual ones gains, descending."""
        return OPTIMIZERS[self.optimizer].lower_rates

    @property
    def most_steps(self) -> int:
        """Gradient steps of all trials, if none of the usual rates is left out."""
        return len(self.rates) * self.steps

    def losses(
        self, descent: Descent, run: Callable[[float], object], before: float, checkpoint: Checkpoint, key: str
    ) -> dict[float, float]:
        """The held-out loss after a trial, by rate; the steps are undone, and the checkpoint keeps the losses.

        Args:
            descent: the steps, after `mark`.
            run: rate -> takes the steps of a trial.
            before: the held-out loss without steps.
            checkpoint: of the run.
            key: of the trials in the checkpoint.
        """

        def trial(rate: float) -> float:
            descent.undo()
            run(rate)
            return descent.loss()

        def kept_trial(rate: float) -> float:
            return checkpoint.number(f"{key}, trial of {rate:g}", partial(trial, rate))

        losses = try_rates(kept_trial, self.rates, before)
        for rate in self.lower_rates:
            if min(losses.values(), default=math.inf) < before:
                break
            losses |= try_rates(kept_trial, (rate,), before)
        descent.undo()
        return losses

    def choose(
        self,
        descent: Descent,
        before: float,
        checkpoint: Checkpoint,
        key: str,
        on_trial: Callable[[str, int, int], object],
    ) -> JsonObject:
        """The largest rate with about the best gain of held-out loss, and the losses as text; the steps are undone.

        Args:
            descent, before, checkpoint, key: as in `losses`.
            on_trial: called with (name, number of the trial, count) before every trial.
        """
        rates = [*self.rates, *self.lower_rates]

        def run(rate: float) -> None:
            on_trial(self.name, rates.index(rate) + 1, len(rates))
            descent.run(self.steps, rate)

        losses = self.losses(descent, run, before, checkpoint, key)
        text = ", ".join(f"{rate:g}: {loss:.4g}" for rate, loss in losses.items())
        rate = useful_rate(losses, before, self.enough) or self.rates[0]
        return {"rate": rate, "text": f"held-out loss {before:.4g}, after trials {text}"}


def block_trials(fit: BlockFit) -> RateTrials:
    """The trials of the rate of blocks."""
    steps = max(_LEAST_STEPS, fit.steps // _SHARE_OF_BLOCK)
    return RateTrials("rate of block reconstruction", "block adam", steps)


def network_trials(fit: BlockFit) -> RateTrials:
    """The trials of the rate of the whole network."""
    steps = max(_LEAST_STEPS, fit.network_steps // _SHARE_OF_NETWORK)
    return RateTrials("rate of the whole network", "factored", steps, _ENOUGH_OF_NETWORK)


def finetune_trials(step: FineTune) -> dict[Optimizer, RateTrials]:
    """The trials of the rate of fine-tuning, by optimizer."""
    names = _AUTO if step.optimizer == "auto" else (step.optimizer,)
    return {name: RateTrials(f"trial of {name}", name, steps_of_finetune_trial(step)) for name in names}


def steps_of_finetune_trial(step: FineTune) -> int:
    """The number of steps of one trial of fine-tuning."""
    return max(_LEAST_STEPS, step.steps // _SHARE_OF_FINETUNE)


def most_trial_steps(step: FineTune) -> int:
    """The most steps that the choice of an optimizer and a learning rate of fine-tuning takes."""
    return sum(trials.most_steps for trials in finetune_trials(step).values())


def try_rates(trial: Callable[[float], float], rates: tuple[float, ...], before: float) -> dict[float, float]:
    """The loss after a short run with each learning rate; stops at a rate that does harm.

    Args:
        trial: rate -> held-out loss after the run.
        rates: ascending.
        before: the held-out loss without any steps.
    """
    losses: dict[float, float] = {}
    for rate in rates:
        try:
            losses[rate] = trial(rate)
        except NonFiniteError:  # diverged: no larger rate can do better
            break
        least = min(before, *losses.values())
        if losses[rate] > least + _STOP_WORSE * abs(least):
            break
    return losses


def useful_rate(losses: Mapping[float, float], before: float, share: float = _ENOUGH) -> float | None:
    """The largest rate whose trial gains nearly as much as the best one.

    Gains are compared, not losses: where steps gain little, a rate that gains nothing has about the least loss too.

    Args:
        losses: the held-out loss after a trial, by rate.
        before: the held-out loss without steps.
        share: of the best gain that the trial of a useful rate has.

    Returns:
        The rate of least loss if no trial gains; None without trials.
    """
    if not losses:
        return None
    least = min(losses.values())
    enough = before - share * (before - least) if least < before else least
    return max(rate for rate, loss in losses.items() if loss <= enough)


def boldest(losses: dict[tuple[Optimizer, float], float]) -> tuple[Optimizer, float] | None:
    """The best optimizer with its largest rate whose loss is about the least: longer runs need larger rates."""
    if not losses:
        return None
    optimizer, least = min(losses.items(), key=lambda entry: entry[1])[0][0], min(losses.values())
    enough = least + _AS_GOOD * abs(least)
    return max(pair for pair, loss in losses.items() if pair[0] == optimizer and loss <= enough)
