"""One machine for gradient steps: on windows of blocks, on whole networks block by block, and on models with a loss.

    for each step:
        loss, gradients = mean over ranks of gradient(next items)      # gradients.py
        masters = optimizer(masters, mask * gradients, rate)           # masters.py, optimizers.py

A run continues from a checkpoint, can be undone, and is undone where it raises the held-out loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from iobs.errors import NonFiniteError
from iobs.pruning.descent.gradients import Gradient
from iobs.pruning.descent.masters import Masters
from iobs.pruning.descent.optimizers import OPTIMIZERS, MasterOptimizer, RateSchedule, share_of_rate
from iobs.pruning.runtime.checkpoint import Checkpoint
from iobs.pruning.runtime.memory import reusing_memory
from iobs.pruning.runtime.ranks import Ranks

STEPS_BETWEEN_SAVES = 50  # of a whole network by blocks, where the time of a step depends on the disk
SECONDS_BETWEEN_SAVES = 120.0  # of models in memory, whose steps may take a millisecond


@dataclass
class Descent:
    """Gradient steps on float32 masters of parameters, written into the model in its dtype.

    Args:
        gradient: computes the gradients of groups of masters.
        optimizer: its name in `OPTIMIZERS`.
        order: number of steps before -> the items of all further steps.
        loss: () -> held-out loss, which compares runs.
        ranks: processes that share the items. The gradients of a step are means over the ranks.

    Attributes:
        taken: number of steps since the start or the last `undo`.
    """

    gradient: Gradient
    optimizer: str
    order: Callable[[int], Iterator[Any]]
    loss: Callable[[], float]
    ranks: Ranks
    taken: int = field(default=0, init=False)
    _optimizers: list[MasterOptimizer] = field(init=False)
    _start: list[dict[str, Tensor]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._optimizers = self._new_optimizers()

    @property
    def groups(self) -> Sequence[Masters]:
        """Masters that are updated together."""
        return self.gradient.groups

    def run(
        self,
        steps: int,
        rate: float,
        schedule: RateSchedule = "cosine",
        *,
        total: int | None = None,
        saved: StepCheckpoint | None = None,
        on_step: Callable[[int, int, float], object] = lambda done, steps, loss: None,
    ) -> list[float]:
        """Take steps.

        Args:
            steps: their number.
            rate: learning rate.
            schedule: of the rate.
            total: steps of the schedule, if several runs share it; None: `steps`.
            saved: where the steps continue if they were interrupted, and are stored; None: nothing is stored.
            on_step: called with (steps done, `steps`, last loss) after every step.

        Returns:
            The loss before each step, including steps from the checkpoint.

        Raises:
            NonFiniteError: the loss or a gradient became NaN or infinite.
            ProblemError: the loss has no gradient.
        """
        items = self.order(self.taken)
        losses = [] if saved is None else saved.load(self)
        if len(losses) == steps:
            return losses
        for _ in losses:  # draws the same random numbers as the steps did
            next(items)
        with reusing_memory():
            while len(losses) < steps:
                share = share_of_rate(schedule, self.taken, total or steps)
                losses.append(self._step(next(items), rate * share))
                if saved is not None:
                    saved.save_if_due(self, losses, steps)
                on_step(len(losses), steps, losses[-1])
        return losses

    def mark(self, hold: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Keep the parameters, to which `undo` returns; `hold` stores the copies."""
        self._start = [masters.snapshot(hold) for masters in self.groups]

    def undo(self) -> None:
        """Return to the parameters at the last `mark`, before the first step."""
        for masters, values in zip(self.groups, self._start, strict=True):
            masters.restore(values)
        self._optimizers = self._new_optimizers()
        self.taken = 0

    def lowers(self, before: float, steps: int, rates: Sequence[float], **options: Any) -> bool:
        """True if a run lowers the held-out loss from `before`; others, and diverging ones, are undone.

        Args:
            before: the held-out loss without the steps.
            steps: number of steps.
            rates: learning rates, each taken if those before it do not lower the loss.
            options: of `run`.
        """
        for rate in rates:
            with suppress(NonFiniteError):
                self.run(steps, rate, **options)
                if self.loss() < before:
                    return True
            self.undo()
        return False

    def _step(self, items: Any, rate: float) -> float:
        """Take one step; returns the loss before it."""
        step = self.gradient.of(items)
        value = torch.tensor(step.loss, dtype=torch.float64)
        loss = float(self.ranks.means([value], step.weight)[0])  # of all ranks, so that all of them stop
        if not math.isfinite(loss):
            raise NonFiniteError(self.gradient.failure.format(loss=loss, step=self.taken + 1))
        with closing(step.groups) as groups:
            for number, gradients in groups:
                self._update(number, gradients, step.weight, rate)
        self.taken += 1
        return loss

    def _update(self, number: int, gradients: list[Tensor], weight: float, rate: float) -> None:
        """Update a group of masters; `gradients` is emptied, so that no one else holds them."""
        masters = self.groups[number]
        if not gradients:
            return
        means = self.ranks.means(gradients, weight)
        gradients.clear()
        finite = [gradient.isfinite().all() for gradient in means]  # a GPU computes all before the first is read
        for name, flag in zip(masters.values, finite, strict=True):
            if not bool(flag):
                raise NonFiniteError(f"The gradient of {name} holds NaN or infinity in gradient step {self.taken + 1}.")
        for place, name in enumerate(masters.values):
            means[place] = masters.masked(name, means[place])
        self._optimizers[number].step(dict(zip(masters.values, means, strict=True)), rate)
        masters.finish_step()

    def _new_optimizers(self) -> list[MasterOptimizer]:
        return [OPTIMIZERS[self.optimizer].build(masters.values) for masters in self.groups]


