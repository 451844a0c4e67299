"""Scoring of rounds: the loss that compares them, and its samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from torch import nn

from iobs.errors import NonFiniteError
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.losses import block_distance_to, kl_to, mean_loss, task_loss
from iobs.pruning.descent.augment import copies, suited
from iobs.pruning.descent.batches import samples_of_step
from iobs.pruning.descent.sampled_text import sampled_text, windows_to_sample
from iobs.pruning.network.copies import copied, dense_copy, require_own_modules
from iobs.pruning.network.modes import put, state
from iobs.pruning.recipe import Augmentation, FineTune, Loss, LossFunction, Recipe
from iobs.pruning.samples.subsets import Samples


class Scoring:
    """Losses of the model while it is pruned.

    Rounds are compared by the loss of the gradient steps between them. Without such steps they are compared by the KL
    divergence to the dense model.

    Args:
        model: the model, still dense.
        fit: calibration samples.
        heldout: held-out samples.
        recipe: targets, inputs, fine-tuning.
        seed: of random augmentations.
        chain: () -> blocks of the model.
        note: called with the text of every decision.
        reference: a frozen dense model, if `model` has lost parts already; None: a copy of the model is made.

    Attributes:
        steps: fine-tuning between the rounds and after them; None for none.
        reference: frozen copy of the dense model; None if nothing in the recipe needs it.
        name: of the loss, for the report.
        loss: the loss as a function.

    Raises:
        ModelError: the recipe needs a copy of the dense model, and the model cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        fit: Samples,
        heldout: Samples,
        recipe: Recipe,
        seed: int,
        chain: Callable[[], list[Block]],
        note: Callable[[str], None],
        reference: nn.Module | None = None,
    ) -> None:
        self.model, self.fit, self.heldout = model, fit, heldout
        self.steps = recipe.rounds.finetune, recipe.finetune
        self.seed, self._chain, self._note = seed, chain, note
        self.reference = (reference or frozen_copy(model, fit)) if needs_reference(recipe) else None
        self._suited: dict[bool, Augmentation | None] = {}  # key: samples may be mixed
        self.name, self.loss = self.loss_of(self.steps[0])

    # ---- losses
    def loss_of(self, step: FineTune | None) -> tuple[str, LossFunction]:
        """Name and function of the loss of gradient steps; for None the KL divergence to the dense model."""
        chosen = _loss_of(step)
        if not isinstance(chosen, str):
            return "given loss", chosen
        if chosen == "task":
            return "task loss", task_loss
        assert self.reference is not None
        if chosen == "kl":
            return "KL to the dense model", kl_to(self.reference)
        return "distance of block outputs", block_distance_to(self.reference, [block.path for block in self._chain()])

    def loss_on(self, samples: Samples) -> float | None:
        """The mean loss on samples; None if there are none."""
        return mean_loss(self.model, samples, self.loss) if samples.batches else None

    def dense_loss(self) -> float | None:
        """The loss of the dense model on the held-out samples; None if there are none.

        A distance to the dense model is 0, without a pass of the samples.
        """
        if self.heldout.batches and _loss_of(self.steps[0]) in ("kl", "block"):
            return 0.0
        return self.loss_on(self.heldout_augmented)

    def measure(self, samples: Samples) -> float | None:
        """The mean loss of the pruned model on samples; None if there are none.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        loss = self.loss_on(samples)
        if loss is not None and not math.isfinite(loss):
            hint = "lower the learning rate" if any(self.steps) else "look at its outputs"
            raise NonFiniteError(f"The pruned model's {self.name} is {loss}; {hint}.")
        return loss

    def divergence(self) -> float:
        """KL divergence of the model from the dense model, in nats; on held-out samples if there are any."""
        assert self.reference is not None
        return mean_loss(self.model, self.heldout if self.heldout.batches else self.fit, kl_to(self.reference))

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
        mix = step.loss in ("kl", "block")  # the dense model gives the labels of mixed samples
        if mix not in self._suited:
            assert self.reference is not None
            sampled = self.windows_to_sample() if mix else 0
            self._suited[mix] = (
                sampled_text(self.reference, self.fit, sampled, self.seed)
                if sampled
                else suited(self.reference, self.fit, self.seed, mix=mix)
            )
            self._note(f"Augmentation of the gradient steps: {self._suited[mix] or 'none'}.")
        return self._suited[mix]

    def windows_to_sample(self) -> int:
        """Number of windows of text that are sampled from the dense model for gradient steps."""
        if self.reference is None:
            return 0
        steps = [step for step in self.steps if step is not None and step.augment == "auto"]
        used = sum((step.most_steps or step.steps) * samples_of_step(step, self.fit) for step in steps)
        return windows_to_sample(self.reference, self.fit, used)

    # ---- models
    def current_copy(self) -> nn.Module:
        """A copy of the current model, made from the reference: after gradient steps a model may not be copyable."""
        assert self.reference is not None
        current = copied(self.reference)
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


def needs_reference(recipe: Recipe) -> bool:
    """Check that the recipe needs a copy of the dense model."""
    steps = [step for step in (recipe.rounds.finetune, recipe.finetune) if step is not None]
    return (
        recipe.target != "layer"
        or recipe.blocks is not None
        or recipe.inputs == "dense"
        or recipe.rounds.schedule == "auto"
        or recipe.rounds.finetune is None  # rounds are then compared by the divergence from the dense model
        or any(step.loss in ("kl", "block") for step in steps)
        or any(step.augment == "auto" for step in steps)  # "auto" compares predictions of the dense model
    )


def _loss_of(step: FineTune | None) -> Loss:
    return "kl" if step is None else step.loss
