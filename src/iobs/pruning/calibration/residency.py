"""Places of weights and activations during a sweep, and of the finished Grams of wide layers."""

from __future__ import annotations

import torch
from torch import Tensor


class Residency:
    """The place of the blocks' weights, and of the activations between them, during a sweep: all stay in memory.

    Stores of models that do not fit override the methods.

    Attributes:
        arithmetic: dtype of the computations in blocks; None: the dtype of the model.
        keeps_wide_inputs: True if there may be memory for inputs of layers that are wider than hidden states.
    """

    arithmetic: torch.dtype | None = None
    keeps_wide_inputs: bool = True

    def enter(self, stage: int) -> None:
        """Bring the weights of a stage into memory."""

    def leave(self, stage: int) -> None:
        """Release the weights of a stage, after the inputs of the next stage have been computed."""

    def release(self, stage: int) -> None:
        """Release the weights of a stage without keeping them; it will be entered again."""

    def release_dense(self, stage: int) -> None:
        """Release the dense weights of a stage: its dense outputs are known, and nothing else is needed of it."""

    def keep(self, index: int, hidden: Tensor) -> Tensor:
        """Store a hidden state until the next block needs it; it replaces the one at the same `index`."""
        return hidden

    def hold(self, tensor: Tensor) -> Tensor:
        """Store a tensor until the end of the run."""
        return tensor

    def fetch(self, stored: Tensor) -> Tensor:
        """A copy of a stored hidden state on the device of the computations."""
        return stored.clone()

    def park(self, name: str, moments: Tensor) -> Tensor:
        """Store a finished Gram, or moments of drift, of a wide layer; it replaces the one with the same name."""
        return moments
