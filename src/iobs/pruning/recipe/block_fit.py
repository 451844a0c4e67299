"""Settings of block reconstruction: surviving weights are fitted to the dense model's block outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Literal

from iobs.errors import ProblemError, is_a


@dataclass(frozen=True)
class BlockFit:
    """Settings of block reconstruction.

    Each block is projected several times with growing sparsity, with gradient steps on the block alone between two
    projections. Then a window of blocks is fitted, and slides on by one block. The fitted parameters are the surviving
    weights of pruned layers, biases and norm scales. The loss is the squared distance to the dense model's output, on
    inputs of the pruned model. A fit that raises the held-out loss is undone.

    Args:
        window: number of blocks that are fitted together. Blocks without pruned layers do not count.
        masks: number of projections of each block.
        between: gradient steps between two projections, on the block alone.
        steps: gradient steps of each window; 0 for none.
        epochs: most passes of a fit over the calibration samples, which limits `steps` and `network_steps`; None: no
            limit.
        lr: learning rate of Adam, or "auto": short trials on the first block choose it on held-out samples.
        batch_size: samples per step. "auto": 1,024 tokens of text, or 16 samples of other data. Half of the short
            windows that a causal model gets are then joined, so that later positions are fitted too.
        last: loss of the last window. "kl": the KL divergence of the network's outputs. "mse": as for other windows.
        network_steps: gradient steps of the whole network after the last window, block by block; 0 for none. Where a
            recipe has them and fine-tuning too, text takes these steps alone, and other data the fine-tuning alone.
        network_lr: learning rate of these steps, or "auto": short trials choose it on held-out samples.
        sampled: windows of text per calibration window that the dense model samples. They are added to the calibration
            samples, so that many steps do not overfit few windows. Sampling needs a causal language model in memory,
            and windows of equal length without padding. "auto" is 2 where this is so, up to 2^17 tokens of calibration
            text, otherwise 0. Held-out samples stay as they are.

    Raises:
        ProblemError: a setting is outside its range.
    """

    window: int = 2
    masks: int = 3
    between: int = 50
    steps: int = 300
    epochs: float | None = None
    lr: float | Literal["auto"] = "auto"
    batch_size: int | Literal["auto"] = "auto"
    last: Literal["kl", "mse"] = "kl"
    network_steps: int = 0
    network_lr: float | Literal["auto"] = "auto"
    sampled: int | Literal["auto"] = 0

    def __post_init__(self) -> None:
        counts = {"window": 1, "masks": 1, "between": 0, "steps": 0, "network_steps": 0}
        counts |= {} if self.sampled == "auto" else {"sampled": 0}
        for name, least in counts.items():
            value = getattr(self, name)
            if not is_a(Integral, value) or value < least:
                raise ProblemError(f"{name} of blocks must be a whole number of at least {least}, got {value!r}.")
        if self.epochs is not None and not (is_a(Real, self.epochs) and self.epochs > 0):
            raise ProblemError(f"epochs of blocks must be a number above zero or None, got {self.epochs!r}.")
        for name in ("lr", "network_lr"):
            rate = getattr(self, name)
            if rate != "auto" and not (is_a(Real, rate) and 0 < rate < math.inf):
                raise ProblemError(f'{name} of blocks must be "auto" or a finite number above zero, got {rate!r}.')
        if self.batch_size != "auto" and not (is_a(Integral, self.batch_size) and self.batch_size >= 1):
            raise ProblemError(
                f'batch_size of blocks must be a whole number of at least 1 or "auto", got {self.batch_size!r}.'
            )
        if self.last not in ("kl", "mse"):
            raise ProblemError(f'last of blocks must be "kl" or "mse", got {self.last!r}.')

    @property
    def fits_levels(self) -> bool:
        """Check that windows are also fitted between two projections, before the sparsity is reached."""
        return self.masks > 1 and self.between > 0

    def within(self, batches: int) -> BlockFit:
        """The settings with `steps` and `network_steps` within the limit of epochs.

        Args:
            batches: number of calibration batches of one step each.
        """
        if self.epochs is None or self.epochs == math.inf:
            return self
        most = math.ceil(self.epochs * batches)
        return replace(self, steps=min(self.steps, most), network_steps=min(self.network_steps, most))
