"""Optimizers of masters: Adam, and a factored second moment that keeps two vectors per matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_BETAS = 0.9, 0.95  # of Adam; 0.95 also of the factored second moment
_TINY = 1e-20  # added to squared gradients
_LEAST = 1e-30  # of a second moment: the product of a row and a column of zero gradients may be rounded to zero
_WARM_UP = 0.1  # share of the steps in which the rate rises


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate at a step: it rises over the first tenth, then falls to zero as a cosine."""
    warm = max(1, round(_WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


class Adam:
    """Adam (Kingma and Ba, 2015) with betas 0.9 and 0.95 on masters.

    Args:
        masters: tensors that are changed in place.
    """

    def __init__(self, masters: Iterable[Tensor]) -> None:
        # The form for all tensors at once, which torch takes on a GPU, would need another copy of the masters.
        self.optimizer = torch.optim.Adam([*masters], lr=1.0, betas=_BETAS, foreach=False)

    def step(self, gradients: Iterable[Tensor], rate: float) -> None:
        """Take one step."""
        (group,) = self.optimizer.param_groups
        group["lr"] = rate
        for master, gradient in zip(group["params"], gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()  # frees the gradients


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
        self.taken: dict[str, int] = {}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Take one step of the masters that have a gradient."""
        for name, gradient in gradients.items():
            self.taken[name] = self.taken.get(name, 0) + 1
            moment = self._moment(name, gradient.square() + _TINY) / (1 - _BETAS[1] ** self.taken[name])
            update = gradient / moment.clamp_min(_LEAST).sqrt()
            size = update.square().sum() / torch.count_nonzero(gradient).clamp_min(1)
            stored = self.masters[name]  # possibly in main memory or in a file, while gradients are on a GPU
            master = stored.to(update.device)
            master.sub_(rate * update / size.sqrt().clamp_min(1.0))
            if master is not stored:
                stored.copy_(master)

    def state(self) -> dict[str, Tensor]:
        """The vectors of the second moments, by the name of the master and their number."""
        return {f"{name}:{part}": one for name, parts in self.moments.items() for part, one in enumerate(parts)}

    def restore(self, tensors: Mapping[str, Tensor], taken: Mapping[str, int]) -> None:
        """Go on from a state.

        Args:
            tensors: holds the vectors of `state`.
            taken: number of steps by the name of the master.
        """
        self.taken = dict(taken)
        for name in self.taken:
            device = self.masters[name].device
            parts = (f"{name}:{part}" for part in range(2))
            self.moments[name] = tuple(tensors[part].to(device) for part in parts if part in tensors)

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
