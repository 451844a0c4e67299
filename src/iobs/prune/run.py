"""One run of Algorithm 2: its rounds, what each needs, and the choice among them."""

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
from iobs.errors import LayerSelectionError, NonFiniteError
from iobs.prune import batches as data_batches
from iobs.prune import choices
from iobs.prune.audit import audit_layers
from iobs.prune.augment import Augmentation, copies, suited
from iobs.prune.batches import Batch, Part
from iobs.prune.checkpoint import Journal, fingerprint, identity_of
from iobs.prune.distributed import current
from iobs.prune.estimate import affordable, estimate_seconds
from iobs.prune.layers import Layer, Selection
from iobs.prune.losses import Loss, LossFunction, block_distance_to, kl_to, mean_loss, task_loss
from iobs.prune.memory import MemoryWatch
from iobs.prune.network import changing, state, update_batch_norm
from iobs.prune.progress import Progress
from iobs.prune.projection import Projection
from iobs.prune.record import Report, RoundRecord, best_index
from iobs.prune.settings import Settings
from iobs.prune.spread import asked, thinner
from iobs.prune.steps import GradientStep, Trainer
from iobs.prune.stream import exact_chain
from iobs.prune.trace import Block
from iobs.prune.walk import Walk

SAVED_EVERY = 120.0  # seconds between snapshots of gradient steps


