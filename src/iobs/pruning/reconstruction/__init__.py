"""Block reconstruction: project each block with growing sparsity, fit a window of blocks, slide on by one block.

The walk along the chain is that of a `Sweep`, which gives the groups of layers of each stage. Here every stage gets
several projections, and `Fits` takes gradient steps in between: those of a window, and those of the whole network
behind the last block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from iobs.core.grids import entries_of
from iobs.core.patterns import NM, Grid, Pattern, Rate
from iobs.pruning.calibration.blocks import hidden_of, number_of_block
from iobs.pruning.calibration.replay import BEFORE, Stream
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.descent.gradients import Streams, Window
from iobs.pruning.layerwise.patterns import thinner
from iobs.pruning.layerwise.projection import TARGETS, Projection
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import BlockFit
from iobs.pruning.reconstruction.fits import Fits, StoredFits
from iobs.pruning.report import JsonObject
from iobs.pruning.workspace import Workspace

_FIRST_SHARE = 0.6  # of the sparsity, in the first of several projections
_GROWTH = 1.5  # exponent of the growth: about 42, 55, 65 and 70 % for four projections to 70 %


@dataclass
class Reconstruction:
    """The reconstruction of all blocks of a model, in one walk along them.

    Three streams go along: `base` is at the first block of the window, `ahead` at the current block of the pruned
    model, and `dense` at that block of the dense model. Hidden states that `dense` enters and leaves a block with lie
    in two places in turns.

    Args:
        workspace: state of the run.
        sweep: gives the Gram matrices; its reference is the dense model.
        projection: prunes layers at their final pattern, and records them.
        fit: settings.

    Attributes:
        stored: fits and finished blocks in the checkpoint.
        fits: of the windows and of the whole network.
    """

    workspace: Workspace
    sweep: Sweep
    projection: Projection
    fit: BlockFit
    stored: StoredFits = field(init=False)
    fits: Fits = field(init=False)
    _place: int = field(default=1, init=False)  # of the dense model's hidden states, 1 or 3

    def __post_init__(self) -> None:
        workspace, sweep, index = self.workspace, self.sweep, self.projection.index
        batches = len(sweep.calibration.batches)
        self.fit = self.fit.within(-(-batches // sweep.ranks.size))  # a step takes one batch on every rank
        numbers = {number_of_block(sweep.chain, layer.path) for layer in sweep.layers}
        spans = windows(sorted(number for number in numbers if number is not None), self.fit.window)
        self.stored = StoredFits(workspace.checkpoint, index, sweep.chain, spans)
        self.fits = Fits(workspace, sweep, self.projection.patterns, self.fit, self.stored)

    def run(self) -> None:
        """Prune and fit all blocks, and prune the layers outside them."""
        sweep, count, spans = self.sweep, len(self.sweep.chain), self.stored.windows
        base, dense = sweep.streams()
        ahead = replace(base, keep=sweep.place(2))
        last = max(spans, default=-1)  # the last block with layers
        for stage in base.stages:
            sweep.residency.enter(stage)
            if stage == BEFORE:
                self.projection.project_all(sweep.through([base, dense], stage))
                sweep.residency.leave(stage)
                ahead.arguments, ahead.hidden = base.arguments, [*base.hidden]
                self.fits.start_network(base)
            elif stage in spans:
                self._window(base, ahead, dense, stage)
            elif stage < count:  # a block without layers
                passed_all = 0 <= last < stage and not sweep.without_input  # `ahead` is not needed any more
                sweep.advance([dense] if passed_all else [ahead, dense], stage)
            else:
                self.projection.project_all(sweep.through([ahead, dense], stage))
        for stage in range(last + 1, count + 1):
            self.fits.leave(stage)
        self.fits.fit_network(dense)

    def _window(self, base: Stream, ahead: Stream, dense: Stream, stage: int) -> None:
        """Prune a block, fit the window that ends with it, and slide on to the next window."""
        sweep, spans = self.sweep, self.stored.windows
        other, notes = 4 - self._place, self.workspace.callbacks.notes
        before = len(notes)
        targets = self._prune_block(ahead, dense, stage, other)
        of_block = notes[before:]
        sweep.residency.release_dense(stage)
        last = stage == len(sweep.chain) - 1 and self.fit.last == "kl"  # behind it come the norm and the head
        window = Window(Streams.of(sweep, base, dense), spans[stage], targets, last)
        self.fits.fit_window(window, self.fit.steps, stage)
        self._finish(ahead, stage, of_block)
        first = min((span.start for end, span in spans.items() if end > stage), default=stage + 1)
        behind = range(spans[stage].start, first)
        self._move(base, base, behind)
        for block in behind:
            self.fits.leave(block)
        if stage != max(spans) or sweep.without_input:
            self._move(base, ahead, range(first, stage + 1))
        dense.hidden, dense.keep, self._place = targets, sweep.place(other), other

    # ---- projections of one block
    def _grown(self, ahead: Stream, stage: int) -> dict[Layer, list[Pattern]]:
        """The patterns of the layers of a block, in the order of its projections."""
        layers, patterns = ahead.layers_of(stage, self.sweep.layers), self.projection.patterns
        return {layer: growing(patterns[layer], layer, self.fit.masks) for layer in layers}

    def _prune_block(self, ahead: Stream, dense: Stream, stage: int, place: int) -> list[Tensor]:
        """Project the layers of a block at growing sparsity, with steps on the block alone in between.

        Of a finished block the last projection is read from the checkpoint. Only the first projection compares with the
        dense model, if the target asks for it: later ones start from weights that were fitted to its output.

        Returns:
            The outputs of the dense block by batch, stored in the place with the number `place`.
        """
        finished = self.stored.finished(stage)
        if finished is not None:
            self._read_block(finished)
            return self._outputs(dense, stage, place)
        grown = self._grown(ahead, stage)
        levels = max(map(len, grown.values()))
        alone = replace(self.sweep, reference=None, moments=replace(self.sweep.moments, drift=False))
        targets: list[Tensor] = []
        for level in range(levels):
            patterns = {layer: levels_of[max(0, len(levels_of) - levels + level)] for layer, levels_of in grown.items()}
            projection = self.projection.at_level(patterns, level, levels)
            compared = level == 0 and self.projection.target is not TARGETS["layer"]
            sweep, streams = (self.sweep, [ahead, dense]) if compared else (alone, [ahead])
            sweep.without_input = dict.fromkeys(grown, False) if level else self.sweep.without_input
            with sweep.taking_shortcuts(streams):
                projection.project_all(sweep.groups_of(streams, stage))
                if level == 0:
                    self.sweep.without_input = sweep.without_input
                    targets = self._outputs(dense, stage, place)  # the dense stream may take its shortcuts
            if level < levels - 1:
                window = Window(Streams.of(self.sweep, ahead, dense), range(stage, stage + 1), targets, final=False)
                self.fits.fit_window(window, self.fit.between, stage, level)
        return targets

    def _read_block(self, finished: JsonObject) -> None:
        """Take the last projection of a finished block from the checkpoint; its fitted weights come with its window."""
        layers = {layer.name: layer for layer in self.sweep.layers}
        for name in finished["layers"]:
            self.projection.read(layers[name])
        self.workspace.note_again(finished)
        self.sweep.without_input = {layers[name]: used for name, used in finished["without_input"].items()}

    def _finish(self, ahead: Stream, stage: int, notes: list[str]) -> None:
        """Note that a block and its window are in the checkpoint, with the notes of its projections."""
        grown = self._grown(ahead, stage)
        names_of_block = {layer.name for layer in grown}
        names = [entry.name for entry in self.projection.record.layers if entry.name in names_of_block]
        self.stored.finish(stage, names, self.sweep.without_input, grown, max(map(len, grown.values())), notes)

    # ---- hidden states
    @torch.no_grad()
    def _outputs(self, dense: Stream, stage: int, place: int) -> list[Tensor]:
        """The outputs of a block of the dense model, stored in another place than the inputs, which stay."""
        keep = self.sweep.place(place)
        outputs = (hidden_of(dense.run(stage, index)) for index in range(len(dense.hidden)))
        return [keep(index, hidden) for index, hidden in enumerate(outputs) if hidden is not None]

    @torch.no_grad()
    def _move(self, source: Stream, goal: Stream, stages: range) -> None:
        """Store the hidden states of `source` after some blocks in `goal`."""
        if source is goal and not stages:
            return
        outputs = (source.through(stages, index, source.fetch(hidden)) for index, hidden in enumerate(source.hidden))
        goal.hidden = [goal.keep(index, hidden) for index, hidden in enumerate(outputs)]


def growing(pattern: Pattern, layer: Layer, count: int) -> list[Pattern]:
    """The patterns of `count` projections of a layer: sparsity grows to that of `pattern`; equal ones are left out.

    Values lie on a grid after the last projection only. A dense grid and coded integers have one projection.
    """
    patterns: list[Pattern] = []
    entries = entries_of(pattern)
    for step in range(0 if isinstance(pattern, (Grid, Rate)) else count - 1):
        share = 1 - (1 - _FIRST_SHARE) * ((count - 1 - step) / (count - 1)) ** _GROWTH
        if isinstance(entries, NM):
            zeros = max(1, round(share * (entries.of - entries.keep)))
            patterns.append(NM(entries.of - zeros, entries.of))
        else:
            patterns.append(thinner(entries, layer, share))
    return [*(entry for entry in dict.fromkeys(patterns) if entry != pattern), pattern]


def next_start(full: list[int], stage: int, window: int) -> int:
    """The first block of the window that ends with the next block with layers.

    Args:
        full: blocks with layers.
        stage: the block with layers that the current window ends with.
        window: number of blocks with layers in a window.
    """
    start = full.index(stage) + 2 - window
    return full[max(0, start)] if start < len(full) else stage + 1


def windows(full: list[int], window: int) -> dict[int, range]:
    """The blocks of each window, by the block with layers that the window ends with; arguments as in `next_start`."""
    spans: dict[int, range] = {}
    first = 0
    for stage in full:
        spans[stage] = range(first, stage + 1)
        first = min(next_start(full, stage, window), stage + 1)
    return spans