@dataclass
class StepCheckpoint:
    """The state of a descent in a checkpoint, one entry per group of masters, so that one block is in memory.

    The entries of two states alternate, and an entry written last names the valid ones: a kill between two blocks
    leaves the state before. Then the state before is removed.

    Args:
        checkpoint: of the run.
        key: of the steps.
        every: steps between two states, of which the last one is not stored; None: the last one is, and others after
            `SECONDS_BETWEEN_SAVES`.
    """

    checkpoint: Checkpoint
    key: str
    every: int | None = None
    _slot: int = field(default=0, init=False)  # of the next state
    _last: float = field(default_factory=time.monotonic, init=False)

    def save_if_due(self, descent: Descent, losses: Sequence[float], steps: int) -> None:
        """Store the state after some of the steps, if it is time."""
        last = len(losses) == steps
        if self.every is not None:
            due = len(losses) % self.every == 0 and not last
        else:
            due = last or time.monotonic() - self._last > SECONDS_BETWEEN_SAVES
        if due:
            self.save(descent, losses)

    def save(self, descent: Descent, losses: Sequence[float]) -> None:
        """Store the state after the steps with these losses."""
        for group, (masters, optimizer) in enumerate(zip(descent.groups, descent._optimizers, strict=True)):
            moments = {f"moment {name}": value for name, value in optimizer.state().items()}
            tensors = {**{f"master {name}": value for name, value in masters.values.items()}, **moments}
            self.checkpoint.put(self._entry(self._slot, group), tensors, {})
        self.checkpoint.put(self.key, {}, {"slot": self._slot, "taken": descent.taken, "losses": [*losses]})
        self._slot = 1 - self._slot
        self.remove(descent, [self._slot])
        self._last = time.monotonic()

    def remove(self, descent: Descent, slots: Sequence[int] = (0, 1)) -> None:
        """Remove the entries of states, by default of both."""
        for slot in slots:
            for group in range(len(descent.groups)):
                self.checkpoint.drop(self._entry(slot, group))

    def load(self, descent: Descent) -> list[float]:
        """Read the last state into a descent; returns the losses of its steps, none if there is no state."""
        if self.key not in self.checkpoint:
            return []
        state = self.checkpoint.get(self.key)[1]
        descent.taken, self._slot = state["taken"], 1 - state["slot"]
        for group, (masters, optimizer) in enumerate(zip(descent.groups, descent._optimizers, strict=True)):
            tensors, _ = self.checkpoint.get(self._entry(state["slot"], group))
            masters.replace({name: tensors[f"master {name}"] for name in masters.values})
            if masters.resident:
                masters.copy_to_model()
            moments = {name.removeprefix("moment "): tensors[name] for name in tensors if name.startswith("moment ")}
            optimizer.restore(moments, descent.taken)
        return [*state["losses"]]

    def _entry(self, slot: int, group: int) -> str:
        return f"{self.key} {slot} block {group}"
