"""Walk along the blocks: project each block with growing sparsity, fit a window, slide on by one block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from iobs.core.grids import grid_of
from iobs.core.patterns import Pattern
from iobs.pruning.calibration.blocks import hidden_of, number_of_block
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.callbacks import Callback
from iobs.pruning.layerwise.grids import free_zeros, rounding_of
from iobs.pruning.layerwise.projection import Projection
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import BlockFit
from iobs.pruning.reconstruction.fitting import Fit, Streams, Window
from iobs.pruning.reconstruction.growth import growing, windows
from iobs.pruning.reconstruction.network_steps import NetworkSteps, StepCheckpoint
from iobs.pruning.reconstruction.parameters import Masters, fitted_names
from iobs.pruning.reconstruction.rates import ENOUGH_OF_NETWORK, RateTrials, loss_after
from iobs.pruning.reconstruction.stored_fits import StoredFits
from iobs.pruning.report import JsonObject
from iobs.pruning.workspace import Workspace

NETWORK_RATES = (5e-5, 2e-4, 8e-4, 3e-3, 8e-3)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
_LOWER_NETWORK_RATES, _LOWER_RATES = (1.5e-5, 5e-6), (3e-5, 1e-5, 3e-6)  # tried where no other rate gains
_TRIAL_SHARE, _TRIAL_STEPS = 5, 12  # a trial of a rate takes a fifth of the steps, and at least twelve
_NETWORK_SHARE = 20  # a trial of a rate of the whole network takes a twentieth of its steps
_RETREAT = 4.0  # a fit that raises the held-out loss is repeated with a rate this much smaller


def trial_steps(fit: BlockFit) -> int:
    """Gradient steps of one trial of a rate of blocks."""
    return max(_TRIAL_STEPS, fit.steps // _TRIAL_SHARE)


def network_trial_steps(fit: BlockFit) -> int:
    """Gradient steps of one trial of a rate of the whole network."""
    return max(_TRIAL_STEPS, fit.network_steps // _NETWORK_SHARE)


@dataclass
class Walk:
    """One walk along the blocks of a model.

    Args:
        work: state of the run.
        sweep: gives the Gram matrices; its reference is the dense model.
        projection: prunes layers at their final pattern, and records them.
        fit: settings.

    Attributes:
        stored: fits and finished blocks in the checkpoint.
        rates: learning rates of fits, with values on a grid (True) and without (False), once they are chosen.
        fitted: parameters of finished blocks, if steps of the whole network follow.
    """

    work: Workspace
    sweep: Sweep
    projection: Projection
    fit: BlockFit
    stored: StoredFits = field(init=False)
    rates: dict[bool, float] = field(default_factory=dict, init=False)
    fitted: list[Masters] = field(default_factory=list, init=False)
    _place: int = field(default=1, init=False)  # of the dense model's hidden states, 1 or 3
    _gradient: bool = field(default=True, init=False)  # False after a fit without a gradient

    def __post_init__(self) -> None:
        batches = len(self.sweep.calibration.batches)
        self.fit = self.fit.within(-(-batches // self.sweep.ranks.size))  # a step takes one batch on every rank
        if self.fit.lr != "auto":
            self.rates = dict.fromkeys((False, True), self.fit.lr)
        chain = self.sweep.chain
        numbers = {number_of_block(chain, layer.path) for layer in self.sweep.layers}
        spans = windows(sorted(number for number in numbers if number is not None), self.fit.window)
        self.stored = StoredFits(self.work.checkpoint, self.projection.index, chain, spans)

    def run(self) -> None:
        """Prune and fit all blocks, and prune the layers outside them."""
        sweep, count = self.sweep, len(self.sweep.chain)
        base, dense = sweep.streams()
        ahead = replace(base, keep=sweep.place(2))  # at the current block; `base` is at the first block of the window
        spans = self.stored.windows
        full = [*spans]  # blocks with layers
        first = 0  # first block of the window
        for stage in base.stages:
            sweep.residency.enter(stage)
            if stage in full:
                other = 4 - self._place
                wanted = self._prune_block(ahead, dense, stage, other)
                sweep.residency.release_dense(stage)
                last = stage == count - 1 and self.fit.last == "kl"  # behind it come the norm and the head
                window = Window(self._streams(base, dense), spans[stage], wanted, last)
                self._fit(window, self.fit.steps, stage)
                self._finish(ahead, stage)
                before, first = first, min((one.start for end, one in spans.items() if end > stage), default=stage + 1)
                self._move(base, base, range(before, first))
                for passed in range(before, first):
                    self._leave(passed)
                if stage != full[-1] or sweep.without_input:
                    self._move(base, ahead, range(first, stage + 1))
                dense.hidden, dense.keep, self._place = wanted, sweep.place(other), other
                continue
            streams = [ahead if stage >= 0 else base, dense]
            with sweep.taking_shortcuts(streams):
                self._project(sweep, streams, stage, self.projection)
            if stage < 0:
                sweep.advance([base, dense], stage)
                sweep.residency.leave(stage)
                ahead.arguments, ahead.hidden = base.arguments, [*base.hidden]
                begin = self._begin(base)
            elif stage < count:
                passed_all = full and stage > full[-1] and not sweep.without_input  # `ahead` is not needed any more
                sweep.advance([dense] if passed_all else [ahead, dense], stage)
        for stage in range(first, count + 1):
            self._leave(stage)
        if self.fit.network_steps:
            self._network(begin, dense)

    # ---- steps of the whole network
    def _begin(self, base: Stream) -> Stream:
        """A stream that keeps the inputs of the first block, which the steps of the whole network start from."""
        if not self.fit.network_steps:
            return base
        keep = self.sweep.place(4)
        return replace(base, hidden=[keep(index, hidden) for index, hidden in enumerate(base.hidden)])

    def _leave(self, stage: int) -> None:
        """Leave a finished block; before steps of the whole network only its fitted parameters are kept."""
        if not self.fit.network_steps or stage >= len(self.sweep.chain):
            self.sweep.residency.leave(stage)
            return
        residency = self.sweep.residency
        self.fitted.append(self._masters(range(stage, stage + 1)).held(residency.hold))
        residency.release(stage)

    def _network(self, begin: Stream, dense: Stream) -> None:
        """Take the steps of the whole network, undo them if they raise the held-out loss, and leave all blocks."""
        work, key, residency = self.work, f"round {self.projection.index} steps of the network", self.sweep.residency
        masters = [*self.fitted, Masters.of(work.store, self._vectors_outside(), {})]
        streams = self._streams(begin, dense)
        if not self._gradient:
            self._end_network(masters)
            return
        steps = NetworkSteps(
            begin, dense, masters, residency, streams.fit, streams.judges, self.sweep.ranks, work.request.seed
        )
        if key in work.checkpoint:
            for stage, one in enumerate(masters):
                one.replace(work.checkpoint.get(f"{key}, block {stage}")[0])
        else:
            before, saved = steps.loss(), StepCheckpoint(work.checkpoint, f"{key} so far")
            rate = self._network_rate(steps, before)
            progress = partial(work.callbacks.on_measure, "steps of the whole network")
            if not loss_after(lambda: steps.run(self.fit.network_steps, rate, saved, progress), steps.loss) < before:
                steps.undo()
                work.note(f"The steps of the whole network are left out: they raise the held-out loss {before:.3g}.")
            for stage, one in enumerate(masters):
                work.checkpoint.put(f"{key}, block {stage}", one.values, {})
            work.checkpoint.put(key, {}, {})  # last: all blocks are stored now
            saved.remove(len(masters))
        self._end_network(masters)

    def _end_network(self, masters: list[Masters]) -> None:
        """Write the parameters of all blocks into the model, and leave the blocks."""
        for stage, one in enumerate(masters):
            self.sweep.residency.enter(stage)
            one.copy_to_model()
            one.keep()
            self.sweep.residency.leave(stage)

    def _network_rate(self, steps: NetworkSteps, before: float) -> float:
        """The learning rate of the steps of the whole network, given or chosen by trials."""
        if self.fit.network_lr != "auto":
            return self.fit.network_lr
        key, work = f"round {self.projection.index} rate of the network", self.work
        trials = RateTrials(
            "rate of the whole network",
            NETWORK_RATES,
            network_trial_steps(self.fit),
            _LOWER_NETWORK_RATES,
            ENOUGH_OF_NETWORK,
        )
        found = work.checkpoint.remembered(
            key, lambda: trials.choose(steps, before, work.checkpoint, key, work.callbacks.on_measure)
        )
        work.note(f"Learning rate of the whole network: {found['rate']:g} ({found['text']}).")
        return float(found["rate"])

    def _vectors_outside(self) -> list[str]:
        """The names of the vectors outside the blocks, such as the scale of the last norm."""
        everywhere = tuple(f"{block.path}." for block in self.sweep.chain)
        return [
            name
            for name, value in self.work.store.model.named_parameters()
            if value.ndim == 1 and value.is_floating_point() and not name.startswith(everywhere)
            if name not in self.work.frozen
        ]

    # ---- projections of one block
    def _grown(self, ahead: Stream, stage: int) -> dict[Layer, list[Pattern]]:
        """The patterns of the layers of a block, in the order of its projections."""
        layers, patterns = ahead.layers_of(stage, self.sweep.layers), self.projection.patterns
        return {layer: growing(patterns[layer], layer, self.fit.masks) for layer in layers}

    def _prune_block(self, ahead: Stream, dense: Stream, stage: int, place: int) -> list[Tensor]:
        """Project the layers of a block at growing sparsity, with steps on the block alone in between.

        Of a finished block the last projection is read from the checkpoint.

        Returns:
            The outputs of the dense block by batch, stored in the place with the number `place`.
        """
        finished = self.stored.finished(stage)
        if finished is not None:
            self._read_block(finished)
            return self._outputs(dense, stage, place)
        wanted: list[Tensor] = []
        recipe, patterns = self.projection.recipe, self.projection.patterns
        grown = self._grown(ahead, stage)
        levels = max(map(len, grown.values()))
        alone = replace(self.sweep, reference=None, moments=replace(self.sweep.moments, drift=False))
        for level in range(levels):
            drifted = level == 0 and recipe.target != "layer"
            sweep = self.sweep if drifted else alone
            own = {layer: found[max(0, len(found) - levels + level)] for layer, found in grown.items()}
            given = recipe if level == 0 else recipe.but(target="layer")
            projection = self.projection
            if level < levels - 1:
                projection = replace(projection, callback=Callback(), level=level)
            projection.patterns, projection.recipe = {**patterns, **own}, given
            sweep.without_input = dict.fromkeys(grown, False) if level else self.sweep.without_input
            streams = [ahead, dense] if drifted else [ahead]
            with sweep.taking_shortcuts(streams):
                self._project(sweep, streams, stage, projection)
                if level == 0:
                    self.sweep.without_input = sweep.without_input
                    wanted = self._outputs(dense, stage, place)  # the dense stream may take its shortcuts
            if level < levels - 1:
                window = Window(self._streams(ahead, dense), range(stage, stage + 1), wanted, final=False)
                self._fit(window, self.fit.between, stage, level)
        self.projection.recipe, self.projection.patterns = recipe, patterns
        return wanted

    def _read_block(self, finished: JsonObject) -> None:
        """Take the last projection of a finished block from the checkpoint; its fitted weights come with its window."""
        layers = {layer.name: layer for layer in self.sweep.layers}
        for name in finished["layers"]:
            self.projection.read(layers[name])
        self.sweep.without_input = {layers[name]: used for name, used in finished["without_input"].items()}

    def _finish(self, ahead: Stream, stage: int) -> None:
        """Note that a block and its window are in the checkpoint."""
        grown = self._grown(ahead, stage)
        own = {layer.name for layer in grown}
        names = [entry.name for entry in self.projection.record.layers if entry.name in own]
        self.stored.finish(stage, names, self.sweep.without_input, grown, max(map(len, grown.values())))

    def _project(self, sweep: Sweep, streams: list[Stream], stage: int, projection: Projection) -> None:
        """Prune the groups of one stage."""
        for group in sweep.groups_of(streams, stage):
            projection.project(group)
            self.work.memory.look()

    # ---- streams
    def _streams(self, pruned: Stream, dense: Stream) -> Streams:
        """The streams of a fit, with the positions of calibration and judging batches."""
        count = len(self.sweep.ranks.share(self.sweep.calibration).batches)
        heldout = [*range(count, len(pruned.data))]
        judged = bool(self.sweep.heldout.batches)  # on all ranks alike: a rank may have no held-out batch of its own
        return Streams(pruned, dense, [*range(count)], heldout if judged else [*range(count)])

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

    # ---- fits
    def _fit(self, window: Window, steps: int, stage: int, level: int | None = None) -> None:
        """Fit a window, or read the result from the checkpoint; undo a fit that raises the held-out loss.

        Args:
            window: the blocks.
            steps: number of steps.
            stage: the block that the window ends with.
            level: of the projection before the fit; None: the last one, after which the rate decays.
        """
        work, stored, decay = self.work, self.stored, level is None
        fit, name = self._new(window), stored.name(stage, level)
        if not steps or not fit.masters.values or not self._has_gradient(fit, name):
            return
        if stored.holds(stage, level):
            fit.masters.restore(stored.get(stage, level))
        else:
            rate, before = self._rate(window, fit), fit.loss()
            after = loss_after(lambda: fit.run(steps, rate, decay), fit.loss)
            if not after < before:
                fit.undo()
                after = loss_after(lambda: fit.run(steps, rate / _RETREAT, decay), fit.loss)
            if not after < before:
                fit.undo()
                work.note(f"Gradient steps of the {name} are left out: they raise the held-out loss of {before:.3g}.")
            stored.put(stage, level, fit.masters.snapshot())
        fit.masters.keep()

    def _has_gradient(self, fit: Fit, name: str) -> bool:
        """Check that a fit has a gradient; its window is projected only if it has none, with a note."""
        found = fit.has_gradient()
        if not found:
            self._gradient = False
            self.work.note(f"Gradient steps of the {name} are left out: the model computes without gradients.")
        return found

    def _new(self, window: Window) -> Fit:
        """A fit of the current parameters of a window; the last window also fits norms behind the blocks."""
        outside = self._vectors_outside() if window.kl else []
        seed = self.work.request.seed + window.stages.stop
        return Fit(window, self._masters(window.stages, outside, window.final, True), self.sweep.ranks, seed)

    def _masters(self, stages: range, outside: Sequence[str] = (), final: bool = True, shared: bool = False) -> Masters:
        """The masters of some blocks and of vectors outside them; with final patterns values stay on their grids.

        Args:
            stages: of the blocks.
            outside: names of the vectors.
            final: the layers have their final patterns.
            shared: float32 parameters are their own masters.
        """
        work, model = self.work, self.work.store.model
        blocks = [self.sweep.chain[stage] for stage in stages]
        names, masks = fitted_names(model, work.selection.layers, blocks, work.frozen)
        rounding = None
        if final:
            own = {layer: self.projection.patterns[layer] for layer in work.selection.layers if layer.key in masks}
            free_zeros(masks, own)
            rounding = rounding_of(model, own)
        return Masters.of(work.store, [*names, *outside], masks, rounding, shared)

    def _rate(self, window: Window, fit: Fit) -> float:
        """The learning rate, chosen by trials on the first window, and again on the first with values on a grid."""
        patterns = self.projection.patterns.values()
        on_grids = window.final and any(grid_of(pattern) is not None for pattern in patterns)
        if on_grids not in self.rates:
            values = " on grids" if on_grids else ""
            key, work = f"round {self.projection.index} rate of blocks{values}", self.work
            trials = RateTrials("rate of block reconstruction", RATES, trial_steps(self.fit), _LOWER_RATES)
            found = work.checkpoint.remembered(
                key, lambda: trials.choose(fit, fit.loss(), work.checkpoint, key, work.callbacks.on_measure)
            )
            self.rates[on_grids] = float(found["rate"])
            self.work.note(f"Learning rate of block reconstruction{values}: {found['rate']:g} ({found['text']}).")
        return self.rates[on_grids]
