"""Algorithm 2 for any network: project every layer, measure, step, and again; the best projection is the answer."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.core.quadratic import Solution
from iobs.errors import LayerSelectionError, NonFiniteError
from iobs.prune import batches as data_batches
from iobs.prune import steps as gradient_steps
from iobs.prune.allocation import Allocation, as_allocation, can_allocate, uniform
from iobs.prune.audit import audit_layers
from iobs.prune.augment import suited
from iobs.prune.batches import Batch, Part
from iobs.prune.checkpoint import Journal, identity_of
from iobs.prune.choices import best_rate
from iobs.prune.estimate import estimate_seconds
from iobs.prune.gram import Statistics, quadratic, relative_output_error
from iobs.prune.layers import Layer, Selection, select
from iobs.prune.memory import MemoryWatch
from iobs.prune.network import evaluating, update_batch_norm
from iobs.prune.progress import Progress, Quiet
from iobs.prune.record import AllocationRecord, LayerRecord, Report, RoundRecord, layer_record
from iobs.prune.sensitivity import Planner
from iobs.prune.settings import Settings, resolve
from iobs.prune.spread import asked, patterns_of_groups, require_fit, share_of, thinner
from iobs.prune.steps import Augmentation, GradientStep, LossFunction, Trainer
from iobs.prune.walk import Walk
from iobs.solvers import Budget, Refinement, Solver, solve

_DAMAGE = 0.01  # held-out KL of the first projection, in nats, above which rounds of growing sparsity pay
_DENSE_CAUTION = 3.0  # steps on dense weights are this much smaller than those on a fixed support
_TRIAL_STEPS = 12  # of a learning rate's trial


def prune(
    model: nn.Module,
    batches: Iterable[Batch] | Batch,
    pattern: Pattern,
    *,
    solver: str | Solver | None = None,
    budget: Budget | None = None,
    refine: str | Refinement | None = None,
    damping: float | None = None,
    rounds: int | None = None,
    schedule: Literal["constant", "cubic", "auto"] | None = None,
    step: GradientStep | None = None,
    polish: GradientStep | None = None,
    recipe: Literal["best", "fast", "paper"] | None = None,
    allocation: str | Allocation | None = None,
    target: Literal["current", "dense", "network"] | None = None,
    inputs: Literal["pruned", "dense"] | None = None,
    data: Literal["fixed", "fresh"] | None = None,
    include: str | Sequence[str] | None = None,
    skip: str | Sequence[str] | None = None,
    depthwise: bool | None = None,
    holdout: float | None = None,
    batch_norm: Literal["keep", "update"] | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    checkpoint: str | Path | None = None,
) -> Report:
    """Prune a network in place.

    Args:
        model: any `nn.Module` on any device. If the run fails or is interrupted its weights are as before.
        batches: calibration data: tensors, tuples (inputs, targets), or mappings as Hugging Face models take.
        pattern: `Unstructured` or `NM`, for every pruned layer.
        solver: of the layer problems: "admm" (default), "sparsegpt", "obc", "magnitude", "wanda", "exact", or any
            `iobs.solvers.Solver`.
        budget: "fast", "default" or "best": time against error.
        refine: "refit", "swap" or None: improves each layer's solution.
        damping: relative to the mean of the Hessian's diagonal; 0.01 by default.
        rounds: projections. Between them `step` is taken; the best round by held-out loss wins.
        schedule: sparsity of the rounds: "constant", or "cubic" growth towards the asked one. Cubic rounds begin with
            a projection to the asked sparsity, which stays a candidate, and then start again from the dense weights.
            "auto" grows only where that first projection does damage, and otherwise goes straight to the polish.
        step: gradient steps between rounds.
        polish: gradient steps on the final support, after the last round.
        recipe: "best", "fast" or "paper" sets solver, rounds, step, target and so on together; what is given
            explicitly overrides it. More than one round with neither recipe nor step means "best".
        allocation: how the sparsity is spread over layers: "uniform" gives every layer the same; "error", "fisher",
            "kl" and "evolve" keep the global count and spend it where it matters; or an `Allocation` with bounds.
        target: a layer imitates its "current" weights on its own inputs (as the paper), or the "dense" network's
            output on inputs that have not drifted, or that of the "network" as it is when the sweep begins: dense in
            the first, with the gradient steps in it later.
        inputs: a layer's inputs come through the "pruned" layers before it, or from the "dense" network.
        data: "fixed": every round sees all data; "fresh": each round sees its own share.
        include: name patterns of layers to prune, shell style or "re:..."; all by default.
        skip: name patterns of layers that stay dense.
        depthwise: prune depthwise convolutions too.
        holdout: share of the samples kept aside for choosing the best round.
        batch_norm: "keep" the statistics, or "update" them on the calibration data after every projection.
        seed: of the split, the order of steps and all else that is drawn.
        progress: is told how the run is getting on.
        checkpoint: a directory where everything dear is kept as soon as it is computed. A run that was killed ends,
            started again with the same arguments, in the same bits. It is the caller's to remove.

    Returns:
        The report: settings, every round with every layer, the final audit.

    Raises:
        CalibrationError: no data, or data that does not fit.
        LayerSelectionError: a name pattern matches nothing.
        PatternError: the pattern does not fit a layer.
        NonFiniteError: NaN or infinity in weights, inputs or gradients.
        NotPositiveDefiniteError: a layer's Hessian cannot be factorised.
        AuditError: fewer zeros than asked.
        CheckpointError: the checkpoint is of another run (the message names the difference), or cannot be written.
    """
    names = set(Settings.__dataclass_fields__)
    settings = resolve(recipe, {name: value for name, value in locals().items() if name in names})
    selection = select(model, include, skip, depthwise=settings.depthwise)
    require_fit(selection, pattern)
    collected = data_batches.collect(batches)
    # The dense reference is copied inside: a key-value cache would grow each time one of its blocks is run.
    with evaluating(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        data_batches.require_accepted(model, collected[0])
        return _Run(model, selection, pattern, settings, collected, progress or Quiet(), checkpoint).execute()


class _Run:
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
    ) -> None:
        self.model, self.selection, self.pattern, self.settings = model, selection, pattern, settings
        self.progress = progress
        self.memory = MemoryWatch()
        self.fit, self.heldout = data_batches.split(collected, settings.holdout, settings.seed)
        self.portions = [self.fit] * settings.rounds
        if settings.data == "fresh":
            self.portions = data_batches.divide(self.fit, settings.rounds, settings.seed)
        changing = {name for name, _ in _changing(model, selection, settings)}
        self.original = {name: value.detach().clone() for name, value in _state(model) if name in changing}
        self.reference = self._frozen_copy() if self._needs_reference() else None
        self.loss_name, self.loss = self._loss(settings.step)
        self.notes: list[str] = []
        self.journal = None if checkpoint is None else Journal(checkpoint, self._identity())
        self.suited: tuple[Augmentation | None] | None = None  # once it is known

    def execute(self) -> Report:
        """All rounds, the choice among them, the audit; the original weights come back if anything fails."""
        started = time.perf_counter()
        try:
            return self._execute(started)
        except BaseException:  # an interrupted user must get the weights back too
            self._restore(self.original)
            raise

    def _execute(self, started: float) -> Report:
        dense_loss = self._loss_on(self.heldout)  # where it is NaN, the walk names the layer that makes it so
        self.progress.begin(self.settings.rounds, [layer.name for layer in self.selection.layers])
        if any(step is not None for step in (self.settings.step, self.settings.polish)):
            expected = estimate_seconds(self.model, self.selection.layers, self.fit, self.settings)
            self._note(f"Estimated time: {expected:.0f} s.")
        final, curves = self._allocate()
        records: list[RoundRecord] = []
        best: dict[str, Tensor] = {}
        trainer: Trainer | None = None
        while len(records) < self.settings.rounds:
            index = len(records)
            began = time.perf_counter()
            record = self._project(index, self._scheduled(final, index), trainer)
            records.append(record)
            best = self._keep_best(records, best, final)
            if index == 0:
                self._choose(record)
            step, last = self.settings.step, index + 1 == self.settings.rounds
            if step is not None and not last and index == 0 and self.settings.schedule == "cubic":
                self._restore(self.original)
                trainer = self._trainer(step, (self.settings.rounds - 2) * step.steps)
            elif step is not None and not last:
                trainer = trainer or self._trainer(step, (self.settings.rounds - 1) * step.steps)
                trainer.adopt()
                trainer.masks = self._masks() if step.support == "fixed" else None
                record.step_losses = self._run_steps(trainer, self.portions[index], index)
            record.seconds = time.perf_counter() - began
            self.progress.round(record)
        if self.settings.polish is not None:
            self._restore(best)
            leader = records[_best_index(records, asked(final))]
            records.append(self._polish(self.settings.polish, leader, len(records)))
            best = self._keep_best(records, best, final)
        self._restore(best)
        return Report(
            settings={**self.settings.summary(), "pattern": str(self.pattern), "samples": self.fit.samples},
            loss_name=self.loss_name,
            dense_loss=dense_loss,
            rounds=records,
            best_round=_best_index(records, asked(final)),
            skipped=self.selection.skipped,
            audit=audit_layers(self.model, {layer: final[layer] for layer in self.selection.layers}),
            seconds=time.perf_counter() - started,
            peak_memory_bytes=self.memory.look(),
            notes=self.notes,
            allocation=curves,
        )

    def _project(self, index: int, patterns: dict[Layer, Pattern], trainer: Trainer | None) -> RoundRecord:
        """Sweep over all layers, then measure."""
        settings, portion = self.settings, self.portions[index]
        began = time.perf_counter()
        walk = Walk(
            self.model,
            portion,
            self.heldout,
            self.selection.layers,
            self._imitated(index),
            dense_inputs=settings.inputs == "dense",
            seed=settings.seed + index,
        )
        record = RoundRecord(index, asked(patterns), None, None, [])
        visit = partial(self._visit, record=record, patterns=patterns, trainer=trainer)
        unseen = walk.sweep(visit, partial(self._replay, record=record))
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
        reasons = dict.fromkeys((layer.name for layer in unseen), "the network fed it nothing on the calibration data")
        self.selection = Selection(kept, {**self.selection.skipped, **reasons})

        names = ", ".join(layer.name for layer in unseen)
        if not kept:
            raise LayerSelectionError(
                f"Nothing was pruned: on the calibration data the network feeds nothing to {names}."
            )
        self._note(f"Left dense, since the network feeds them nothing on the calibration data: {names}.")
    def _imitated(self, index: int) -> nn.Module | None:
        """The network whose layers' outputs are the targets of a sweep; None where a layer imitates itself."""
        target = self.settings.target
        dense = index == 0 or (index == 1 and self.settings.schedule == "cubic")  # still the weights of the start
        if target == "network" and not dense:
            return copy.deepcopy(self.model).eval()
        return None if target == "current" and self.settings.inputs == "pruned" else self.reference

    # ---- one layer
    def _visit(
        self,
        group: list[Layer],
        statistics: Statistics,
        record: RoundRecord,
        patterns: dict[Layer, Pattern],
        trainer: Trainer | None,
    ) -> None:
        for layer in group:
            if self._journalled(record.index, layer):
                self._replay_layer(layer, record)
                continue
            began = time.perf_counter()
            master = trainer.masters.get(layer.key) if trainer is not None else None
            current = layer.read(self.model) if master is None else layer.matrix(master)
            dense = layer.matrix(self.original[layer.key])
            imitated = dense if self.settings.target == "dense" else current
            solutions = self._solve(layer, statistics, imitated, current, patterns[layer])
            layer.write(self.model, torch.cat([solution.weight for solution in solutions]))
            written = layer.read(self.model)
            gram, heldout = statistics.calibration, statistics.heldout
            entry = LayerRecord(
                name=layer.name,
                shape=layer.shape,
                asked=share_of(patterns[layer], layer),
                zeros=int((written == 0).sum()),
                error_calibration=relative_output_error(gram, written, imitated),
                error_heldout=None if heldout is None else relative_output_error(heldout, written, imitated),
                error_dense=relative_output_error(gram, written, dense),
                damping=max(solution.stats["damping"] for solution in solutions),
                dead_columns=sum(solution.stats["dead_columns"] for solution in solutions),
                inputs=gram.count if statistics.tokens is None else statistics.tokens,
                seconds=time.perf_counter() - began,
            )
            if statistics.rule:
                entry.stats["rule"] = statistics.rule
            if self.journal is not None:
                values = {"entry": asdict(entry)}
                self.journal.put(_layer_key(record.index, layer), {"weight": layer.tensor(self.model)}, values)
            self._finish_layer(layer, record, entry)

    def _finish_layer(self, layer: Layer, record: RoundRecord, entry: LayerRecord) -> None:
        if "rule" in entry.stats:
            self.notes.append(f"Round {record.index}, {layer.name}: {entry.stats['rule']}.")
        record.layers.append(entry)
        self.memory.look()
        self.progress.layer(record.index, entry)

    # ---- the journal
    def _identity(self) -> dict[str, Any]:
        settings = {
            **self.settings.summary(),
            "pattern": str(self.pattern),
            "layers": [layer.name for layer in self.selection.layers],
        }
        return identity_of(settings, _state(self.model), self.fit.batches, self.heldout.batches)

    def _journalled(self, index: int, layer: Layer) -> bool:
        return self.journal is not None and _layer_key(index, layer) in self.journal

    def _replay(self, group: list[Layer], record: RoundRecord) -> bool:
        """Take a whole group of layers from the journal, if all of them are there."""
        if not all(self._journalled(record.index, layer) for layer in group):
            return False
        for layer in group:
            self._replay_layer(layer, record)
        return True

    def _replay_layer(self, layer: Layer, record: RoundRecord) -> None:
        assert self.journal is not None
        tensors, values = self.journal.get(_layer_key(record.index, layer))
        layer.tensor(self.model).copy_(tensors["weight"])
        self._finish_layer(layer, record, layer_record(values["entry"]))

    def _run_steps(self, trainer: Trainer, part: Part, index: int) -> list[float]:
        """The gradient steps after a round, or what the journal has of them."""
        key = f"steps {index}"
        if self.journal is not None and key in self.journal:
            tensors, values = self.journal.get(key)
            trainer.restore(tensors, values["taken"])
            return list(values["losses"])
        losses = trainer.run(part, partial(self.progress.step, index))
        if self.journal is not None:
            self.journal.put(key, trainer.snapshot(), {"taken": trainer.taken, "losses": losses})
        return losses

    def _solve(
        self,
        layer: Layer,
        statistics: Statistics,
        target: Tensor,
        current: Tensor,
        pattern: Pattern,
        budget: Budget | None = None,
    ) -> list[Solution]:
        settings = self.settings
        rows = layer.shape[0] // layer.groups
        solutions = []
        for part, piece in enumerate(patterns_of_groups(layer, pattern)):
            own = slice(part * rows, (part + 1) * rows)
            problem = quadratic(statistics.calibration, part, target[own], current[own], same=target is current)
            solutions.append(
                solve(
                    problem,
                    piece,
                    settings.solver,
                    refine=settings.refine,
                    damping=settings.damping,
                    budget=budget or settings.budget,
                    name=layer.name,
                )
            )
        return solutions

    # ---- measuring and choosing
    def _finish_round(self, record: RoundRecord, portion: Part, began: float) -> None:
        # As many calibration samples as are held out say as much, and a round's measurement stays cheap.
        record.loss_calibration = self._measure(
            portion.first(self.heldout.samples) if self.heldout.batches else portion
        )
        record.loss_heldout = self._measure(self.heldout)
        record.seconds = time.perf_counter() - began

    def _loss_on(self, part: Part) -> float | None:
        if not part.batches:
            return None
        return gradient_steps.mean_loss(self.model, part, self.loss)

    def _keep_best(
        self, records: list[RoundRecord], best: dict[str, Tensor], final: dict[Layer, Pattern]
    ) -> dict[str, Tensor]:
        if _best_index(records, asked(final)) != len(records) - 1:
    def _measure(self, part: Part) -> float | None:
        loss = self._loss_on(part)
        if loss is not None and not math.isfinite(loss):
            raise NonFiniteError(f"The pruned network's {self.loss_name} is {loss}; lower the learning rate.")
        return loss

            return best
        return {name: value.detach().clone() for name, value in _state(self.model) if name in self.original}

    def _restore(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in _state(self.model):
                if name in state:
                    value.copy_(state[name])

    # ---- between rounds
    def _trainer(self, step: GradientStep, total: int, masks: dict[str, Tensor] | None = None) -> Trainer:
        prunable = {layer.key for layer in self.selection.layers}
        parameters = {
            name: value
            for name, value in self.model.named_parameters()
            if name in prunable or (step.parameters == "all" and value.is_floating_point())
        }
        _, loss = self._loss(step)
        return Trainer(self.model, parameters, step, loss, total, self.settings.seed, masks, self._augmentation(step))

    def _augmentation(self, step: GradientStep) -> Augmentation | None:
        if step.augment != "auto":
            return step.augment
        if self.suited is None:
            found = suited(self.reference or self.model, self.fit, self.settings.seed)
            self._note(f"Augmentation of the gradient steps: {found or 'none'}.")
            self.suited = (found,)
        return self.suited[0]

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.progress.note(text)

    def _masks(self) -> dict[str, Tensor]:
        return {layer.key: (self.model.get_parameter(layer.key) != 0).float() for layer in self.selection.layers}

    # ---- choices left to the run
    def _allocate(self) -> tuple[dict[Layer, Pattern], list[AllocationRecord]]:
        layers, allocation = self.selection.layers, as_allocation(self.settings.allocation)
        if allocation.criterion == "auto":
            allocation = replace(allocation, criterion=_criterion(self.pattern, len(layers), allocation.generations))
        if allocation.criterion == "uniform":
            return uniform(self.pattern, layers), []

        def solve_fast(layer: Layer, statistics: Statistics, dense: Tensor, pattern: Pattern) -> list[Solution]:
            return self._solve(layer, statistics, dense, dense, pattern, budget="fast")

        assert self.reference is not None
        divergence = gradient_steps.kl_to(self.reference)
        planner = Planner(self.model, layers, self.fit, self.heldout, solve_fast, divergence, self.settings.seed)
        return planner.allocate(self.pattern, allocation)

    def _choose(self, first: RoundRecord) -> None:
        """Settle what depends on the damage of the first projection."""
        damage = first.loss_calibration if first.loss_heldout is None else first.loss_heldout
        assert damage is not None
        settings = self.settings
        if settings.schedule == "auto":
            grow = damage > _DAMAGE and settings.rounds > 2
            self._note(
                f"The first projection leaves a held-out loss of {damage:.4g}: "
                + ("sparsity grows over the rounds." if grow else "polished as it is, without further rounds.")
            )
            settings = replace(settings, schedule="cubic", rounds=settings.rounds if grow else 1)
        steps = [step for step in (settings.step, settings.polish) if step is not None]
        if any(step.lr == "auto" for step in steps):
            rate = self._best_rate(next(step for step in reversed(steps) if step.lr == "auto"))
            settings = replace(
                settings,
                step=_with_rate(settings.step, rate / _DENSE_CAUTION),
                polish=_with_rate(settings.polish, rate),
            )
        self.settings = settings

    def _best_rate(self, step: GradientStep) -> float:
        """The learning rate whose short run on the first projection's support leaves the least held-out loss."""
        start = {name: value.detach().clone() for name, value in _state(self.model) if name in self.original}
        masks = self._masks()

        def trial(rate: float) -> float:
            self._restore(start)
            short = replace(step, lr=rate, steps=_TRIAL_STEPS, decay=True)
            self._trainer(short, _TRIAL_STEPS, masks).run(self.fit, lambda done, total, loss: None)
            loss = self._measure(self.heldout if self.heldout.batches else self.fit)
            assert loss is not None
            return loss

        rate, losses = best_rate(trial)
        self._restore(start)
        tried = ", ".join(f"{one:g}: {loss:.4g}" for one, loss in losses.items())
        self._note(f"Learning rate {rate:g}, by the held-out loss after {_TRIAL_STEPS} steps ({tried}).")
        return rate

    def _polish(self, step: GradientStep, leader: RoundRecord, index: int) -> RoundRecord:
        """Steps on the support of the best projection, whose weights the model holds."""
        began = time.perf_counter()
        trainer = self._trainer(step, step.steps, self._masks())
        losses = self._run_steps(trainer, self.fit, index)
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
        losses = [step.loss for step in (settings.step, settings.polish) if step is not None]
        return (
            settings.target in ("dense", "network")
            or settings.inputs == "dense"
            or as_allocation(settings.allocation).criterion != "uniform"
            or not losses
            or any(loss in ("kl", "block") for loss in losses)
        )

    def _frozen_copy(self) -> nn.Module:
        reference = copy.deepcopy(self.model).eval()
        return reference.requires_grad_(False)

    def _loss(self, step: GradientStep | None) -> tuple[str, LossFunction]:
        chosen = "kl" if step is None else step.loss
        if not isinstance(chosen, str):
            return "given loss", chosen
        if chosen == "task":
            return "task loss", gradient_steps.task_loss
        assert self.reference is not None
        if chosen == "kl":
            return "KL to the dense model", gradient_steps.kl_to(self.reference)
        walk = Walk(self.model, self.fit, Part(), self.selection.layers)
        paths = [block.path for block in walk.chain]
        return "distance of block outputs", gradient_steps.block_distance_to(self.reference, paths)


# ---- helpers without state
def _criterion(pattern: Pattern, layers: int, generations: int) -> Literal["uniform", "kl", "evolve"]:
    """Measured divergences, and a search on top where its trials are enough for every pair of layers."""
    if not can_allocate(pattern):
        return "uniform"
    return "evolve" if layers * (layers - 1) // 2 <= generations else "kl"


def _with_rate(step: GradientStep | None, rate: float) -> GradientStep | None:
    return replace(step, lr=rate) if step is not None and step.lr == "auto" else step


def _layer_key(index: int, layer: Layer) -> str:
    return f"round {index} layer {layer.name}"


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _changing(model: nn.Module, selection: Selection, settings: Settings) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a run may change."""
    everything = any(step is not None and step.parameters == "all" for step in (settings.step, settings.polish))
    prunable = {layer.key for layer in selection.layers}
    for name, value in model.named_parameters():
        if name in prunable or everything:
            yield name, value
    if settings.batch_norm == "update":
        yield from model.named_buffers()


def _best_index(records: list[RoundRecord], asked: float) -> int:
    """Among rounds at the asked sparsity, the one with the least held-out loss (calibration loss without held-out)."""

    def value(index: int) -> float:
        record = records[index]
        loss = record.loss_calibration if record.loss_heldout is None else record.loss_heldout
        assert loss is not None
        return loss

    eligible = [index for index, record in enumerate(records) if record.asked >= asked - 1e-12]
    return min(eligible, key=value, default=len(records) - 1)
