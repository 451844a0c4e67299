"""Blocks and experts of a run: their choice, the refit of what follows, and their removal.

The layers that write into the residual stream after the first removal are solved anew. Their targets are the sums of
the dense model, so they repair what the removed parts leave out. The recipe "best" ends with gradient steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from iobs.core.column_groups import Groups
from iobs.core.patterns import keep_count
from iobs.core.structured import Units
from iobs.errors import LayerSelectionError, PatternError, ProblemError
from iobs.pruning.algorithm import run
from iobs.pruning.calibration.additions import captured_additions
from iobs.pruning.calibration.losses import answered
from iobs.pruning.calibration.observe import multiplied_as_they_are
from iobs.pruning.calibration.row_fisher import PROBE, PROBE_TOKENS
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.coverage import Reason
from iobs.pruning.descent.scoring import frozen_copy
from iobs.pruning.network.calls import after_calls
from iobs.pruning.network.layers import Layer, find_layers
from iobs.pruning.network.modes import keeping_buffers, replaced_forwards
from iobs.pruning.network.selection import Selection
from iobs.pruning.report import Report
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.store import Store
from iobs.pruning.structure.expected import Expected, can_copy, require_rebuilt
from iobs.pruning.structured.parts import Blocks, Experts
from iobs.pruning.structured_report import (
    CostRecord,
    PlannedCost,
    PlannedUnits,
    StructuredRequest,
    UnitsPlan,
    WidthRecord,
)
from iobs.pruning.widths.costs import Products
from iobs.pruning.widths.readers import damage, softened, temperature_of
from iobs.pruning.workspace import Request, Workspace


class StoreBesideDense(Store):
    """A store of a model that loses parts during the run, with the dense model beside it from then on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.beside: nn.Module | None = None
        self.untrained = [name for name, value in model.named_parameters() if not value.requires_grad]

    @property
    def dense_model(self) -> nn.Module | None:
        """The dense model."""
        return self.beside

    def as_dense(self) -> AbstractContextManager[object]:
        """Context in which the dense model answers calls of the model, whose parts are gone already."""
        return nullcontext() if self.beside is None else replaced_forwards([(self.model, self.beside.forward)])


PARTS: dict[Units, type[Blocks | Experts]] = {"blocks": Blocks, "experts": Experts}


