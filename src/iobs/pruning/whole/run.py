"""`iobs.prune` with `Structured(units="blocks")` or `units="experts"`: choose parts, remove them, refit what follows.

The layers that write into the residual stream after the first removal are solved anew. Their targets are the sums of
the dense model, so they repair what the removed parts leave out. The recipe "best" ends with gradient steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from iobs.core.column_groups import Groups
from iobs.core.patterns import keep_count
from iobs.errors import LayerSelectionError, ModelError, PatternError, ProblemError, first_line, is_out_of_memory
from iobs.pruning.algorithm import run
from iobs.pruning.calibration.additions import captured_additions
from iobs.pruning.calibration.losses import answered
from iobs.pruning.calibration.row_fisher import PROBE, PROBE_TOKENS
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.coverage import Reason
from iobs.pruning.descent.scoring import dense_copy
from iobs.pruning.network.calls import after_calls
from iobs.pruning.network.layers import Layer, find_layers, joined
from iobs.pruning.network.modes import evaluating, keeping_buffers, replaced_forwards, seeded
from iobs.pruning.network.selection import Selection
from iobs.pruning.removable import Asked, require_taken
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.store import Store
from iobs.pruning.structure.expected import Expected, can_copy, outputs_of
from iobs.pruning.structure.shapes import is_configured
from iobs.pruning.structured import seconds_of
from iobs.pruning.structured_report import CostRecord, StructuredReport, WidthRecord
from iobs.pruning.whole.blocks import Blocks
from iobs.pruning.whole.experts import Experts
from iobs.pruning.whole.part import Parts
from iobs.pruning.widths.costs import Products, note_differing_shapes
from iobs.pruning.widths.softened import damage, softened, temperature_of
from iobs.pruning.workspace import Request, Workspace


class _Beside(Store):
    """A store of a model that has lost parts, with the dense model beside it."""

    def __init__(self, model: nn.Module, dense: nn.Module) -> None:
        super().__init__(model)
        self._dense = dense

    @property
    def dense_model(self) -> nn.Module:
        """The dense model."""
        return self._dense

    @contextmanager
    def as_dense(self) -> Iterator[None]:
        """Context in which the dense model answers calls of the model, whose parts are gone already."""
        with replaced_forwards([(self.model, self._dense.forward)]):
            yield


def prune_whole(store: Store, collected: list[Batch], asked: Asked, callbacks: Callbacks) -> StructuredReport:
    """Remove blocks or experts of the model of a store.

    Raises:
        LayerSelectionError: there are none, or no layer that could repair their absence.
        PatternError: the share is none of them, or more than can be removed.
        ModelError: the model's class cannot have fewer of them.
        ProblemError: names of layers.
        CalibrationError: the model does not take a batch.
    """
    model = store.model
    untrained = {name for name, value in model.named_parameters() if not value.requires_grad}
    with evaluating(model) as frozen, seeded(model, asked.seed):
        parts = parts_of(model, collected, asked)
        keep = kept_parts(parts, asked.pattern.sparsity)
        parts.require_possible(keep)
        note_differing_shapes(collected, callbacks.on_note)
        dense = dense_copy(model)
        own = _Beside(model, dense)
        with own.unchanged_by_failure():
            removed = parts.chosen(keep, _Damage(model, dense, collected))
            for path, gone in removed.items():
                callbacks.on_note(f"Removed {parts.name} of {path or 'the model'}: {', '.join(map(str, gone))}.")
            with parts.without(removed):
                work = _workspace(own, collected, asked, callbacks, frozen, parts, removed)
                report = run(work, ends=False)
                expected = Expected.of(model, collected[0])
                parts.finish(removed)
                expected.require(model)
                _require_loadable(model, expected.batch, callbacks)
            records = [
                WidthRecord(one.path, parts.name, one.path, one.count, keep, parts.errors.get(one.path, 0.0))
                for one in parts.stacks
            ]
            wide = dense if can_copy(model) else None
            found = StructuredReport(
                **{**vars(report), "audit": []},
                widths=records,
                costs=[
                    *_costs(dense, model, collected[0]),
                    *seconds_of(wide, model, collected[0], asked.pattern.runtime, callbacks),
                ],
                refitted=[one.name for one in report.layers],
            )
            callbacks.on_end(found)
    if parts.name == "experts":  # new parameters are in the place of frozen ones
        for name in untrained:
            model.get_parameter(name).requires_grad_(False)
    return found


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


def parts_of(model: nn.Module, collected: Sequence[Batch], asked: Asked) -> Parts:
    """The blocks or the experts of a model.

    Raises:
        ProblemError: names of layers.
        LayerSelectionError: there are none.
        ModelError: experts of a model that is not built from a configuration.
        CalibrationError: the model does not take a batch.
    """
    if asked.include is not None or asked.ignore is not None:
        raise ProblemError(f'units="{asked.pattern.units}" chooses among all of them: leave out include= and ignore=.')
    require_taken(model, collected)
    return Blocks.found(model, collected[0]) if asked.pattern.units == "blocks" else Experts.found(model, collected)


def kept_parts(parts: Parts, share: float) -> int:
    """The number of parts that are left in each stack.

    Raises:
        PatternError: it is all of them, or fewer than are needed.
    """
    count = parts.stacks[0].count
    keep = keep_count(count, share)
    if keep == count:
        raise PatternError(
            f"{share:.3g} of {count} {parts.name} is less than a half of one; ask for at least {1 / count:.3g}."
        )
    if keep < parts.least:
        raise PatternError(
            f"{keep} of {count} {parts.name} would be left, and {parts.least} are needed; ask for at most "
            f"{1 - parts.least / count:.3g}."
        )
    return keep


def _workspace(
    store: Store,
    collected: list[Batch],
    asked: Asked,
    callbacks: Callbacks,
    frozen: frozenset[str],
    parts: Parts,
    removed: Mapping[str, Sequence[int]],
) -> Workspace:
    """The workspace of the refit of the layers after the first removal; all their columns are kept."""
    layers = _writers(store.model, collected[0], parts.first(removed))
    skipped = {one.name: Reason("asked", "is not refitted") for one in find_layers(store.model) if one not in layers}
    selection = store.check(collected, Selection(tuple(layers), skipped), asked.holdout)
    patterns = {layer: Groups(layer.shape[1], keep=1) for layer in selection.layers}
    request = Request(asked.recipe, patterns, asked.pattern, asked.holdout, asked.seed, asked.checkpoint)
    unused = [f"{path}." for path in parts.unused(removed)]
    names = [name for name, _ in store.model.named_parameters() if name.startswith(tuple(unused))] if unused else []
    work = Workspace.of(store, request, selection, collected, callbacks, frozenset({*frozen, *names}))
    lists = {block.path.rpartition(".")[0] for block in work.chain}
    if unused and not lists >= {one.path for one in parts.stacks}:  # the chain would skip the dense model's blocks too
        work.run_whole()
    return work


@torch.no_grad()
def _writers(model: nn.Module, batch: Batch, first: str) -> list[Layer]:
    """Layers that write into a residual stream after a module was called; all such layers if there are none after it.

    Raises:
        LayerSelectionError: no layer writes into a residual stream.
    """
    layers = [layer for layer in find_layers(model) if layer.is_called and layer.groups == 1]
    adding: set[str] = set()
    order: list[str] = []
    paths = {first, *(layer.path for layer in layers)}
    with (
        keeping_buffers(model),
        after_calls(model, paths, lambda path, *_: order.append(path)),
        captured_additions(model, layers, lambda layer, _: adding.add(layer.name)),
    ):
        batches.forward(model, batches.first_sample(batch))
    place = {path: number for number, path in reversed([*enumerate(order)])}
    writers = sorted((one for one in layers if one.name in adding), key=lambda one: place[one.path])
    if not writers:
        raise LayerSelectionError("No layer adds its output to a residual stream, so none could repair a removal.")
    after = [one for one in writers if place[one.path] > place[first]]
    return after or writers


def _costs(dense: nn.Module, model: nn.Module, batch: Batch) -> list[CostRecord]:
    """Multiplications by the weights of modules, and all parameters, before and after."""
    macs = [Products.count(one, batch, ()).of({}) for one in (dense, model)]
    numbers = [float(sum(value.numel() for value in one.parameters())) for one in (dense, model)]
    return [
        CostRecord("parameters", numbers[0], numbers[1], "in all layers"),
        CostRecord("macs", macs[0], macs[1], "in linear layers and convolutions"),
    ]


def _require_loadable(model: nn.Module, batch: Batch, callbacks: Callbacks) -> None:
    """Check that the model's class, built from its configuration, gives the same outputs with the model's weights.

    Raises:
        ModelError: it does not.
    """
    if not is_configured(model):
        return
    try:
        found = _outputs_again(model, batch, callbacks)
    except Exception as error:  # every class has its own
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{type(model).__name__} cannot be built from its new configuration: {first_line(error)}."
        ) from None
    if found is not None and not torch.allclose(found, outputs_of(model, batch), atol=1e-3, rtol=1e-2):
        raise ModelError(
            f"{type(model).__name__} gives other outputs when it is built from its new configuration: its layers "
            "depend on their place in a way that the configuration does not say."
        )


def _outputs_again(model: nn.Module, batch: Batch, callbacks: Callbacks) -> Tensor | None:
    """Outputs of a model of the same class and configuration with the same weights, every tensor in its own dtype.

    A large model lends its tensors to the other one. Then tensors that are no part of its state have no values. Where
    they are needed, None is returned, with a note.
    """
    own = dict(model.named_buffers())
    if can_copy(model):
        again = type(model)(copy.deepcopy(model.config)).eval()
        again.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        for module, name, whole in _buffers_in_no_file(again):
            if whole in own:
                module._buffers[name] = module.get_buffer(name).to(own[whole])
        return outputs_of(again, batch)
    try:
        with torch.device("meta"):
            again = type(model)(copy.deepcopy(model.config)).eval()
    except Exception as error:  # every class has its own
        _note_unchecked(model, callbacks, error)
        return None
    again.load_state_dict(model.state_dict(), assign=True)
    for module, name, whole in _buffers_in_no_file(again):
        if whole in own:
            module._buffers[name] = own[whole]
    try:
        return outputs_of(again, batch)
    except Exception as error:  # every class has its own
        _note_unchecked(model, callbacks, error)
        return None


def _buffers_in_no_file(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """The module, the name and the full name of every buffer that is no part of a model's state."""
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            if module._buffers.get(name) is not None:
                yield module, name, joined(path, name)


def _note_unchecked(model: nn.Module, callbacks: Callbacks, error: Exception) -> None:
    """Note that a check was left out; an error of a full memory is raised."""
    if is_out_of_memory(error):
        raise error
    kind = type(model).__name__
    callbacks.on_note(f"Not checked that {kind} can be built from its new configuration: {first_line(error)}")
