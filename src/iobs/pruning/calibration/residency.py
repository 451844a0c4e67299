"""Places of weights and activations during a sweep, and of the finished Grams of wide layers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from iobs.pruning.calibration import gram
from iobs.pruning.calibration.gram import Gram


class Residency(Protocol):
    """The place of the blocks' weights, and of the activations between them, during a sweep.

    Attributes:
        arithmetic: dtype of the computations in blocks; None: the dtype of the model.
    """

    arithmetic: torch.dtype | None

    def enter(self, stage: int) -> None:
        """Bring the weights of a stage into memory."""
        ...

    def leave(self, stage: int) -> None:
        """Release the weights of a stage, after the inputs of the next stage have been computed."""
        ...

    def release(self, stage: int) -> None:
        """Release the weights of a stage without keeping them; it will be entered again."""
        ...

    def release_dense(self, stage: int) -> None:
        """Release the dense weights of a stage: its dense outputs are known, and nothing else is needed of it."""
        ...

    def keep(self, index: int, hidden: Tensor) -> Tensor:
        """Store a hidden state until the next block needs it; it replaces the one at the same `index`."""
        ...

    def hold(self, tensor: Tensor) -> Tensor:
        """Store a tensor until the end of the run."""
        ...

    def fetch(self, stored: Tensor) -> Tensor:
        """A copy of a stored hidden state on the device of the computations."""
        ...

    def park(self, name: str, moments: Tensor) -> Tensor:
        """Store a finished Gram, or moments of drift, of a wide layer; it replaces the one with the same name."""
        ...


class InMemory:
    """Residency of a model whose weights and activations stay in memory."""

    arithmetic: torch.dtype | None = None

    def enter(self, stage: int) -> None:
        """Do nothing."""

    def leave(self, stage: int) -> None:
        """Do nothing."""

    def release(self, stage: int) -> None:
        """Do nothing."""

    def release_dense(self, stage: int) -> None:
        """Do nothing."""

    def keep(self, index: int, hidden: Tensor) -> Tensor:
        """Return the hidden state itself."""
        return hidden

    def hold(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def fetch(self, stored: Tensor) -> Tensor:
        """Return a copy."""
        return stored.clone()

    def park(self, name: str, moments: Tensor) -> Tensor:
        """Return the moments themselves."""
        return moments


def park_wide(finished: Gram, part: str, residency: Residency) -> None:
    """Store the moments of a wide layer: in a mapped file they take no anonymous memory during the solves.

    The moments of the layer before, under the same names, are overwritten.

    Args:
        finished: after `finish`.
        part: "calibration" or "heldout".
        residency: of the sweep.
    """
    if finished.own.shape[-1] < gram.WIDE:
        return
    drift = finished.drift
    for owner in (finished,) if drift is None else (finished, drift):
        for name in ("own", "cross", "dense"):
            moments = getattr(owner, name, None)
            if moments is not None:
                kind = "drift" if owner is drift else "gram"
                shape = "x".join(map(str, moments.shape))
                setattr(owner, name, residency.park(f"{part}.{name}.{shape}.{kind}", moments))
