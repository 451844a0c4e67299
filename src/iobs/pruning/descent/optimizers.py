"""Optimizers of masters, and the schedules of their learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

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


class MasterOptimizer(Protocol):
    """Steps on masters, in place."""

    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Take one step of the masters that have a gradient."""

    def state(self) -> dict[str, Tensor]:
        """The tensors that the next steps depend on, by name."""
        ...

    def restore(self, state: Mapping[str, Tensor], taken: int) -> None:
        """Continue from a state after `taken` steps."""


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
