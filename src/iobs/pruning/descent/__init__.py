"""One machine for gradient steps: on windows of blocks, on whole networks block by block, and on models with a loss.

    for each step:
        loss, gradients = mean over ranks of gradient(next items)      # gradients.py
        masters = optimizer(masters, mask * gradients, rate)           # gradients.py, and below

A run continues from a checkpoint, can be undone, and is undone where it raises the held-out loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from iobs.errors import NonFiniteError
from iobs.pruning.descent.gradients import Gradient, Masters
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


# ---- optimizers of masters, and the schedules of their learning rates
RateSchedule = Literal["constant", "linear", "cosine"]

_BETAS = 0.9, 0.95  # of Adam on blocks; 0.95 also of the factored second moment
_TINY = 1e-20  # added to squared gradients
_LEAST = 1e-30  # of a second moment: the product of a row and a column of zero gradients may be rounded to zero
_WARM_UP = 0.1  # share of the steps in which a rate rises


def share_of_rate(schedule: RateSchedule, step: int, steps: int) -> float:
    """Share of the learning rate at a step: it rises over the first tenth, then falls to zero, linearly or as a cosine.

    Without warm-up the first updates of Adam have full size and undo the exact refit.
    """
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return (1 - step / steps) * min(1.0, (step + 1) * 10 / steps)
    warm = max(1, round(_WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class TorchOptimizer:
    """An optimizer of torch on masters.

    Args:
        masters: tensors by name that are changed in place.
        build: tensors -> optimizer; its learning rate is replaced at every step.
    """

    def __init__(
        self, masters: Mapping[str, Tensor], build: Callable[[Sequence[Tensor]], torch.optim.Optimizer]
    ) -> None:
        self.masters = dict(masters)
        self.optimizer = build([*self.masters.values()])

    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Take one step of the masters that have a gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()  # frees the gradients

    def state(self) -> dict[str, Tensor]:
        """The moments, by the position of the master and their name in torch."""
        return {
            f"{position}:{name}": value
            for position, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        }

    def restore(self, state: Mapping[str, Tensor], taken: int) -> None:
        """Continue from a state, which counts its steps itself."""
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            position, name = key.split(":", 1)
            moments.setdefault(int(position), {})[name] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})


class Factored:
    """Steps with a factored second moment, as in Adafactor (Shazeer and Stern, 2018), and no first moment.

    The second moment of a matrix is the product of a row and a column vector. The update of every tensor is scaled to a
    root mean square of at most 1 over its nonzero gradients.

    Args:
        masters: tensors by name that are changed in place.
    """

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self.masters = dict(masters)
        self.moments: dict[str, tuple[Tensor, ...]] = {}
        self.taken = 0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Take one step of all masters."""
        self.taken += 1
        for name, gradient in gradients.items():
            moment = self._moment(name, gradient.square() + _TINY) / (1 - _BETAS[1] ** self.taken)
            update = gradient / moment.clamp_min(_LEAST).sqrt()
            size = update.square().sum() / torch.count_nonzero(gradient).clamp_min(1)
            stored = self.masters[name]  # possibly in main memory or in a file, while gradients are on a GPU
            master = stored.to(update.device)
            master.sub_(rate * update / size.sqrt().clamp_min(1.0))
            if master is not stored:
                stored.copy_(master)

    def state(self) -> dict[str, Tensor]:
        """The vectors of the second moments, by the name of the master and their number."""
        return {f"{name}:{part}": vector for name, parts in self.moments.items() for part, vector in enumerate(parts)}

    def restore(self, state: Mapping[str, Tensor], taken: int) -> None:
        """Continue from a state after `taken` steps."""
        self.taken = taken
        for name, master in self.masters.items():
            keys = (f"{name}:{part}" for part in range(2))
            self.moments[name] = tuple(state[key].to(master.device) for key in keys if key in state)

    def _moment(self, name: str, squared: Tensor) -> Tensor:
        """The second moment of a tensor after another squared gradient."""
        matrix = squared.flatten(1) if squared.ndim > 1 else squared
        parts = (matrix.mean(1), matrix.mean(0)) if squared.ndim > 1 else (matrix,)
        before = self.moments.get(name, tuple(torch.zeros_like(part) for part in parts))
        # After a checkpoint the old moments are on the device of the masters, maybe not on that of the gradients.
        moments = tuple(
            torch.lerp(part, old.to(part.device), _BETAS[1]) for part, old in zip(parts, before, strict=True)
        )
        self.moments[name] = moments
        if len(moments) == 1:
            return moments[0]
        rows, columns = moments
        return (rows[:, None] * columns[None] / rows.mean()).reshape(squared.shape)


MasterOptimizer = TorchOptimizer | Factored


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that `Descent` knows by name, and the learning rates that trials compare for it.

    Args:
        build: makes an optimizer of masters, given by name.
        rates: ascending.
        lower_rates: descending, tried where none of the rates gains: wide layers need small rates.
    """

    build: Callable[[Mapping[str, Tensor]], MasterOptimizer]
    rates: tuple[float, ...]
    lower_rates: tuple[float, ...] = ()


def _of_torch(build: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., TorchOptimizer]:
    """The optimizers of a class of torch with some options."""
    return partial(TorchOptimizer, build=partial(build, lr=1.0, **options))


# "sgd", "momentum" (Nesterov) and "adam" (Kingma and Ba, 2015) are those of fine-tuning, "block adam" is that of
# windows of blocks, and "factored" that of whole networks block by block.
OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind(_of_torch(torch.optim.SGD), (1e-2, 3e-2, 1e-1, 3e-1, 1.0)),
    "momentum": OptimizerKind(_of_torch(torch.optim.SGD, momentum=0.9, nesterov=True), (1e-2, 3e-2, 1e-1)),
    "adam": OptimizerKind(_of_torch(torch.optim.Adam), (5e-5, 2e-4, 8e-4, 3e-3)),
    "block adam": OptimizerKind(
        # The form for all tensors at once, which torch takes on a GPU, would need another copy of the masters.
        _of_torch(torch.optim.Adam, betas=_BETAS, foreach=False),
        (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
        (3e-5, 1e-5, 3e-6),
    ),
    "factored": OptimizerKind(Factored, (5e-5, 2e-4, 8e-4, 3e-3, 8e-3), (1.5e-5, 5e-6)),
}