class PartRemoval:
    """The removal of blocks or experts from a model.

    Args:
        store: of the model, to which `solve` gives the dense model.
        data: calibration batches that the model takes.
        request: its pattern asks for blocks or experts.
        callbacks: of the run.

    Raises:
        ProblemError: names of layers.
        LayerSelectionError: there are no such parts.
        PatternError: the share is none of them, or more than can be removed.
        ModelError: the model's class cannot have fewer of them, or experts of a model without a configuration.
    """

    stays: tuple[str, ...] = ()  # as in `SiteRemoval`: no block or expert has a reason to stay

    def __init__(
        self, store: StoreBesideDense, data: list[Batch], request: StructuredRequest, callbacks: Callbacks
    ) -> None:
        self.store, self.model, self.data, self.request, self.callbacks = store, store.model, data, request, callbacks
        units = request.pattern.units
        if request.include is not None or request.ignore is not None:
            raise ProblemError(f'units="{units}" chooses among all of them: leave out include= and ignore=.')
        self.parts = PARTS[units].find(self.model, data)
        self.keep = self._kept_count()
        self.parts.require_possible(self.keep)

    def _kept_count(self) -> int:
        """The number of parts that are left in each list.

        Raises:
            PatternError: it is all of them, or fewer than are needed.
        """
        parts, share = self.parts, self.request.pattern.sparsity
        count = parts.lists[0].count
        keep = keep_count(count, share)
        if keep == count:
            raise PatternError(
                f"{share:.3g} of {count} {parts.kind} is less than a half of one; ask for at least {1 / count:.3g}."
            )
        if keep < parts.least:
            raise PatternError(
                f"{keep} of {count} {parts.kind} would be left, and {parts.least} are needed; ask for at most "
                f"{1 - parts.least / count:.3g}."
            )
        return keep

    def plan(self) -> UnitsPlan:
        """The removal of a run."""
        parts, keep = self.parts, self.keep
        units = tuple(PlannedUnits(each.path, parts.kind, (), each.count, keep, keep) for each in parts.lists)
        before = float(sum(value.numel() for value in self.model.parameters()))
        cost = PlannedCost("parameters", before, before - parts.least_removed(keep), "in all layers")
        return UnitsPlan(units, (cost,), tuple(self.callbacks.notes))

    def solve(self, frozen: frozenset[str]) -> Report:
        """Choose the parts, and refit what follows while they are absent.

        Raises:
            LayerSelectionError: no layer could repair their absence.
        """
        self.dense = self.store.beside = frozen_copy(self.model, Samples.of(self.data))
        self.removed = self.parts.choose(self.keep, _Damage(self.model, self.dense, self.data))
        for path, gone in self.removed.items():
            self.callbacks.on_note(f"Removed {self.parts.kind} of {path or 'the model'}: {', '.join(map(str, gone))}.")
        with self.parts.without(self.removed):
            report = run(self._workspace(frozen), ends=False)
            self.expected = Expected.of(self.model, self.data[0])
        return report

    def _workspace(self, frozen: frozenset[str]) -> Workspace:
        """The workspace of the refit of the layers after the first removal; all their columns are kept."""
        model, request = self.model, self.request
        layers = _writers(model, self.data[0], self.parts.first_changed(self.removed))
        skipped = {
            layer.name: Reason("asked", "is not refitted") for layer in find_layers(model) if layer not in layers
        }
        with keeping_buffers(model):
            selection = multiplied_as_they_are(model, Selection(tuple(layers), skipped), self.data[0])
        patterns = {layer: Groups(layer.shape[1], keep=1) for layer in selection.layers}
        solving = Request(request.recipe, patterns, request.pattern, request.holdout, request.seed, request.checkpoint)
        unused = tuple(f"{path}." for path in self.parts.unused(self.removed))
        names = [name for name, _ in model.named_parameters() if unused and name.startswith(unused)]
        workspace = Workspace.of(
            self.store, solving, selection, self.data, self.callbacks, frozenset({*frozen, *names})
        )
        lists = {block.path.rpartition(".")[0] for block in workspace.chain}
        if unused and not lists >= {each.path for each in self.parts.lists}:
            workspace.run_whole()  # the chain would skip the dense model's blocks too
        return workspace

    def remove(self) -> None:
        """Delete the parts from the model, and check what is left.

        Raises:
            AuditError: the smaller model gives other outputs.
            ModelError: its class does, or cannot have this number of parts.
        """
        self.parts.finish(self.removed)
        if self.parts.kind == "experts":  # new parameters are in the place of frozen ones
            for name in self.store.untrained:
                self.model.get_parameter(name).requires_grad_(False)
        self.expected.require(self.model)
        require_rebuilt(self.model, self.expected.batch, self.callbacks.on_note)

    def wide(self) -> nn.Module | None:
        """The dense model, to be timed; None if it is too large."""
        return self.dense if can_copy(self.model) else None

    def width_records(self, report: Report) -> list[WidthRecord]:
        """The parts of every list before and after."""
        kind, errors = self.parts.kind, self.parts.errors
        return [
            WidthRecord(each.path, kind, each.path, each.count, self.keep, errors.get(each.path, 0.0))
            for each in self.parts.lists
        ]

    def costs(self) -> list[CostRecord]:
        """Multiplications by the weights of modules, and all parameters, before and after."""
        models = self.dense, self.model
        macs = [Products.count(model, self.data[0], ()).of({}) for model in models]
        numbers = [float(sum(value.numel() for value in model.parameters())) for model in models]
        return [
            CostRecord("parameters", numbers[0], numbers[1], "in all layers"),
            CostRecord("macs", macs[0], macs[1], "in linear layers and convolutions"),
        ]

    def refitted(self, report: Report) -> list[str]:
        """Names of the layers that lost no inputs: all that were solved for."""
        return [record.name for record in report.layers]


class _Damage:
    """KL divergence of softened outputs from those of the dense model, on calibration samples."""

    def __init__(self, model: nn.Module, dense: nn.Module, data: list[Batch]) -> None:
        self.model = model
        with torch.no_grad():
            self.answers = answered(dense, Samples.of(data).first(PROBE, PROBE_TOKENS))
        self.loss = softened(temperature_of(self.answers))

    @torch.no_grad()
    def __call__(self) -> float:
        return damage(self.model, self.answers, self.loss)


@torch.no_grad()
def _writers(model: nn.Module, batch: Batch, first: str) -> list[Layer]:
    """Layers that write into a residual stream after a module was called; all such layers if there are none after it.

    Raises:
        LayerSelectionError: no layer writes into a residual stream.
    """
    layers = [layer for layer in find_layers(model) if layer.is_called and layer.groups == 1]
    adding: set[str] = set()
    calls: list[str] = []
    paths = {first, *(layer.path for layer in layers)}
    with (
        keeping_buffers(model),
        after_calls(model, paths, lambda path, *_: calls.append(path)),
        captured_additions(model, layers, lambda layer, _: adding.add(layer.name)),
    ):
        batches.forward(model, batches.first_sample(batch))
    order = {path: index for index, path in reversed([*enumerate(calls)])}
    writers = sorted((layer for layer in layers if layer.name in adding), key=lambda layer: order[layer.path])
    if not writers:
        raise LayerSelectionError("No layer adds its output to a residual stream, so none could repair a removal.")
    after = [layer for layer in writers if order[layer.path] > order[first]]
    return after or writers
