"""Fits of a reconstruction: gradient steps of windows of blocks, and of the whole network behind the last block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.descent import STEPS_BETWEEN_SAVES, Descent, StepCheckpoint
from iobs.pruning.descent.batches import shuffled_positions
from iobs.pruning.descent.gradients import BlockwiseGradient, LossGradient, Masters, Streams, Window
from iobs.pruning.descent.rates import RateTrials, block_trials, network_trials
from iobs.pruning.layerwise.patterns import free_zeros, is_rounded, rounding_of
from iobs.pruning.layerwise.projection import key_of
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import BlockFit
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint
from iobs.pruning.workspace import Workspace

_RETREAT = 4.0  # a fit that raises the held-out loss is repeated with a rate this much smaller
_PLACE = 4  # of the inputs of the first block among the stored hidden states; the places before it are of the streams


@dataclass
class Fits:
    """Fits of windows, with one learning rate for all that is chosen on the first of them, and of the whole network.

    Args:
        workspace: state of the run.
        sweep: has the blocks, and knows the layers that received no input so far. These are not pruned yet.
        patterns: of the pruned layers, after their last projection.
        settings: of the fits.
        stored: fits in the checkpoint.

    Attributes:
        gradient: False after a fit without a gradient; then no further step is taken.
        rates: learning rates of windows, with values on a grid (True) and without (False), once they are chosen.
        begin: the inputs of the first block in the pruned model, once it is reached; None without steps of the network.
        finished: masters of finished blocks, for these steps.
    """

    workspace: Workspace
    sweep: Sweep
    patterns: Mapping[Layer, Pattern]
    settings: BlockFit
    stored: StoredFits
    gradient: bool = field(default=True, init=False)
    rates: dict[bool, float] = field(default_factory=dict, init=False)
    begin: Stream | None = field(default=None, init=False)
    finished: list[Masters] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.settings.lr != "auto":
            self.rates = dict.fromkeys((False, True), self.settings.lr)

    # ---- windows
    def fit_window(self, window: Window, steps: int, stage: int, level: int | None = None) -> None:
        """Fit a window, or read the result from the checkpoint; undo a fit that raises the held-out loss.

        Args:
            window: the blocks.
            steps: number of steps; 0 stores the window as it is, if a resumed run needs it.
            stage: the block that the window ends with.
            level: of the projection before the fit; None: the last one, after which the rate decays.
        """
        stored, name = self.stored, self.stored.name(stage, level)
        # A window without steps is stored all the same if fits between projections have changed vectors.
        if not (steps or (level is None and self.settings.fits_levels)):
            return
        # The last window also fits norms behind the blocks.
        masters = self._masters_of(window.stages, outside=window.kl, final=window.final, shared=True)
        if not masters.values or not self._has_gradient(window, masters, name):
            return
        descent = self._descent(window, masters)
        if stored.holds(stage, level):
            if steps:
                self._rate(window, descent)  # known, and noted
            parameters, values = stored.get(stage, level)
            masters.replace(parameters)
            masters.copy_to_model()
            self.workspace.note_again(values)
        elif not steps:
            stored.put(stage, level, masters.values)
        else:
            notes = []
            descent.mark()
            before = descent.loss()
            rate = self._rate(window, descent, before)
            schedule = "cosine" if level is None else "constant"
            if not descent.lowers(before, steps, (rate, rate / _RETREAT), schedule=schedule):
                notes = [f"Gradient steps of the {name} are left out: they raise the held-out loss of {before:.3g}."]
                self.workspace.note(notes[0])
            stored.put(stage, level, masters.values, notes)
        masters.keep()

    def _descent(self, window: Window, masters: Masters) -> Descent:
        """The steps of a window on one batch of every rank."""
        ranks, seed = self.sweep.ranks, self.workspace.request.seed + window.stages.stop
        return Descent(
            LossGradient(window, masters, ranks),
            "block adam",
            order=lambda taken: ([index] for index in shuffled_positions(window.streams.fit, seed)),
            loss=lambda: window.judged_loss(ranks),
            ranks=ranks,
        )

    def _has_gradient(self, window: Window, masters: Masters, name: str) -> bool:
        """True if the loss depends on the parameters; a window that computes without gradients is projected only."""
        masters.parameters()
        with torch.enable_grad():
            if window.loss(window.streams.fit[0]).requires_grad:
                return True
        self.gradient = False
        self.workspace.note(f"Gradient steps of the {name} are left out: the model computes without gradients.")
        return False

    def _rate(self, window: Window, descent: Descent, before: float | None = None) -> float:
        """The learning rate, chosen by trials on the first window, and again on the first with values on a grid."""
        patterns = self.patterns.values()
        on_grids = window.final and is_rounded(patterns)
        if on_grids not in self.rates:
            values = " on grids" if on_grids else ""
            key = f"round {self.stored.index} rate of blocks{values}"
            trials = block_trials(self.settings)
            name = f"block reconstruction{values}"
            self.rates[on_grids] = choose_rate(self.workspace, descent, trials, key, name, before)
        return self.rates[on_grids]

    # ---- the whole network
    def start_network(self, base: Stream) -> None:
        """Keep the inputs of the first block, from which the steps of the whole network start."""
        if self.settings.network_steps:
            keep = self.sweep.place(_PLACE)
            self.begin = replace(base, hidden=[keep(index, hidden) for index, hidden in enumerate(base.hidden)])

    def leave(self, stage: int) -> None:
        """Leave a finished block; before steps of the whole network only its masters are kept."""
        residency = self.sweep.residency
        if not self.settings.network_steps or stage >= len(self.sweep.chain):
            residency.leave(stage)
            return
        self.finished.append(self._masters_of(range(stage, stage + 1)).held(residency.hold))
        residency.release(stage)

    def fit_network(self, dense: Stream) -> None:
        """Take the steps, undo them if they raise the held-out loss, and leave all blocks; `dense` is behind them."""
        if self.begin is None:
            return
        groups = [*self.finished, Masters.of(self.workspace.store, self._vectors_outside(), {})]
        if self.gradient:
            self._fit_groups(Streams.of(self.sweep, self.begin, dense), groups)
        for stage, masters in enumerate(groups):
            self.sweep.residency.enter(stage)
            masters.copy_to_model()
            masters.keep()
            self.sweep.residency.leave(stage)

    def _fit_groups(self, streams: Streams, groups: list[Masters]) -> None:
        """Take the steps on groups of masters, or read them from the checkpoint."""
        workspace, key = self.workspace, f"round {self.stored.index} steps of the network"
        if key in workspace.checkpoint:
            workspace.note_again(workspace.checkpoint.get(key)[1])
            for stage, masters in enumerate(groups):
                masters.replace(workspace.checkpoint.get(f"{key}, block {stage}")[0])
            return
        gradient, ranks = BlockwiseGradient(streams, groups, self.sweep.residency), self.sweep.ranks
        descent = Descent(
            gradient,
            "factored",
            order=lambda taken: shuffled_positions(streams.fit, workspace.request.seed),
            loss=lambda: gradient.judged_loss(ranks),
            ranks=ranks,
        )
        descent.mark(self.sweep.residency.hold)
        first_note, before = len(workspace.callbacks.notes), descent.loss()
        rate = self.settings.network_lr
        if rate == "auto":
            trials, rate_key = network_trials(self.settings), f"round {self.stored.index} rate of the network"
            rate = choose_rate(workspace, descent, trials, rate_key, "the whole network", before)
        saved = StepCheckpoint(workspace.checkpoint, f"{key} so far", STEPS_BETWEEN_SAVES)
        if not descent.lowers(
            before,
            self.settings.network_steps,
            (rate,),
            saved=saved,
            on_step=lambda done, steps, loss: workspace.callbacks.on_measure("steps of the whole network", done, steps),
        ):
            workspace.note(f"The steps of the whole network are left out: they raise the held-out loss {before:.3g}.")
        for stage, masters in enumerate(groups):
            workspace.checkpoint.put(f"{key}, block {stage}", masters.values, {})
        workspace.checkpoint.put(
            key, {}, {"notes": workspace.callbacks.notes[first_note:]}
        )  # last: all blocks are stored now
        saved.remove(descent)

    # ---- fitted parameters
    def _masters_of(self, stages: range, outside: bool = False, final: bool = True, shared: bool = False) -> Masters:
        """The masters of some blocks; with final patterns values stay on their grids.

        Args:
            stages: of the blocks.
            outside: also the vectors outside all blocks.
            final: the layers have their final patterns.
            shared: float32 parameters are their own masters.
        """
        model, blocks = self.workspace.store.model, [self.sweep.chain[stage] for stage in stages]
        layers = [layer for layer in self.workspace.selection.layers if layer not in self.sweep.without_input]
        names, masks = fitted_names(model, layers, blocks, self.workspace.frozen)
        rounding = None
        if final:
            patterns = {layer: self.patterns[layer] for layer in layers if layer.key in masks}
            free_zeros(masks, patterns)
            rounding = rounding_of(model, patterns, self.workspace.store.stored_dtype)
        names += self._vectors_outside() if outside else []
        return Masters.of(self.workspace.store, names, masks, rounding, shared=shared)

    def _vectors_outside(self) -> list[str]:
        """The names of the vectors outside the blocks, such as the scale of the last norm."""
        everywhere = tuple(f"{block.path}." for block in self.sweep.chain)
        return [
            name
            for name, value in self.workspace.store.model.named_parameters()
            if value.ndim == 1 and value.is_floating_point() and not name.startswith(everywhere)
            if name not in self.workspace.frozen
        ]


def choose_rate(
    workspace: Workspace, descent: Descent, trials: RateTrials, key: str, name: str, before: float | None = None
) -> float:
    """The learning rate of steps by trials, or from the checkpoint, with a note.

    Args:
        workspace: state of the run.
        descent: the steps, after `mark`.
        trials: of the rates.
        key: of the trials in the checkpoint.
        name: of the steps in the note.
        before: the held-out loss without steps; None: it is measured.
    """

    def choose() -> JsonObject:
        loss = descent.loss() if before is None else before
        return trials.choose(descent, loss, workspace.checkpoint, key, workspace.callbacks.on_measure)

    choice = workspace.checkpoint.remembered(key, choose)
    text = f"Learning rate of {name}: {choice['rate']:g} ({choice['text']})."
    if text not in workspace.callbacks.notes:  # as after a finished block of a resumed run
        workspace.note(text)
    return float(choice["rate"])


def fitted_names(
    model: nn.Module, layers: Iterable[Layer], blocks: Sequence[Block], frozen: Iterable[str]
) -> tuple[list[str], dict[str, Tensor]]:
    """The parameters that are fitted in some blocks, by name, and the masks of pruned weights.

    These are the parameters of pruned layers, and vectors such as biases and norm scales. Matrices that stay dense keep
    their bits, also beside pruned ones in one parameter, and so do parameters that the user froze.

    Args:
        model: the model.
        layers: pruned layers.
        blocks: the blocks; a parameter outside them is left out.
        frozen: names of parameters that the user froze.
    """
    pruned: dict[str, list[Layer]] = {}
    for layer in layers:
        pruned.setdefault(layer.key, []).append(layer)
    kept = set(frozen) - pruned.keys()
    names: list[str] = []
    masks: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        if not any(block.holds(name) for block in blocks) or name in kept or not value.is_floating_point():
            continue
        if name in pruned:
            masks[name] = _fitted_entries(value.detach(), pruned[name])
        if name in pruned or value.ndim == 1:
            names.append(name)
    return names, masks


def _fitted_entries(value: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The entries of a parameter that are not zero and belong to layers, as a mask."""
    nonzero = value != 0
    if sum(layer.weights for layer in layers) == value.numel():
        return nonzero
    inside = torch.zeros_like(nonzero, memory_format=torch.contiguous_format)
    for layer in layers:
        layer.write_into(inside, torch.ones(layer.shape, dtype=torch.bool))
    return nonzero & inside


