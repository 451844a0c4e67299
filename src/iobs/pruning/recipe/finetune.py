"""Settings of fine-tuning: between two projections, or after the last projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError, is_a
from iobs.pruning.samples.batches import Batch

LossFunction = Callable[[nn.Module, Batch], Tensor]
Loss = Literal["task", "kl", "block"] | LossFunction
Augmentation = Callable[[Batch, torch.Generator], Batch]
Optimizer = Literal["sgd", "momentum", "adam", "auto"]


@dataclass(frozen=True)
class FineTune:
    """Settings of fine-tuning: gradient steps on the pruned network (Algorithm 2, line 9).

    Args:
        lr: learning rate, or "auto": short trials after the first projection choose it on held-out samples.
        optimizer: "sgd": as in the paper. "momentum": SGD with Nesterov momentum 0.9. "adam". "auto", only with
            lr="auto": the better of "adam" and "momentum" in the same trials.
        steps: number of steps. Each step takes the next batch of the calibration data, in an endless loop. A single
            step without a batch_size takes the gradient of all data, as in the paper.
        most_steps: upper limit of the steps for cheap networks. The steps grow towards it while they cost less than
            1.25e13 multiply-adds in all. On text they grow only if `augment` samples text. None: exactly `steps`.
        loss: "task": the model's own loss, or cross-entropy with the labels. "kl": KL divergence to the dense model.
            "block": mean squared distance to the block outputs of the dense model. Or a function (model, batch) ->
            scalar.
        parameters: "prunable": train the parameters that hold pruned matrices, as in the paper. "all": train every
            parameter.
        support: "dense": removed weights may grow again, as in the paper. "fixed": train only weights that the last
            projection kept.
        decay: True: warm up over the first tenth of all steps of the run, then decay linearly to zero. Without warm-up
            the first updates of Adam have full size and undo the exact refit.
        batch_size: samples per step. None: the calibration batches unchanged. "auto": 64 samples, or a tenth of all
            samples if that is less, but at least 16; for text 2048 tokens.
        augment: (batch, torch.Generator) -> batch, applied before each use. "auto": mirror and shift images as far as
            the dense model's predictions stay the same. With the losses "kl" and "block" it also mixes two samples of
            real numbers. With these losses it samples half of the windows of text from the dense causal model. None: no
            augmentation.

    Raises:
        ProblemError: a setting is outside its range.
    """

    lr: float | Literal["auto"] = 0.01
    optimizer: Optimizer = "sgd"
    steps: int = 1
    most_steps: int | None = None
    loss: Loss = "task"
    parameters: Literal["prunable", "all"] = "prunable"
    support: Literal["dense", "fixed"] = "dense"
    decay: bool = False
    batch_size: int | Literal["auto"] | None = None
    augment: Augmentation | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.lr != "auto" and not (is_a(Real, self.lr) and 0 < self.lr < math.inf):
            raise ProblemError(f'lr must be "auto" or a finite number above zero, got {self.lr!r}.')
        if not is_a(Integral, self.steps) or self.steps < 1:
            raise ProblemError(f"steps must be a whole number of at least 1, got {self.steps!r}.")
        if self.most_steps is not None and not (is_a(Integral, self.most_steps) and self.most_steps >= self.steps):
            raise ProblemError(
                f"most_steps must be a whole number of at least steps={self.steps}, or None; got {self.most_steps!r}."
            )
        size = None if self.batch_size == "auto" else self.batch_size
        if size is not None and not (is_a(Integral, size) and size >= 1):
            raise ProblemError(f'batch_size must be a whole number of at least 1, "auto" or None, got {size!r}.')
        if self.augment is not None and self.augment != "auto" and not callable(self.augment):
            raise ProblemError(f'augment must be "auto", None or a function, got {self.augment!r}.')
        if self.optimizer not in get_args(Optimizer):
            raise ProblemError(f'optimizer must be "sgd", "momentum", "adam" or "auto", got {self.optimizer!r}.')
        if self.optimizer == "auto" and self.lr != "auto":
            raise ProblemError(
                f'optimizer="auto" is chosen together with lr="auto", got lr={self.lr}; give an optimizer too: "adam".'
            )
        if self.parameters not in ("prunable", "all"):
            raise ProblemError(f'parameters must be "prunable" or "all", got {self.parameters!r}.')
        if not isinstance(self.decay, bool):
            raise ProblemError(f"decay must be True or False, got {self.decay!r}.")
        if self.support not in ("dense", "fixed"):
            raise ProblemError(f'support must be "dense" or "fixed", got {self.support!r}.')
        if self.loss not in ("task", "kl", "block") and not callable(self.loss):
            raise ProblemError(f'loss must be "task", "kl", "block" or a function, got {self.loss!r}.')
