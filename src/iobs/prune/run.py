"""One run of Algorithm 2: its rounds, and the choice among them."""

from __future__ import annotations

import time
from dataclasses import replace

from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.errors import LayerSelectionError, NonFiniteError
from iobs.prune import choices
from iobs.prune.audit import audit_layers
from iobs.prune.estimate import affordable, estimate_seconds
from iobs.prune.gram import by_magnitude
from iobs.prune.layers import Layer, Selection
from iobs.prune.network import update_batch_norm
from iobs.prune.parts import Part
from iobs.prune.projection import Projection
from iobs.prune.record import Report, RoundRecord, best_index
from iobs.prune.spread import asked, thinner
from iobs.prune.steps import GradientStep, Trainer
from iobs.prune.walk import Walk
from iobs.prune.workbench import Workbench


class Run:
    """One call of `prune`."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.records: list[RoundRecord] = []
        self.best: dict[str, Tensor] = {}

    def execute(self) -> Report:
        """All rounds, the choice among them, the audit; the original weights come back if anything fails."""
        started = time.perf_counter()
        try:
            return self._execute(started)
        except BaseException:  # an interrupted user must get the weights back too
            self.bench.restore(self.bench.original)
            raise

    def _execute(self, started: float) -> Report:
        bench = self.bench
        bench.progress.begin(bench.settings.rounds, [layer.name for layer in bench.selection.layers])
        dense_loss = self._prepare()
        tried = bench.settings.polish is not None and bench.settings.polish.lr == "auto"
        final, curves = choices.allocate(bench)
        self._rounds(final)
        self._polishes(final, tried)
        bench.restore(self.best)
        return Report(
            settings={**bench.settings.summary(), "pattern": str(bench.pattern), "samples": bench.fit.samples},
            loss_name=bench.loss_name,
            dense_loss=dense_loss,
            rounds=self.records,
            best_round=best_index(self.records, asked(final)),
            skipped=bench.selection.skipped,
            audit=audit_layers(bench.model, {layer: final[layer] for layer in bench.selection.layers}),
            seconds=time.perf_counter() - started,
            peak_memory_bytes=bench.memory.look(),
            notes=bench.notes,
            allocation=curves,
        )

    def _prepare(self) -> float | None:
        """Settle what the dense network decides; its loss on the samples that rounds are judged by."""
        bench, layers = self.bench, self.bench.selection.layers
        step, polish = (
            None if step is None else affordable(step, bench.model, layers, bench.fit)
            for step in (bench.settings.step, bench.settings.polish)
        )
        bench.settings = replace(bench.settings, step=step, polish=polish)
        loss = bench.loss_on(bench.judges)  # where it is NaN, the walk names the layer that makes it so
        if loss is None:
            bench.loss_on(bench.fit.first(1))  # data without targets is to be known now, not after a projection
        for one in (step, polish):
            if one is not None:
                bench.require_gradient(one)
        if step is not None or polish is not None:
            expected = estimate_seconds(bench.model, layers, bench.chain, bench.fit, bench.settings)
            bench.note(f"Estimated time: {expected:.0f} s.")
        return loss

    def _rounds(self, final: dict[Layer, Pattern]) -> None:
        """Project, step, project: Algorithm 2."""
        bench = self.bench
        trainer: Trainer | None = None
        while len(self.records) < bench.settings.rounds:
            index, began = len(self.records), time.perf_counter()
            record = self._project(index, self._scheduled(final, index), trainer)
            self._consider(record, final)
            if index == 0:
                choices.settle(bench)
            if index + 1 < bench.settings.rounds:
                trainer = self._steps_after(record, trainer)
            record.seconds = time.perf_counter() - began
            bench.progress.round(record)

    def _steps_after(self, record: RoundRecord, trainer: Trainer | None) -> Trainer | None:
        """The gradient steps that lead to the next round; returns what took them, which that round asks for weights."""
        bench, step, rounds = self.bench, self.bench.settings.step, self.bench.settings.rounds
        if record.index == 0 and bench.settings.schedule == "cubic":
            bench.restore(bench.original)  # sparsity grows from the dense weights; the first round was a look ahead
            return None if step is None else bench.trainer(step, (rounds - 2) * step.steps)
        if step is None:
            return None
        trainer = trainer or bench.trainer(step, (rounds - 1) * step.steps)
        trainer.adopt()
        trainer.masks = bench.masks(step.support)
        record.step_losses = bench.descend(trainer, bench.portions[record.index], record.index, f"steps {record.index}")
        return trainer

    def _polishes(self, final: dict[Layer, Pattern], tried: bool) -> None:
        """Steps on the support of the best projection: in full, and where trials chose them as short as those."""
        leader, projected = self.records[best_index(self.records, asked(final))], self.best
        for step in choices.polishes(self.bench.settings.polish, tried):
            self.bench.restore(projected)
            try:
                self._consider(self._polish(step, leader, len(self.records)), final)
            except NonFiniteError as error:
                self.bench.note(f"The polish of {step.steps} steps is left out: {error}")

    def _project(self, index: int, patterns: dict[Layer, Pattern], trainer: Trainer | None) -> RoundRecord:
        """Sweep over all layers, then measure."""
        bench, settings, portion = self.bench, self.bench.settings, self.bench.portions[index]
        began = time.perf_counter()
        walk = Walk(
            bench.model,
            portion,
            bench.heldout,
            bench.selection.layers,
            bench.chain,
            self._imitated(index),
            dense_inputs=settings.inputs == "dense",
            seed=settings.seed + index,
            ranks=bench.ranks,
        )
        masters = {} if trainer is None else trainer.masters
        projection = Projection(
            bench.model,
            patterns,
            settings,
            bench.progress,
            index,
            bench.journal,
            bench.ranks,
            current=lambda layer: layer.matrix(masters[layer.key]) if layer.key in masters else layer.read(bench.model),
            dense=lambda layer: layer.matrix(bench.original[layer.key]),
            memory=bench.memory,
        )
        unseen = walk.sweep(projection.visit, projection.replay)
        if index == 0:
            self._leave_dense(unseen)
        for layer in unseen if index else ():  # pruned before: its zeros were promised
            device, why = layer.tensor(bench.model).device, "this round's data feed it nothing"
            projection.visit([layer], by_magnitude(layer.groups, layer.shape[1], device, why))
        record = projection.record
        rules = {entry.name: entry.stats["rule"] for entry in record.layers if "rule" in entry.stats}
        bench.notes += [f"Round {index}, {name}: {rule}." for name, rule in rules.items()]
        if settings.batch_norm == "update":
            update_batch_norm(bench.model, portion)
        self._finish_round(record, portion, began)
        return record

    def _leave_dense(self, unseen: list[Layer]) -> None:
        """Layers that the network feeds nothing have no Hessian; they stay as they are, and the report says so."""
        if not unseen:
            return
        bench = self.bench
        kept = tuple(layer for layer in bench.selection.layers if layer not in unseen)
        names = ", ".join(layer.name for layer in unseen)
        if not kept:
            raise LayerSelectionError(
                f"Nothing was pruned: on the calibration data the network feeds nothing to {names}."
            )
        bench.note(f"Left dense, since the network feeds them nothing on the calibration data: {names}.")
        reasons = dict.fromkeys((layer.name for layer in unseen), "the network fed it nothing on the calibration data")
        bench.selection = Selection(kept, {**bench.selection.skipped, **reasons})

    def _imitated(self, index: int) -> nn.Module | None:
        """The network whose layers' outputs are the targets of a sweep; None where a layer imitates itself."""
        settings = self.bench.settings
        dense = index == 0 or (index == 1 and settings.schedule == "cubic")  # still the weights of the start
        if settings.target == "network" and not dense:
            return self.bench.twin()
        return None if settings.target == "current" and settings.inputs == "pruned" else self.bench.reference

    def _finish_round(self, record: RoundRecord, portion: Part, began: float) -> None:
        bench = self.bench
        # As many calibration samples as are held out say as much, and a round's measurement stays cheap.
        # With none held out the rounds are compared by it, so on the same samples whatever they were solved for.
        compared = bench.with_copies(portion.first(bench.heldout.samples)) if bench.heldout.batches else bench.fit
        record.loss_calibration = bench.measure(compared)
        record.loss_heldout = bench.measure(bench.judges)
        record.seconds = time.perf_counter() - began

    def _consider(self, record: RoundRecord, final: dict[Layer, Pattern]) -> None:
        """Add a round, and keep its weights, which the model holds, where it is the best so far."""
        self.records.append(record)
        if best_index(self.records, asked(final)) == len(self.records) - 1:
            self.best = self.bench.snapshot()

    def _polish(self, step: GradientStep, leader: RoundRecord, index: int) -> RoundRecord:
        """Steps on the support of the best projection, whose weights the model holds."""
        bench, began = self.bench, time.perf_counter()
        trainer = bench.trainer(step, step.steps, bench.masks())
        losses = bench.descend(trainer, bench.fit, index, f"polish of {step.steps} steps")
        record = RoundRecord(
            index, leader.asked, None, None, leader.layers, losses, kind="polish", polished_round=leader.index
        )
        self._finish_round(record, bench.fit, began)
        bench.progress.round(record)
        return record

    def _scheduled(self, final: dict[Layer, Pattern], index: int) -> dict[Layer, Pattern]:
        last = self.bench.settings.rounds - 1
        if self.bench.settings.schedule == "constant" or index in (0, last):
            return final
        # Cubic growth from 0.72 of the asked sparsity (65 % on the way to 90 %), as measured best in LOG.md.
        share = 1 - 0.28 * (1 - (index - 1) / (last - 1)) ** 3
        return {layer: thinner(pattern, layer, share) for layer, pattern in final.items()}