# ---- results in a checkpoint, of which only those stay that a resumed run reads
# A window of blocks has an entry for each block, and one entry more that names it complete. The fit of the next window
# replaces the entries of the blocks that both share. Once the window that ends with a block is fitted, a resumed run
# takes the last projection of the block and the window. The block's projections at lower sparsity, and the fits between
# them, are not needed any more.
@dataclass(frozen=True)
class StoredFits:
    """Entries of one reconstruction.

    A fit is named by its block and its level. Level None is the fit of the window that ends with the block. A number is
    the fit of the block alone after its projection at that level.

    Args:
        checkpoint: of the run.
        index: number of the round.
        chain: the blocks.
        windows: blocks of each window, by its last block.
    """

    checkpoint: Checkpoint
    index: int
    chain: Sequence[Block]
    windows: Mapping[int, range]

    def holds(self, stage: int, level: int | None) -> bool:
        """True if a fit was stored when the run began."""
        return self._key(stage, level) in self.checkpoint

    def put(self, stage: int, level: int | None, values: Mapping[str, Tensor], notes: Sequence[str] = ()) -> None:
        """Store the parameters of a fit and its notes; remove the parameters of the window before that it replaces."""
        rest = dict(values)
        for block in self.windows[stage] if level is None else ():
            inside = {name: rest.pop(name) for name in [*rest] if self.chain[block].holds(name)}
            if self._part(stage, block) not in self.checkpoint:  # a killed run stored it: the fit has the same bits
                self.checkpoint.put(self._part(stage, block), inside, {})
        self.checkpoint.put(self._key(stage, level), rest, {"notes": [*notes]})  # last: all blocks are stored now
        self._remove_replaced(stage, level)

    def get(self, stage: int, level: int | None) -> tuple[dict[str, Tensor], JsonObject]:
        """The stored parameters of a fit, without those that the next window has replaced, and its values."""
        parameters: dict[str, Tensor] = {}
        if level is None:
            after = min((end for end in self.windows if end > stage), default=stage)
            replaced = self.windows[after] if after > stage and self.holds(after, None) else range(0)
            for block in self.windows[stage]:
                parameters |= {} if block in replaced else self.checkpoint.get(self._part(stage, block))[0]
        rest, values = self.checkpoint.get(self._key(stage, level))
        self._remove_replaced(stage, level)
        return parameters | rest, values

    def finished(self, stage: int) -> JsonObject | None:
        """The values that `finish` stored of a block; None if the block was not finished when the run began."""
        key = self._finished(stage)
        return self.checkpoint.get(key)[1] if key in self.checkpoint else None

    def finish(
        self,
        stage: int,
        names: Sequence[str],
        without_input: Mapping[Layer, bool],
        layers: Iterable[Layer],
        levels: int,
        notes: Sequence[str],
    ) -> None:
        """Note that a block and its window are stored, and remove the entries that a resumed run does not read.

        Args:
            stage: the block.
            names: its pruned layers, in the order of their projection.
            without_input: layers that have received no input up to this block.
            layers: all its layers.
            levels: number of its projections.
            notes: of its projections and of the fits between them.
        """
        if self._finished(stage) not in self.checkpoint:
            names_without_input = {layer.name: used for layer, used in without_input.items()}
            values = {"layers": [*names], "without_input": names_without_input, "notes": [*notes]}
            self.checkpoint.put(self._finished(stage), {}, values)
        for level in range(levels - 1):
            self.checkpoint.drop(self._key(stage, level))
            for layer in layers:
                self.checkpoint.drop(key_of(self.index, layer, level))

    def _remove_replaced(self, stage: int, level: int | None) -> None:
        before = max((end for end in self.windows if end < stage), default=stage)
        if level is None and before < stage:
            for block in self.windows[stage]:
                self.checkpoint.drop(self._part(before, block))

    @staticmethod
    def name(stage: int, level: int | None) -> str:
        """Name of a fit in notes and keys."""
        return f"window of block {stage}" if level is None else f"block {stage} at level {level}"

    def _key(self, stage: int, level: int | None) -> str:
        return f"round {self.index} {self.name(stage, level)}"

    def _part(self, stage: int, block: int) -> str:
        return f"{self._key(stage, None)}, block {block}"

    def _finished(self, stage: int) -> str:
        return f"round {self.index} block {stage} is finished"
