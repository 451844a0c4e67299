"""What a run works on: the network with its samples, the dense one beside it, the losses, and the journal."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.errors import ModelError, NonFiniteError, first_line
from iobs.prune import batches as data_batches
from iobs.prune.augment import Augmentation, copies, suited
from iobs.prune.batches import Batch
from iobs.prune.checkpoint import Journal, fingerprint, identity_of
from iobs.prune.distributed import current
from iobs.prune.layers import Selection
from iobs.prune.losses import Loss, LossFunction, block_distance_to, kl_to, mean_loss, task_loss
from iobs.prune.memory import MemoryWatch
from iobs.prune.network import changing, put, state
from iobs.prune.parts import Part, divide, split
from iobs.prune.progress import Progress
from iobs.prune.settings import Settings
from iobs.prune.steps import GradientStep, Trainer, differentiable, samples_a_step
from iobs.prune.stream import exact_chain
from iobs.prune.trace import Block

SAVED_EVERY = 120.0  # seconds between snapshots of gradient steps


class Workbench:
    """A network while it is being pruned, and all that its rounds share.

    Args:
        model: in eval mode; its weights are those of the dense network.
        selection: the layers to prune; fewer, once some turn out to be fed nothing.
        pattern: asked of the network.
        settings: of the run; what is "auto" in them is settled on the way.
        collected: all samples.
        progress: is told what is noted.
        checkpoint: directory of the journal.
        frozen: names of the parameters that the user froze.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        pattern: Pattern,
        settings: Settings,
        collected: list[Batch],
        progress: Progress,
        checkpoint: str | Path | None,
        frozen: frozenset[str],
    ) -> None:
        self.model, self.selection, self.pattern, self.settings = model, selection, pattern, settings
        self.progress, self.frozen = progress, frozen
        self.memory = MemoryWatch(next(model.parameters()).device)
        self.fit, self.heldout = split(Part.of(collected), settings.holdout, settings.seed)
        self.portions = [self.fit] * settings.rounds
        if settings.data == "fresh":
            # Where the first projection may remain the only one it sees all samples.
            whole = [self.fit] if settings.schedule == "auto" else []
            left = settings.rounds - len(whole)
            self.portions = whole + (divide(self.fit, left, settings.seed) if left else [])
        own = changing(model, {layer.key for layer in selection.layers}, settings)
        self.original = {name: value.detach().clone() for name, value in own}
        self.reference = self._frozen_copy() if self._needs_reference() else None
        self.loss_name, self.loss = self._loss(settings.step)
        self.notes: list[str] = []
        self.ranks = current()
        for portion in self.portions:
            self.ranks.require_enough(portion)
        self.journal = self._opened(checkpoint)
        self.suited: dict[bool, Augmentation | None] = {}  # by whether samples may be mixed

    @cached_property
    def chain(self) -> list[Block]:
        """The blocks along which the network can be run, found while it is dense."""
        return exact_chain(self.model, [*self.fit.batches, *self.heldout.batches], self.selection.layers)

    def note(self, text: str) -> None:
        """Tell the report and whoever watches."""
        self.notes.append(text)
        self.progress.note(text)

    # ---- its weights
    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all that the run may change, as `restore` takes it."""
        return {name: value.detach().clone() for name, value in state(self.model) if name in self.original}

    def restore(self, values: dict[str, Tensor]) -> None:
        """Put parameters and buffers back."""
        for name, tensor in state(self.model):
            if name in values:
                put(tensor, values[name])

    def twin(self) -> nn.Module:
        """A copy of the network as it is, made from the reference: steps leave things in it that cannot be copied."""
        twin = copy.deepcopy(self.reference)
        assert twin is not None
        for (_, value), (_, now) in zip(state(twin), state(self.model), strict=True):
            put(value, now)
        return twin

    def masks(self, support: Literal["dense", "fixed"] = "fixed") -> dict[str, Tensor]:
        """True where entries may change, by parameter: not where a fixed support or old zeros that stay forbid it."""
        masks = {}
        if self.settings.keep_zeros:
            masks = {name: value != 0 for name, value in self.original.items() if value.ndim > 1}
        if support == "fixed":
            masks |= {layer.key: self.model.get_parameter(layer.key) != 0 for layer in self.selection.layers}
        return masks

    def _needs_reference(self) -> bool:
        settings = self.settings
        steps = [step for step in (settings.step, settings.polish) if step is not None]
        losses = [step.loss for step in steps]
        return (
            settings.target in ("dense", "network")
            or settings.inputs == "dense"
            or settings.schedule == "auto"
            or settings.step is None  # rounds are then judged by the divergence from the dense network
            or any(loss in ("kl", "block") for loss in losses)
            or any(step.augment == "auto" for step in steps)  # which asks the dense network what it keeps
        )

    def _frozen_copy(self) -> nn.Module:
        try:
            reference = copy.deepcopy(self.model).eval()
        except (RuntimeError, TypeError) as error:  # results of a training step, locks and the like
            raise ModelError(
                f"The dense network cannot be kept beside the pruned one, since something that a module holds besides "
                f"parameters and buffers cannot be copied: {first_line(error)}. Remove it, and prune again."
            ) from error
        return reference.requires_grad_(False)

    # ---- its loss
    def loss_on(self, part: Part) -> float | None:
        """The mean loss on some samples, whatever it is; None where there are none."""
        return mean_loss(self.model, part, self.loss) if part.batches else None

    def measure(self, part: Part) -> float | None:
        """The same of the pruned network.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        loss = self.loss_on(part)
        if loss is not None and not math.isfinite(loss):
            hint = "lower the learning rate" if self.settings.step or self.settings.polish else "look at its outputs"
            raise NonFiniteError(f"The pruned network's {self.loss_name} is {loss}; {hint}.")
        return loss

    def divergence(self) -> float:
        """KL divergence of the network as it is from the dense one, in nats; on held-out samples if there are any."""
        assert self.reference is not None
        part = self.heldout if self.heldout.batches else self.fit
        return mean_loss(self.model, part, kl_to(self.reference))

    @cached_property
    def judges(self) -> Part:
        """The samples that rounds are judged by: the held-out ones, as `with_copies` has them."""
        return self.with_copies(self.heldout)

    def with_copies(self, part: Part) -> Part:
        """Samples to compare networks on: with altered copies, where gradient steps see altered ones."""
        step = self.settings.polish or self.settings.step
        if step is None or not part.batches:
            return part
        # Mixed samples have an answer of the dense network, but no target.
        augmentation = self._augmentation(replace(step, loss=_loss_of(self.settings.step)))
        return part if augmentation is None else copies(augmentation, part, self.settings.seed)

    def _loss(self, step: GradientStep | None) -> tuple[str, LossFunction]:
        chosen = _loss_of(step)
        if not isinstance(chosen, str):
            return "given loss", chosen
        if chosen == "task":
            return "task loss", task_loss
        assert self.reference is not None
        if chosen == "kl":
            return "KL to the dense model", kl_to(self.reference)
        paths = [block.path for block in self.chain]
        return "distance of block outputs", block_distance_to(self.reference, paths)

    # ---- gradient steps
    def trainer(self, step: GradientStep, total: int, masks: dict[str, Tensor] | None = None) -> Trainer:
        """Takes gradient steps on the model as it now is."""
        prunable = {layer.key for layer in self.selection.layers}
        parameters = {
            name: value
            for name, value in self.model.named_parameters()
            if name in prunable or (step.parameters == "all" and value.is_floating_point() and name not in self.frozen)
        }
        _, loss = self._loss(step)
        return Trainer(self.model, parameters, step, loss, total, self.settings.seed, masks, self._augmentation(step))

    def _augmentation(self, step: GradientStep) -> Augmentation | None:
        if step.augment != "auto":
            return step.augment
        taught = step.loss in ("kl", "block")  # the dense network answers for whatever is shown
        if taught not in self.suited:
            assert self.reference is not None
            self.suited[taught] = suited(self.reference, self.fit, self.settings.seed, mix=taught)
            self.note(f"Augmentation of the gradient steps: {self.suited[taught] or 'none'}.")
        return self.suited[taught]

    def require_gradient(self, step: GradientStep) -> None:
        """Try what a step will need on the samples of one, before any work.

        Raises:
            CalibrationError: its loss asks for targets that the data do not have.
            ProblemError: its loss has no gradient.
        """
        _, loss = self._loss(step)
        sample = self.fit.first(samples_a_step(step, self.fit)).batches[0]
        with torch.enable_grad():
            differentiable(loss(self.model, data_batches.to_device(sample, next(self.model.parameters()).device)))

    def descend(self, trainer: Trainer, part: Part, index: int, key: str) -> list[float]:
        """Take a trainer's gradient steps after a round, those that the journal has not; all their losses."""
        before, last = [], time.monotonic()
        if self.journal is not None and key in self.journal:
            tensors, values = self.journal.get(key)
            trainer.restore(tensors, values["taken"])
            before = values["losses"]

        def keep(losses: list[float]) -> None:
            nonlocal last
            due = len(losses) == trainer.step.steps or time.monotonic() - last > SAVED_EVERY
            if self.journal is not None and self.ranks.first and due:
                self.journal.put(key, trainer.snapshot(), {"taken": trainer.taken, "losses": losses})
                last = time.monotonic()

        return trainer.run(part, partial(self.progress.step, index), before, keep)

    # ---- the journal
    def _identity(self) -> dict[str, Any]:
        settings = {
            **self.settings.summary(fingerprint),
            "pattern": repr(self.pattern),  # its text is rounded
            "layers": [layer.name for layer in self.selection.layers],
        }
        return identity_of(settings, state(self.model), self.fit.batches, self.heldout.batches)

    def _opened(self, checkpoint: str | Path | None) -> Journal | None:
        """The journal; the first rank makes it, and nobody writes before all have looked."""
        if checkpoint is None:
            return None
        identity = self._identity()
        journal = Journal(checkpoint, identity) if self.ranks.first else None
        self.ranks.wait()
        journal = journal or Journal(checkpoint, identity)
        self.ranks.wait()
        return journal

    def remembered(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Values for JSON, computed now or taken from the journal."""
        if self.journal is not None and key in self.journal:
            return self.journal.get(key)[1]
        values = compute()
        if self.journal is not None and self.ranks.first:
            self.journal.put(key, {}, values)
        return values


def _loss_of(step: GradientStep | None) -> Loss:
    """What rounds with these steps between them are judged by."""
    return "kl" if step is None else step.loss
