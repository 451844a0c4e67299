"""Scoring of rounds: the loss that compares them, and its samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from iobs.errors import NonFiniteError
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.losses import (
    block_distance_to,
    divergence_with_metrics,
    kl_to,
    mean_loss,
    task_loss,
)
from iobs.pruning.descent.augment import copies, sampled_text, suited, windows_of_steps
from iobs.pruning.network.copies import copied, dense_copy, require_own_modules
from iobs.pruning.network.modes import put, state
from iobs.pruning.recipe import Augmentation, FineTune, Loss, LossFunction
from iobs.pruning.recipe.parts import DISTANCES, LossName
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Samples
from iobs.pruning.samples.outputs import class_axis, logits, returns_states

# Losses of gradient steps that a recipe names: (losses of a run) -> (name in the report, the loss as a function).
# `recipe.parts.DISTANCES` has the names of those that are distances to the dense model.
LOSSES: dict[LossName, Callable[[Scoring], tuple[str, LossFunction]]] = {
    "task": lambda scoring: ("task loss", task_loss),
    "kl": lambda scoring: (scoring.name_of_divergence, kl_to(scoring.dense)),
    "block": lambda scoring: ("distance of block outputs", block_distance_to(scoring.dense, scoring.paths_of_blocks)),
}


class Scoring:
    """Losses of the model while it is pruned.

    Rounds are compared by the loss of the gradient steps between them. Without such steps they are compared by the KL
    divergence to the dense model.

    Args:
        model: the model, still dense.
        fit: calibration samples.
        heldout: held-out samples.
        steps: fine-tuning between the rounds and after them; None for none.
        seed: of random augmentations.
        chain: () -> blocks of the model.
        note: called with the text of every decision.
        reference: the dense model, frozen; None if the recipe needs none.

    Attributes:
        name: of the loss, for the report.
        loss: the loss as a function.
    """

    def __init__(
        self,
        model: nn.Module,
        fit: Samples,
        heldout: Samples,
        steps: tuple[FineTune | None, FineTune | None],
        seed: int,
        chain: Callable[[], list[Block]],
        note: Callable[[str], None],
        reference: nn.Module | None,
    ) -> None:
        self.model, self.fit, self.heldout, self.steps, self.reference = model, fit, heldout, steps, reference
        self.seed, self._chain, self._note = seed, chain, note
        self._suited: dict[bool, Augmentation | None] = {}  # key: samples may be mixed
        self.name, self.loss = self.loss_of(self.steps[0])

    # ---- losses
    def loss_of(self, step: FineTune | None) -> tuple[str, LossFunction]:
        """Name and function of the loss of gradient steps; for None the divergence from the dense model."""
        chosen = _loss_of(step)
        return LOSSES[chosen](self) if isinstance(chosen, str) else ("given loss", chosen)

    @cached_property
    def name_of_divergence(self) -> str:
        """The name of the loss of `kl_to`, which is a relative squared distance of outputs that are no chances."""
        if returns_states(self.dense):
            return "distance of hidden states"
        return "KL to the dense model" if self.compares_chances else "squared distance to the dense model"

    @cached_property
    def compares_chances(self) -> bool:
        """True if the outputs of the model are a distribution, so that divergences are in nats."""
        few = self.fit.first(2).batches[0]  # some models squeeze the dimension of a single sample
        with torch.no_grad():
            return class_axis(logits(batches.forward(self.dense, few)), few, self.dense) is not None

    @property
    def dense(self) -> nn.Module:
        """The dense model."""
        assert self.reference is not None
        return self.reference

    @property
    def paths_of_blocks(self) -> list[str]:
        """Paths of the blocks of the model."""
        return [block.path for block in self._chain()]

    def loss_on(self, samples: Samples) -> float | None:
        """The mean loss on samples; None if there are none."""
        return mean_loss(self.model, samples, self.loss) if samples.batches else None

    def dense_loss(self) -> float | None:
        """The loss of the dense model on the held-out samples; None if there are none.

        A distance to the dense model is 0, without a pass of the samples.
        """
        if self.heldout.batches and _loss_of(self.steps[0]) in DISTANCES:
            return 0.0
        return self.loss_on(self.heldout_augmented)

    def measure(self, samples: Samples) -> float | None:
        """The mean loss of the pruned model on samples; None if there are none.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        return self._finite(self.loss_on(samples))

    def measure_heldout(self) -> tuple[float | None, dict[str, dict[str, float]]]:
        """The mean loss of the pruned model on the held-out samples, and the metrics of the "dense" and "pruned" model.

        These come from the same passes, so they are empty unless the loss compares outputs on the samples as they are.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        if not self.compares_outputs:
            return self.measure(self.heldout_augmented), {}
        loss, dense, pruned = divergence_with_metrics(self.dense, self.model, self.heldout)
        return self._finite(loss), {"dense": dense, "pruned": pruned}

    @property
    def compares_outputs(self) -> bool:
        """True if rounds are compared by their outputs on the held-out samples as they are."""
        return bool(self.heldout.batches) and _loss_of(self.steps[0]) == "kl" and self.heldout_augmented is self.heldout

    def _finite(self, loss: float | None) -> float | None:
        if loss is not None and not math.isfinite(loss):
            hint = "lower the learning rate" if any(self.steps) else "look at its outputs"
            raise NonFiniteError(f"The pruned model's {self.name} is {loss}; {hint}.")
        return loss

    def divergence(self) -> float:
        """KL divergence of the model from the dense model, in nats; on held-out samples if there are any."""
        return mean_loss(self.model, self.heldout if self.heldout.batches else self.fit, kl_to(self.dense))

    def comparison_loss(self) -> float:
        """The loss that compares candidates: on the held-out samples, or on all samples if none are held out."""
        loss = self.measure(self.heldout_augmented if self.heldout_augmented.batches else self.fit)
        assert loss is not None
        return loss

    # ---- samples
    @cached_property
    def heldout_augmented(self) -> Samples:
        """The held-out samples, with augmented copies if gradient steps use augmentation."""
        return self.with_copies(self.heldout)

    def comparable(self, samples: Samples) -> Samples:
        """The samples for the calibration loss of a round.

        These are as many of the round's `samples` as are held out. If none are held out, they are all calibration
        samples, the same for every round.
        """
        return self.with_copies(samples.first(self.heldout.samples)) if self.heldout.batches else self.fit

    def with_copies(self, samples: Samples) -> Samples:
        """The samples, with augmented copies if gradient steps use augmentation of other data than text."""
        step = self.steps[1] or self.steps[0]
        if step is None or not samples.batches or self.windows_to_sample():
            return samples  # text is compared as it is
        # Mixed samples have no label, but the dense model gives outputs for them.
        augmentation = self.augmentation(replace(step, loss=_loss_of(self.steps[0])))
        return samples if augmentation is None else copies(augmentation, samples, self.seed)

    def augmentation(self, step: FineTune) -> Augmentation | None:
        """The augmentation of gradient steps; "auto" is decided at the first call."""
        if step.augment != "auto":
            return step.augment
        mix = step.imitates  # the dense model gives the labels of mixed samples
        if mix not in self._suited:
            sampled = self.windows_to_sample() if mix else 0
            self._suited[mix] = (
                sampled_text(self.dense, self.fit, sampled, self.seed)
                if sampled
                else suited(self.dense, self.fit, self.seed, mix=mix)
            )
            self._note(f"Augmentation of the gradient steps: {self._suited[mix] or 'none'}.")
        return self._suited[mix]

    def windows_to_sample(self) -> int:
        """Number of windows of text that are sampled from the dense model for gradient steps."""
        return 0 if self.reference is None else windows_of_steps(self.reference, self.fit, self.steps)

    # ---- models
    def current_copy(self) -> nn.Module:
        """A copy of the current model, made from the reference: after gradient steps a model may not be copyable."""
        current = copied(self.dense)
        for (_, value), (_, now) in zip(state(current), state(self.model), strict=True):
            put(value, now)
        return current


def frozen_copy(model: nn.Module, samples: Samples) -> nn.Module:
    """A frozen copy of a dense model; the first of the samples shows that it runs its own modules.

    Raises:
        ModelError: an attribute of a module cannot be copied, or a function on a module runs the original.
    """
    reference = dense_copy(model).eval()
    require_own_modules(reference, model, samples.batches[0])
    return reference.requires_grad_(False)


def _loss_of(step: FineTune | None) -> Loss:
    return "kl" if step is None else step.loss
