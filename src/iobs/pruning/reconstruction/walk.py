"""Walk along the blocks: project each block with growing sparsity, fit a window, slide on by one block.

`WindowFits` takes the gradient steps of a window, and `NetworkFit` those of the whole network behind the last block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from iobs.core.patterns import Pattern
from iobs.pruning.calibration.blocks import hidden_of, number_of_block
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.layerwise.projection import Projection
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import BlockFit
from iobs.pruning.reconstruction.fitting import Streams, Window
from iobs.pruning.reconstruction.growth import growing, windows
from iobs.pruning.reconstruction.network_fit import NetworkFit
from iobs.pruning.reconstruction.parameters import FittedParameters
from iobs.pruning.reconstruction.stored_fits import StoredFits
from iobs.pruning.reconstruction.window_fits import WindowFits
from iobs.pruning.report import JsonObject
from iobs.pruning.workspace import Workspace


@dataclass
class Walk:
    """One walk along the blocks of a model.

    Three streams go along: `base` is at the first block of the window, `ahead` at the current block of the pruned
    model, and `dense` at that block of the dense model. Hidden states that `dense` enters and leaves a block with lie
    in two places in turns.

    Args:
        work: state of the run.
        sweep: gives the Gram matrices; its reference is the dense model.
        projection: prunes layers at their final pattern, and records them.
        fit: settings.

    Attributes:
        stored: fits and finished blocks in the checkpoint.
        fits: of the windows.
        network: the steps of the whole network.
    """

    work: Workspace
    sweep: Sweep
    projection: Projection
    fit: BlockFit
    stored: StoredFits = field(init=False)
    fits: WindowFits = field(init=False)
    network: NetworkFit = field(init=False)
    _place: int = field(default=1, init=False)  # of the dense model's hidden states, 1 or 3

    def __post_init__(self) -> None:
        work, sweep, index = self.work, self.sweep, self.projection.index
        batches = len(sweep.calibration.batches)
        self.fit = self.fit.within(-(-batches // sweep.ranks.size))  # a step takes one batch on every rank
        numbers = {number_of_block(sweep.chain, layer.path) for layer in sweep.layers}
        spans = windows(sorted(number for number in numbers if number is not None), self.fit.window)
        self.stored = StoredFits(work.checkpoint, index, sweep.chain, spans)
        layers, patterns = work.selection.layers, self.projection.patterns
        parameters = FittedParameters(work.store, layers, patterns, sweep, work.frozen)
        self.fits = WindowFits(work, sweep, parameters, self.fit, self.stored)
        self.network = NetworkFit(work, sweep, parameters, self.fit, index)

    def run(self) -> None:
        """Prune and fit all blocks, and prune the layers outside them."""
        sweep, count, spans = self.sweep, len(self.sweep.chain), self.stored.windows
        base, dense = sweep.streams()
        ahead = replace(base, keep=sweep.place(2))
        last = max(spans, default=-1)  # the last block with layers
        for stage in base.stages:
            sweep.residency.enter(stage)
            if stage in spans:
                self._window(base, ahead, dense, stage)
                continue
            streams = [ahead if stage >= 0 else base, dense]
            with sweep.taking_shortcuts(streams):
                self._project(sweep, streams, stage, self.projection)
            if stage < 0:
                sweep.advance([base, dense], stage)
                sweep.residency.leave(stage)
                ahead.arguments, ahead.hidden = base.arguments, [*base.hidden]
                self.network.start(base)
            elif stage < count:
                passed_all = 0 <= last < stage and not sweep.without_input  # `ahead` is not needed any more
                sweep.advance([dense] if passed_all else [ahead, dense], stage)
        for stage in range(last + 1, count + 1):
            self.network.leave(stage)
        self.network.run(dense, self.fits.gradient)

    def _window(self, base: Stream, ahead: Stream, dense: Stream, stage: int) -> None:
        """Prune a block, fit the window that ends with it, and slide on to the next window."""
        sweep, spans = self.sweep, self.stored.windows
        other, notes = 4 - self._place, self.work.callbacks.notes
        before = len(notes)
        wanted = self._prune_block(ahead, dense, stage, other)
        noted = notes[before:]
        sweep.residency.release_dense(stage)
        last = stage == len(sweep.chain) - 1 and self.fit.last == "kl"  # behind it come the norm and the head
        window = Window(Streams.of(sweep, base, dense), spans[stage], wanted, last)
        self.fits.fit(window, self.fit.steps, stage)
        self._finish(ahead, stage, noted)
        first = min((span.start for end, span in spans.items() if end > stage), default=stage + 1)
        passed = range(spans[stage].start, first)
        self._move(base, base, passed)
        for block in passed:
            self.network.leave(block)
        if stage != max(spans) or sweep.without_input:
            self._move(base, ahead, range(first, stage + 1))
        dense.hidden, dense.keep, self._place = wanted, sweep.place(other), other

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
        wanted: list[Tensor] = []
        for level in range(levels):
            own = {layer: found[max(0, len(found) - levels + level)] for layer, found in grown.items()}
            projection = self.projection.at_level(own, level, levels)
            compared = level == 0 and self.projection.recipe.target != "layer"
            sweep, streams = (self.sweep, [ahead, dense]) if compared else (alone, [ahead])
            sweep.without_input = dict.fromkeys(grown, False) if level else self.sweep.without_input
            with sweep.taking_shortcuts(streams):
                self._project(sweep, streams, stage, projection)
                if level == 0:
                    self.sweep.without_input = sweep.without_input
                    wanted = self._outputs(dense, stage, place)  # the dense stream may take its shortcuts
            if level < levels - 1:
                window = Window(Streams.of(self.sweep, ahead, dense), range(stage, stage + 1), wanted, final=False)
                self.fits.fit(window, self.fit.between, stage, level)
        return wanted

    def _read_block(self, finished: JsonObject) -> None:
        """Take the last projection of a finished block from the checkpoint; its fitted weights come with its window."""
        layers = {layer.name: layer for layer in self.sweep.layers}
        for name in finished["layers"]:
            self.projection.read(layers[name])
        self.work.note_again(finished)
        self.sweep.without_input = {layers[name]: used for name, used in finished["without_input"].items()}

    def _finish(self, ahead: Stream, stage: int, noted: list[str]) -> None:
        """Note that a block and its window are in the checkpoint, with the notes of its projections."""
        grown = self._grown(ahead, stage)
        own = {layer.name for layer in grown}
        names = [entry.name for entry in self.projection.record.layers if entry.name in own]
        self.stored.finish(stage, names, self.sweep.without_input, grown, max(map(len, grown.values())), noted)

    def _project(self, sweep: Sweep, streams: list[Stream], stage: int, projection: Projection) -> None:
        """Prune the groups of one stage."""
        for group in sweep.groups_of(streams, stage):
            projection.project(group)
            self.work.memory.look()

    # ---- hidden states
    @torch.no_grad()
    def _outputs(self, dense: Stream, stage: int, place: int) -> list[Tensor]:
        """The outputs of a block of the dense model, stored in another place than the inputs, which stay."""
        keep = self.sweep.place(place)
        found = (hidden_of(dense.run(stage, index)) for index in range(len(dense.hidden)))
        return [keep(index, hidden) for index, hidden in enumerate(found) if hidden is not None]

    @torch.no_grad()
    def _move(self, source: Stream, goal: Stream, stages: range) -> None:
        """Store the hidden states of `source` after some blocks in `goal`."""
        if source is goal and not stages:
            return
        found = (source.through(stages, index, source.fetch(hidden)) for index, hidden in enumerate(source.hidden))
        goal.hidden = [goal.keep(index, hidden) for index, hidden in enumerate(found)]
