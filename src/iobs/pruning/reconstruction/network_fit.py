"""Fit of the whole network after a walk along the blocks: gradient steps on all parameters that the walk has fitted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from iobs.pruning.calibration.replay import Stream
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.recipe import BlockFit
from iobs.pruning.reconstruction.fitting import Streams
from iobs.pruning.reconstruction.network_steps import NetworkSteps, StepCheckpoint
from iobs.pruning.reconstruction.parameters import FittedParameters, Masters
from iobs.pruning.reconstruction.rates import loss_after, network_trials
from iobs.pruning.workspace import Workspace

_PLACE = 4  # of the inputs of the first block among the stored hidden states; a walk uses those before


@dataclass
class NetworkFit:
    """The steps of the whole network, if the settings ask for any; otherwise blocks are left as they are finished.

    Args:
        work: state of the run.
        sweep: the walk's sweep.
        parameters: gives the fitted parameters of blocks.
        fit: settings.
        index: number of the round.

    Attributes:
        begin: the inputs of the first block in the pruned model, once it is reached; None without steps.
        fitted: parameters of finished blocks.
    """

    work: Workspace
    sweep: Sweep
    parameters: FittedParameters
    fit: BlockFit
    index: int
    begin: Stream | None = field(default=None, init=False)
    fitted: list[Masters] = field(default_factory=list, init=False)

    def start(self, base: Stream) -> None:
        """Keep the inputs of the first block, from which the steps of the whole network start."""
        if self.fit.network_steps:
            keep = self.sweep.place(_PLACE)
            self.begin = replace(base, hidden=[keep(index, hidden) for index, hidden in enumerate(base.hidden)])

    def leave(self, stage: int) -> None:
        """Leave a finished block; before steps of the whole network only its fitted parameters are kept."""
        residency = self.sweep.residency
        if not self.fit.network_steps or stage >= len(self.sweep.chain):
            residency.leave(stage)
            return
        self.fitted.append(self.parameters.of(range(stage, stage + 1)).held(residency.hold))
        residency.release(stage)

    def run(self, dense: Stream, gradient: bool) -> None:
        """Take the steps, undo them if they raise the held-out loss, and leave all blocks.

        Args:
            dense: stream of the dense model.
            gradient: the model has a gradient; without one no step is taken.
        """
        if self.begin is None:
            return
        masters = [*self.fitted, self.parameters.outside()]
        if gradient:
            self._fit(self.begin, dense, masters)
        for stage, one in enumerate(masters):
            self.sweep.residency.enter(stage)
            one.copy_to_model()
            one.keep()
            self.sweep.residency.leave(stage)

    def _fit(self, begin: Stream, dense: Stream, masters: list[Masters]) -> None:
        """Take the steps on the masters, or read them from the checkpoint."""
        work, key = self.work, f"round {self.index} steps of the network"
        if key in work.checkpoint:
            work.note_again(work.checkpoint.get(key)[1])
            for stage, one in enumerate(masters):
                one.replace(work.checkpoint.get(f"{key}, block {stage}")[0])
            return
        streams = Streams.of(self.sweep, begin, dense)
        steps = NetworkSteps(
            begin,
            dense,
            masters,
            self.sweep.residency,
            streams.fit,
            streams.judges,
            self.sweep.ranks,
            work.request.seed,
        )
        noted = len(work.callbacks.notes)
        before, saved = steps.loss(), StepCheckpoint(work.checkpoint, f"{key} so far")
        rate = self._rate(steps, before)
        progress = partial(work.callbacks.on_measure, "steps of the whole network")
        if not loss_after(lambda: steps.run(self.fit.network_steps, rate, saved, progress), steps.loss) < before:
            steps.undo()
            work.note(f"The steps of the whole network are left out: they raise the held-out loss {before:.3g}.")
        for stage, one in enumerate(masters):
            work.checkpoint.put(f"{key}, block {stage}", one.values, {})
        work.checkpoint.put(key, {}, {"notes": work.callbacks.notes[noted:]})  # last: all blocks are stored now
        saved.remove(len(masters))

    def _rate(self, steps: NetworkSteps, before: float) -> float:
        """The learning rate, given or chosen by trials."""
        if self.fit.network_lr != "auto":
            return self.fit.network_lr
        key, work, trials = f"round {self.index} rate of the network", self.work, network_trials(self.fit)
        found = work.checkpoint.remembered(
            key, lambda: trials.choose(steps, before, work.checkpoint, key, work.callbacks.on_measure)
        )
        work.note(f"Learning rate of the whole network: {found['rate']:g} ({found['text']}).")
        return float(found["rate"])