class Run:
    """One call of `prune`."""

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
        self.memory = MemoryWatch()
        self.fit, self.heldout = data_batches.split(Part.of(collected), settings.holdout, settings.seed)
        self.portions = [self.fit] * settings.rounds
        if settings.data == "fresh":
            # Where the first projection may remain the only one it sees all samples.
            whole = [self.fit] if settings.schedule == "auto" else []
            left = settings.rounds - len(whole)
            self.portions = whole + (data_batches.divide(self.fit, left, settings.seed) if left else [])
        own = changing(model, {layer.key for layer in selection.layers}, settings)
        self.original = {name: value.detach().clone() for name, value in own}
        self.reference = self._frozen_copy() if self._needs_reference() else None
        self.loss_name, self.loss = self._loss(settings.step)
        self.judges = self.heldout
        self.notes: list[str] = []
        self.records: list[RoundRecord] = []
        self.best: dict[str, Tensor] = {}
        self.ranks = current()
        for portion in self.portions:
            self.ranks.require_enough(portion)
        self.journal = self._opened(checkpoint)
        self.suited: dict[bool, Augmentation | None] = {}  # by whether samples may be mixed

    @cached_property
    def chain(self) -> list[Block]:
        """The blocks along which the network can be run, found while it is dense."""
        return exact_chain(self.model, [*self.fit.batches, *self.heldout.batches], self.selection.layers)

    def execute(self) -> Report:
        """All rounds, the choice among them, the audit; the original weights come back if anything fails."""
        started = time.perf_counter()
        try:
            return self._execute(started)
        except BaseException:  # an interrupted user must get the weights back too
            self.restore(self.original)
            raise

    def _execute(self, started: float) -> Report:
        self.progress.begin(self.settings.rounds, [layer.name for layer in self.selection.layers])
        dense_loss = self._prepare()
        tried = self.settings.polish is not None and self.settings.polish.lr == "auto"
        final, curves = choices.allocate(self)
        self._rounds(final)
        self._polishes(final, tried)
        self.restore(self.best)
        return Report(
            settings={**self.settings.summary(), "pattern": str(self.pattern), "samples": self.fit.samples},
            loss_name=self.loss_name,
            dense_loss=dense_loss,
            rounds=self.records,
            best_round=best_index(self.records, asked(final)),
            skipped=self.selection.skipped,
            audit=audit_layers(self.model, {layer: final[layer] for layer in self.selection.layers}),
            seconds=time.perf_counter() - started,
            peak_memory_bytes=self.memory.look(),
            notes=self.notes,
            allocation=curves,
        )

    def _prepare(self) -> float | None:
        """Settle what the dense network decides; its loss on the samples that rounds are judged by."""
        step, polish = (
            None if step is None else affordable(step, self.model, self.selection.layers, self.fit)
            for step in (self.settings.step, self.settings.polish)
        )
        self.settings = replace(self.settings, step=step, polish=polish)
        self.judges = self._judging(self.heldout)
        loss = self._loss_on(self.judges)  # where it is NaN, the walk names the layer that makes it so
        if loss is None:
            self._loss_on(self.fit.first(1))  # data without targets is to be known now, not after a projection
        if step is not None or polish is not None:
            expected = estimate_seconds(self.model, self.selection.layers, self.chain, self.fit, self.settings)
            self.note(f"Estimated time: {expected:.0f} s.")
        return loss

    def _rounds(self, final: dict[Layer, Pattern]) -> None:
        """Project, step, project: Algorithm 2."""
        trainer: Trainer | None = None
        while len(self.records) < self.settings.rounds:
            index, began = len(self.records), time.perf_counter()
            record = self._project(index, self._scheduled(final, index), trainer)
            self._consider(record, final)
            if index == 0:
                choices.settle(self)
            if index + 1 < self.settings.rounds:
                trainer = self._steps_after(record, trainer)
            record.seconds = time.perf_counter() - began
            self.progress.round(record)

    def _steps_after(self, record: RoundRecord, trainer: Trainer | None) -> Trainer | None:
        """The gradient steps that lead to the next round; returns what took them, which that round asks for weights."""
        step, rounds = self.settings.step, self.settings.rounds
        if record.index == 0 and self.settings.schedule == "cubic":
            self.restore(self.original)  # sparsity grows from the dense weights; the first round was a look ahead
            return None if step is None else self.trainer(step, (rounds - 2) * step.steps)
        if step is None:
            return None
        trainer = trainer or self.trainer(step, (rounds - 1) * step.steps)
        trainer.adopt()
        trainer.masks = self.masks(step.support)
        part = self.portions[record.index]
        record.step_losses = self._run_steps(trainer, part, record.index, f"steps {record.index}")
        return trainer

    def _polishes(self, final: dict[Layer, Pattern], tried: bool) -> None:
        """Steps on the support of the best projection: in full, and where trials chose them as short as those."""
        leader, projected = self.records[best_index(self.records, asked(final))], self.best
        for step in choices.polishes(self.settings.polish, tried):
            self.restore(projected)
            try:
                self._consider(self._polish(step, leader, len(self.records)), final)
            except NonFiniteError as error:
                self.note(f"The polish of {step.steps} steps is left out: {error}")

    def _project(self, index: int, patterns: dict[Layer, Pattern], trainer: Trainer | None) -> RoundRecord:
        """Sweep over all layers, then measure."""
        settings, portion = self.settings, self.portions[index]
        began = time.perf_counter()
        walk = Walk(
            self.model,
            portion,
            self.heldout,
            self.selection.layers,
            self.chain,
            self._imitated(index),
            dense_inputs=settings.inputs == "dense",
            seed=settings.seed + index,
            ranks=self.ranks,
        )
        masters = {} if trainer is None else trainer.masters
        projection = Projection(
            self.model,
            patterns,
            settings,
            self.progress,
            index,
            self.journal,
            self.ranks,
            current=lambda layer: layer.matrix(masters[layer.key]) if layer.key in masters else layer.read(self.model),
            dense=lambda layer: layer.matrix(self.original[layer.key]),
            memory=self.memory,
        )
        unseen = walk.sweep(projection.visit, projection.replay)
        record = projection.record
        rules = {entry.name: entry.stats["rule"] for entry in record.layers if "rule" in entry.stats}
        self.notes += [f"Round {index}, {name}: {rule}." for name, rule in rules.items()]
        self._leave_dense(unseen)
        if settings.batch_norm == "update":
            update_batch_norm(self.model, portion)
        self._finish_round(record, portion, began)
        return record

    def _leave_dense(self, unseen: list[Layer]) -> None:
        """Layers that the network feeds nothing have no Hessian; they stay as they are, and the report says so."""
        if not unseen:
            return
        kept = tuple(layer for layer in self.selection.layers if layer not in unseen)
        names = ", ".join(layer.name for layer in unseen)
        if not kept:
            raise LayerSelectionError(
                f"Nothing was pruned: on the calibration data the network feeds nothing to {names}."
            )
        self.note(f"Left dense, since the network feeds them nothing on the calibration data: {names}.")
        reasons = dict.fromkeys((layer.name for layer in unseen), "the network fed it nothing on the calibration data")
        self.selection = Selection(kept, {**self.selection.skipped, **reasons})

    def _imitated(self, index: int) -> nn.Module | None:
        """The network whose layers' outputs are the targets of a sweep; None where a layer imitates itself."""
        target = self.settings.target
        dense = index == 0 or (index == 1 and self.settings.schedule == "cubic")  # still the weights of the start
        if target == "network" and not dense:
            return self._twin()
        return None if target == "current" and self.settings.inputs == "pruned" else self.reference

    def _twin(self) -> nn.Module:
        """A copy of the network as it is, made from the reference: steps leave things in it that cannot be copied."""
        twin = copy.deepcopy(self.reference)
        assert twin is not None
        with torch.no_grad():
            for (_, value), (_, now) in zip(state(twin), state(self.model), strict=True):
                value.copy_(now)
        return twin

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

    def _run_steps(self, trainer: Trainer, part: Part, index: int, key: str) -> list[float]:
        """The gradient steps after a round, those that the journal has not."""
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

    # ---- measuring and choosing
    def _finish_round(self, record: RoundRecord, portion: Part, began: float) -> None:
        # As many calibration samples as are held out say as much, and a round's measurement stays cheap.
        # With none held out the rounds are compared by it, so on the same samples whatever they were solved for.
        compared = self._judging(portion.first(self.heldout.samples)) if self.heldout.batches else self.fit
        record.loss_calibration = self.measure(compared)
        record.loss_heldout = self.measure(self.judges)
        record.seconds = time.perf_counter() - began

    def _judging(self, part: Part) -> Part:
        """Samples that networks are compared on: with altered copies, where gradient steps see altered ones."""
        step = self.settings.polish or self.settings.step
        if step is None or not part.batches:
            return part
        # Mixed samples have an answer of the dense network, but no target.
        augmentation = self._augmentation(replace(step, loss=_loss_of(self.settings.step)))
        return part if augmentation is None else copies(augmentation, part, self.settings.seed)

    def _loss_on(self, part: Part) -> float | None:
        if not part.batches:
            return None
        return mean_loss(self.model, part, self.loss)

    def measure(self, part: Part) -> float | None:
        """The mean loss on some samples; None where there are none."""
        loss = self._loss_on(part)
        if loss is not None and not math.isfinite(loss):
            hint = "lower the learning rate" if self.settings.step or self.settings.polish else "look at its outputs"
            raise NonFiniteError(f"The pruned network's {self.loss_name} is {loss}; {hint}.")
        return loss

    def divergence(self) -> float:
        """KL divergence of the network as it is from the dense one, in nats; on held-out samples if there are any."""
        assert self.reference is not None
        part = self.heldout if self.heldout.batches else self.fit
        return mean_loss(self.model, part, kl_to(self.reference))

    def _consider(self, record: RoundRecord, final: dict[Layer, Pattern]) -> None:
        """Add a round, and keep its weights, which the model holds, where it is the best so far."""
        self.records.append(record)
        if best_index(self.records, asked(final)) == len(self.records) - 1:
            self.best = self.snapshot()

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all that the run may change, as `restore` takes it."""
        return {name: value.detach().clone() for name, value in state(self.model) if name in self.original}

    def restore(self, values: dict[str, Tensor]) -> None:
        """Put parameters and buffers back."""
        with torch.no_grad():
            for name, tensor in state(self.model):
                if name in values:
                    tensor.copy_(values[name])

    # ---- between rounds
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

    def note(self, text: str) -> None:
        """Tell the report and whoever watches."""
        self.notes.append(text)
        self.progress.note(text)

    def masks(self, support: Literal["dense", "fixed"] = "fixed") -> dict[str, Tensor]:
        """Ones where entries may change, by parameter: not where a fixed support or old zeros that stay forbid it."""
        masks = {}
        if self.settings.keep_zeros:
            masks = {name: (value != 0).float() for name, value in self.original.items() if value.ndim > 1}
        if support == "fixed":
            masks |= {layer.key: (self.model.get_parameter(layer.key) != 0).float() for layer in self.selection.layers}
        return masks

    def _polish(self, step: GradientStep, leader: RoundRecord, index: int) -> RoundRecord:
        """Steps on the support of the best projection, whose weights the model holds."""
        began = time.perf_counter()
        trainer = self.trainer(step, step.steps, self.masks())
        losses = self._run_steps(trainer, self.fit, index, f"polish of {step.steps} steps")
        record = RoundRecord(index, leader.asked, None, None, leader.layers, losses, kind="polish")
        self._finish_round(record, self.fit, began)
        self.progress.round(record)
        return record

    def _scheduled(self, final: dict[Layer, Pattern], index: int) -> dict[Layer, Pattern]:
        last = self.settings.rounds - 1
        if self.settings.schedule == "constant" or index in (0, last):
            return final
        # Cubic growth from 0.72 of the asked sparsity (65 % on the way to 90 %), as measured best in LOG.md.
        share = 1 - 0.28 * (1 - (index - 1) / (last - 1)) ** 3
        return {layer: thinner(pattern, layer, share) for layer, pattern in final.items()}

    # ---- losses
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
        reference = copy.deepcopy(self.model).eval()
        return reference.requires_grad_(False)

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


def _loss_of(step: GradientStep | None) -> Loss:
    """What rounds with these steps between them are judged by."""
    return "kl" if step is None else step.loss
