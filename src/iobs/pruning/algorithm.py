"""Algorithm 2 of the paper: project every layer, measure, take gradient steps, repeat; keep the best projection.

Every run uses this loop. It reads and writes these objects:

    workspace.store      the weights of the model (`store.py`)
    workspace.recipe     the settings of the run (`recipe/`)
    plan                 the pattern of every layer, from `allocate` (`plan/allocate.py`)
    workspace.decided    rounds, optimizers and learning rates (`decisions.py`)
    Sweep                the walk along the blocks: layers in order, with their inputs (`calibration/sweep.py`)
    Projection           the mask and the weights of every layer (`layerwise/projection.py`)
    Report               the result, with all decisions (`report.py`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count

from torch import Tensor

from iobs.core.patterns import Pattern, Rate
from iobs.core.structured import Structured
from iobs.errors import LayerSelectionError, NonFiniteError
from iobs.pruning.baselines import audit_network, project_network
from iobs.pruning.calibration.gram import by_magnitude
from iobs.pruning.calibration.losses import embedded, metric, similarity
from iobs.pruning.calibration.sweep import Group, Moments, Sweep
from iobs.pruning.cost.affordable import with_affordable_steps
from iobs.pruning.cost.prices import measure
from iobs.pruning.cost.work import forecast
from iobs.pruning.coverage import Coverage, Reason
from iobs.pruning.decisions import candidates, decide_growth, decide_rates, decide_steps, scheduled
from iobs.pruning.descent import Descent
from iobs.pruning.descent.batches import in_steps
from iobs.pruning.forecast import Forecast
from iobs.pruning.layerwise.patterns import is_rounded, sparsity_of
from iobs.pruning.layerwise.problem import SHOWN_SAMPLES
from iobs.pruning.layerwise.projection import TARGETS, Projection, too_few
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import update_batch_norm
from iobs.pruning.network.selection import Census, Selection
from iobs.pruning.plan.allocate import allocate
from iobs.pruning.recipe import FineTune
from iobs.pruning.reconstruction import Reconstruction
from iobs.pruning.report import (
    AllocationRecord,
    AuditRow,
    ComparisonLoss,
    Report,
    RoundRecord,
    Scores,
    best_index,
)
from iobs.pruning.runtime.memory import give_back
from iobs.pruning.samples.batches import Samples
from iobs.pruning.workspace import Workspace
from iobs.solvers.row_metric import RowMetric

Plan = dict[Layer, Pattern]

_UNREACHED = Reason("unreached", "the network fed it nothing on the calibration data")
_UNOBSERVED = Reason("not multiplied", "used by the model, but in no product that can be observed")


def run(workspace: Workspace, ends: bool = True) -> Report:
    """Run Algorithm 2; at the end the model has the weights of the best record.

    Args:
        workspace: the state of the run.
        ends: tell the callbacks of the end; False if the caller changes the model further, and tells them itself.
    """
    started, census = time.perf_counter(), Census.of(workspace.store.model)
    # On any failure this restores the dense weights.
    with workspace.memory.watching(), workspace.store.running(workspace.request.patterns):
        loss, foretell = prepare(workspace, census), forecaster(workspace)
        dense = score_of_dense(workspace)  # after the first forecast, which does not need it
        plan, allocation = allocate(workspace)
        metrics = workspace.metrics  # of the dense model, so before the first projection
        workspace.store.set_patterns(plan)
        best = Best(workspace, plan)
        descent: Descent | None = None
        for index in count():
            patterns = scheduled(plan, workspace.decided.rounds, index)
            record = project(workspace, patterns, metrics, index, descent)  # lines 3 to 8
            best.consider(record)
            if index == 0:
                workspace.decided = replace(workspace.decided, rounds=decide_growth(workspace))
                foretell()
                workspace.decided = decide_rates(workspace, plan, workspace.decided)
                foretell()
            if index + 1 == workspace.decided.rounds.count:
                break
            descent = finetune(workspace, plan, record, descent)  # line 9
        descent = None  # frees its float32 weights and its optimizer state
        projection, weights = best.record, best.weights
        for step in candidates(workspace.decided):
            workspace.store.restore(weights)
            best.consider(finetune_last(workspace, projection, plan, step, len(best.records)))
        workspace.store.restore(best.weights)
        seconds = workspace.checkpoint.earlier + time.perf_counter() - started
        report = report_of(workspace, best, (loss, *dense), census, allocation, seconds)
        if ends:
            workspace.callbacks.on_end(report)
        return report


def project(
    workspace: Workspace, patterns: Plan, metrics: Mapping[Layer, RowMetric], index: int, descent: Descent | None
) -> RoundRecord:
    """Prune every layer, then measure the model (lines 3 to 8)."""
    began, recipe, samples = time.perf_counter(), workspace.recipe_of_round(index), workspace.portion(index)
    if recipe.network_solver is not None:
        record = project_network(workspace, patterns, recipe.network_solver, index)
    else:
        masters = {} if descent is None else descent.groups[0].values
        record = project_layers(workspace, patterns, metrics, index, masters)
    give_back()  # what the Grams and solves have left in the heap, hundreds of megabytes
    if recipe.batch_norm == "update":
        update_batch_norm(workspace.store.model, samples)
    return measured(workspace, record, samples, began)


def project_layers(
    workspace: Workspace, patterns: Plan, metrics: Mapping[Layer, RowMetric], index: int, masters: dict[str, Tensor]
) -> RoundRecord:
    """Prune the layers one group after another, in one sweep along the blocks, and record them."""
    recipe = workspace.recipe_of_round(index)
    projection = Projection(
        store=workspace.store,
        patterns=patterns,
        settings=recipe.for_layers(patterns),
        target=TARGETS[recipe.target],
        index=index,
        checkpoint=workspace.checkpoint,
        ranks=workspace.ranks,
        masters=masters,
        memory=workspace.memory,
        callback=workspace.callbacks,
        biases=workspace.biases(index),
        metrics=metrics,
    )
    sweep = sweep_of(workspace, workspace.portion(index), index)
    if recipe.blocks is not None and sweep.chain:
        Reconstruction(workspace, sweep, projection, recipe.blocks).run()
    elif workspace.ranks.size == 1 and recipe.reads_weights_only and not is_rounded(patterns.values()):
        sweep = project_by_weights(workspace, projection, sweep)
    else:
        projection.project_all(sweep.groups())
    handle_layers_without_input(workspace, projection, sweep.without_input)
    if not recipe.reads_weights_only:
        note_pruning_by_magnitude(workspace, projection.record)
        if index == 0:
            workspace.callbacks.caution(too_few(projection.record.layers, workspace.fit.samples))
    return projection.record


def project_by_weights(workspace: Workspace, projection: Projection, sweep: Sweep) -> Sweep:
    """Prune layers whose result depends on no data: a few samples give the errors for the report.

    Layers that these samples do not reach are pruned in a sweep of all samples. If the blocks are gone after one sweep,
    experts get all samples at once. Returns the last sweep.
    """
    everything = not workspace.reenters and any(layer.expert is not None for layer in sweep.layers)
    few = [part if everything else part.first(SHOWN_SAMPLES) for part in (sweep.calibration, sweep.heldout)]
    short = replace(sweep, calibration=few[0], heldout=few[1])
    projection.project_all(short.groups())
    if short.without_input and workspace.reenters:
        short = replace(sweep, layers=tuple(short.without_input))
        projection.project_all(short.groups())
    return short


def finetune(workspace: Workspace, plan: Plan, record: RoundRecord, descent: Descent | None) -> Descent | None:
    """Take gradient steps between two projections (line 9); the next projection reads the masters of the descent."""
    rounds = workspace.decided.rounds
    step = rounds.finetune
    if record.index == 0 and rounds.schedule == "cubic":
        workspace.store.reset()  # sparsity grows from the dense weights; the first round only measured the damage
        return None if step is None else workspace.descent(step, workspace.fit)
    if step is None:
        return None
    samples, runs = workspace.portion(record.index), rounds.count - (2 if rounds.schedule == "cubic" else 1)
    descent = descent or workspace.descent(step, samples)
    descent.order = workspace.order(step, samples)
    (masters,) = descent.groups
    masters.copy_from_model()
    masters.masks = workspace.masks(plan, step.support)
    began = time.perf_counter()
    record.step_losses = workspace.descend(
        descent, step, total=runs * step.steps, index=record.index, key=f"steps {record.index}"
    )
    record.seconds += time.perf_counter() - began
    return descent


def finetune_last(
    workspace: Workspace, projection: RoundRecord, plan: Plan, step: FineTune, index: int
) -> RoundRecord | None:
    """Take gradient steps on the support of the best projection, on the grids of the plan.

    The model holds the weights of that projection. Returns None if the steps diverge.
    """
    began = time.perf_counter()
    try:
        descent, key = workspace.descent(step, workspace.fit, plan), f"fine-tuning of {step.steps} steps"
        losses = workspace.descend(descent, step, total=step.steps, index=index, key=key)
        record = RoundRecord(
            index,
            projection.asked,
            layers=projection.layers,
            step_losses=losses,
            kind="finetune",
            parent=projection.index,
        )
        return measured(workspace, record, workspace.fit, began)
    except NonFiniteError as error:
        workspace.note(f"The fine-tuning of {step.steps} steps is left out: {error}")
        return None


class Best:
    """All records of a run, and the weights of the best record: lowest held-out loss at the requested sparsity.

    Args:
        workspace: the state of the run.
        plan: the pattern of every layer.

    Attributes:
        records: all records, in order.
        weights: weights of the best record, by name.
    """

    def __init__(self, workspace: Workspace, plan: Plan) -> None:
        self.plan = plan
        self.records: list[RoundRecord] = []
        self.weights: dict[str, Tensor] = {}
        self._work = workspace

    @property
    def index(self) -> int:
        """Position of the best record."""
        return best_index(self.records, sparsity_of(self.plan))

    @property
    def record(self) -> RoundRecord:
        """The best record."""
        return self.records[self.index]

    def consider(self, record: RoundRecord | None) -> None:
        """Add a record, and keep a snapshot of the model if the record is the best so far; ignore None."""
        if record is not None:
            self.records.append(record)
            if self.index == len(self.records) - 1:
                self.weights = self._work.store.snapshot()


def prepare(workspace: Workspace, census: Census) -> ComparisonLoss:
    """Limit the gradient steps to their affordable number, and check their losses.

    Returns:
        The loss that compares rounds, with its value of the dense model.
    """
    workspace.decided = decide_steps(workspace)
    layers, decided = workspace.selection.layers, workspace.decided
    if decided.blocks is not None and workspace.ranks.size > 1:
        workspace.ranks.require_enough(in_steps(workspace.store.model, workspace.fit, decided.blocks))
    with workspace.store.as_dense():
        workspace.callbacks.on_start(workspace.store.model, [layer.name for layer in layers], decided.rounds.count)
    warn_of_coverage(workspace, census.coverage(workspace.selection, 0))
    if workspace.scoring is None:
        return ComparisonLoss("not measured")
    sampled = workspace.scoring.windows_to_sample() > 0
    workspace.decided = with_affordable_steps(decided, workspace.store.model, layers, workspace.fit, sampled)
    # NaN is no error here: the sweep names the layer that causes it.
    loss = workspace.scoring.dense_loss()
    if loss is None:
        workspace.scoring.loss_on(workspace.fit.first(1))  # report missing labels now, not after a projection
    for step in (workspace.decided.rounds.finetune, workspace.decided.finetune):
        if step is not None:
            workspace.require_gradient(step)
    return ComparisonLoss(workspace.scoring.name, loss)


def score_of_dense(workspace: Workspace) -> tuple[Scores, Tensor | None]:
    """Metrics of the dense model before the first projection, or its embeddings; neither if they are known later.

    They are where a copy of the dense model stays beside the model, and never without losses of the model.
    """
    if workspace.scoring is None or workspace.scoring.reference is not None:
        return {}, None
    with workspace.store.as_dense():
        scores = metric(workspace.store.model, _scored(workspace)[0])
        return scores, None if scores else embedded(workspace.store.model, _scored(workspace)[0])


def forecaster(workspace: Workspace) -> Callable[[], object]:
    """Return a function that forecasts the run for the present decisions, and tells the callbacks.

    The prices are measured only if gradient steps may make the run long, or if a callback listens. The first forecast
    is in a note.
    """
    steps = workspace.decided.rounds.finetune or workspace.decided.finetune
    if workspace.recipe.network_solver or not (steps or workspace.callbacks.wants_forecast):
        return lambda: None
    recipe, request = workspace.recipe, workspace.request
    samples = Samples.of(workspace.fit.batches + workspace.heldout.batches)
    sizes, prices = measure(workspace.store, request, workspace.chain, samples, request.holdout, workspace.fit)
    sampled = 0 if workspace.scoring is None else workspace.scoring.windows_to_sample()

    def foretell() -> Forecast:
        decided = workspace.decided
        expected = forecast(sizes, prices, recipe, decided, request.pattern, sampled_by_steps=sampled)
        workspace.callbacks.on_forecast(expected)
        return expected

    workspace.note(f"Estimated time: {foretell().seconds:.0f} s.")
    return foretell


def sweep_of(workspace: Workspace, samples: Samples, index: int) -> Sweep:
    """The sweep of one round through the model."""
    rounds, recipe = workspace.decided.rounds, workspace.recipe_of_round(index)
    dense = index == 0 or (index == 1 and rounds.schedule == "cubic")  # no gradient step yet
    heldout, blocks = workspace.heldout, recipe.blocks if workspace.chain else None
    if blocks is not None:
        model = workspace.store.model
        samples, heldout = in_steps(model, samples, blocks), in_steps(model, heldout, blocks)
    if workspace.scoring is None:
        teacher = workspace.store.dense_model
    else:
        teacher = TARGETS[recipe.target].teacher(workspace.scoring, dense)
        if teacher is None and (recipe.inputs == "dense" or blocks is not None):
            teacher = workspace.scoring.reference
    return Sweep(
        workspace.store.model,
        samples,
        heldout,
        workspace.selection.layers,
        workspace.chain,
        teacher,
        dense_inputs=recipe.inputs == "dense",
        moments=Moments(
            workspace.request.seed + index, means=bool(workspace.biases(index)), drift=TARGETS[recipe.target].drift
        ),
        ranks=workspace.ranks,
        residency=workspace.store,
        tables=workspace.table_metrics,
    )


def handle_layers_without_input(workspace: Workspace, projection: Projection, without_input: dict[Layer, bool]) -> None:
    """Leave them dense in the first round; prune them by magnitude in later rounds, where their zeros are counted.

    Raises:
        LayerSelectionError: no layer received any input.
    """
    index = projection.index
    if index == 0 and without_input:
        kept = tuple(layer for layer in workspace.selection.layers if layer not in without_input)
        dense = {layer.name: _UNOBSERVED if used else _UNREACHED for layer, used in without_input.items()}
        listed = "; ".join(f"{name} ({reason})" for name, reason in dense.items())
        if not kept:
            raise LayerSelectionError(
                f"Nothing was pruned, since no layer received an input that can be observed: {listed}. Give "
                "calibration data that reach the layers, and call the layers as modules."
            )
        workspace.note(f"Left dense: {listed}.")
        workspace.selection = Selection(kept, {**workspace.selection.skipped, **dense})
    elif index:
        for layer in without_input:
            device, why = layer.tensor(workspace.store.model).device, "this round's data feed it nothing"
            projection.project(Group([layer], partial(by_magnitude, layer.groups, layer.shape[1], device, why)))


def note_pruning_by_magnitude(workspace: Workspace, record: RoundRecord) -> None:
    """Add a note for every layer that was pruned by magnitude, with the reason."""
    for entry in record.layers:
        if "rule" in entry.stats:
            workspace.callbacks.notes.append(f"Round {record.index}, {entry.name}: {entry.stats['rule']}.")


def measured(workspace: Workspace, record: RoundRecord, samples: Samples, began: float) -> RoundRecord:
    """Measure the model: add losses and seconds to the record, and return it."""
    if workspace.scoring is not None:
        record.loss_calibration = workspace.scoring.measure(workspace.scoring.comparable(samples))
        record.loss_heldout, record.scores = workspace.scoring.measure_heldout()
        workspace.callbacks.on_measure(
            "losses", record.index + 1, max(record.index + 1, workspace.decided.rounds.count)
        )
    record.seconds = time.perf_counter() - began
    workspace.callbacks.on_round(record)
    return record


def warn_of_coverage(workspace: Workspace, coverage: Coverage) -> None:
    """Warn once if much of the model stays dense for a reason that can surprise."""
    text = coverage.warning()
    if text is not None and not workspace.callbacks.warned:
        workspace.callbacks.warn(text)


def _scored(workspace: Workspace) -> tuple[Samples, str]:
    """The samples that scores are of, and their name: those that are held out, or all if none are."""
    return (workspace.heldout, "held-out") if workspace.heldout.batches else (workspace.fit, "calibration")


def _scores(workspace: Workspace, record: RoundRecord, before: Scores, vectors: Tensor | None) -> dict[str, Scores]:
    """Scores of the dense and the pruned model; of embeddings their similarity to those of the dense model.

    Args:
        workspace: of the run; the model has its result.
        record: of this result.
        before: metrics of the dense model, from `score_of_dense`.
        vectors: embeddings of the dense model, from there.
    """
    if workspace.scoring is None:
        return {}
    model, reference, (samples, name) = workspace.store.model, workspace.scoring.reference, _scored(workspace)
    scores = record.scores
    if not scores:
        before = before if reference is None else metric(reference, samples)
        scores = {"dense": before, "pruned": metric(model, samples) if before else {}}
    if not scores["dense"]:
        vectors = vectors if reference is None else embedded(reference, samples)
        after = None if vectors is None else embedded(model, samples)
        if vectors is None or after is None:
            return {}
        scores = {"dense": similarity(vectors, vectors), "pruned": similarity(vectors, after)}
    return {whose: {f"{name} {key}": value for key, value in values.items()} for whose, values in scores.items()}


def report_of(
    workspace: Workspace,
    best: Best,
    dense: tuple[ComparisonLoss, Scores, Tensor | None],
    census: Census,
    allocation: list[AllocationRecord],
    seconds: float,
) -> Report:
    """The report of the run."""
    loss, before, vectors = dense
    coverage = census.coverage(workspace.selection, workspace.store.zeros())
    warn_of_coverage(workspace, coverage)
    _note_lost_zeros(workspace)
    workspace.note_memory()
    return Report(
        settings=workspace.facts(),
        loss=loss,
        rounds=best.records,
        best_round=best.index,
        coverage=coverage,
        audit=audited(workspace, best.plan),
        seconds=seconds,
        peak_memory_bytes=workspace.memory.look(),
        scores=_scores(workspace, best.record, before, vectors),
        notes=workspace.callbacks.notes,
        cautions=workspace.callbacks.cautions,
        allocation=allocation,
    )


def _note_lost_zeros(workspace: Workspace) -> None:
    """Note zeros of an earlier run that hold values now."""
    if not workspace.store.whole or workspace.recipe.keep_zeros:
        return
    zeros, lost = workspace.store.lost_zeros()
    if lost:
        pattern, advice = workspace.request.pattern, "keep_zeros=True keeps them."
        if isinstance(pattern, Structured):
            advice = "Remove units first, and prune entries afterwards."
        elif isinstance(pattern, Rate):
            advice = f"{'A rate' if pattern.zeros is None else pattern} keeps no zeros of an earlier run."
        elif is_rounded([pattern]):
            advice = "Ask for the zeros and the grid in one run."
        workspace.callbacks.on_note(f"{lost:,} of the {zeros:,} zeros that the matrices had hold values now. {advice}")


def audited(workspace: Workspace, plan: Plan) -> list[AuditRow]:
    """Count the zeros of every pruned layer, entry by entry.

    Raises:
        AuditError: fewer zeros than asked.
    """
    if workspace.recipe.network_solver is not None:
        return audit_network(workspace, workspace.selection.layers)
    return workspace.store.audit({layer: plan[layer] for layer in workspace.selection.layers})
