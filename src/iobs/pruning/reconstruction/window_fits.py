"""Fits of the windows of one walk: a rate, gradient steps, an undo, and an entry in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from iobs.core.grids import grid_of
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.recipe import BlockFit
from iobs.pruning.reconstruction.fitting import Fit, Window
from iobs.pruning.reconstruction.parameters import FittedParameters
from iobs.pruning.reconstruction.rates import block_trials, loss_after
from iobs.pruning.reconstruction.stored_fits import StoredFits
from iobs.pruning.workspace import Workspace

_RETREAT = 4.0  # a fit that raises the held-out loss is repeated with a rate this much smaller


@dataclass
class WindowFits:
    """Fits of windows, with one learning rate for all that is chosen on the first of them.

    Args:
        work: state of the run.
        sweep: the walk's sweep.
        parameters: gives the fitted parameters of blocks.
        settings: of the fits.
        stored: fits in the checkpoint.

    Attributes:
        gradient: False after a fit without a gradient.
        rates: learning rates of fits, with values on a grid (True) and without (False), once they are chosen.
    """

    work: Workspace
    sweep: Sweep
    parameters: FittedParameters
    settings: BlockFit
    stored: StoredFits
    gradient: bool = field(default=True, init=False)
    rates: dict[bool, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.settings.lr != "auto":
            self.rates = dict.fromkeys((False, True), self.settings.lr)

    def fit(self, window: Window, steps: int, stage: int, level: int | None = None) -> None:
        """Fit a window, or read the result from the checkpoint; undo a fit that raises the held-out loss.

        Args:
            window: the blocks.
            steps: number of steps; 0 stores the window as it is, if a resumed run needs it.
            stage: the block that the window ends with.
            level: of the projection before the fit; None: the last one, after which the rate decays.
        """
        stored, decay = self.stored, level is None
        fit, name = self._new(window), stored.name(stage, level)
        if not (steps or self._keeps(level)) or not fit.masters.values or not self._has_gradient(fit, name):
            return
        if stored.holds(stage, level):
            if steps:
                self._rate(window, fit)  # known, and noted
            parameters, values = stored.get(stage, level)
            fit.masters.restore(parameters)
            self.work.note_again(values)
        elif not steps:
            stored.put(stage, level, fit.masters.snapshot())
        else:
            left = []
            rate, before = self._rate(window, fit), fit.loss()
            after = loss_after(lambda: fit.run(steps, rate, decay), fit.loss)
            if not after < before:
                fit.undo()
                after = loss_after(lambda: fit.run(steps, rate / _RETREAT, decay), fit.loss)
            if not after < before:
                fit.undo()
                left = [f"Gradient steps of the {name} are left out: they raise the held-out loss of {before:.3g}."]
                self.work.note(left[0])
            stored.put(stage, level, fit.masters.snapshot(), left)
        fit.masters.keep()

    def _keeps(self, level: int | None) -> bool:
        """Check that a window without steps is stored all the same: fits between projections have changed vectors."""
        return level is None and self.settings.fits_levels

    def _new(self, window: Window) -> Fit:
        """A fit of the current parameters of a window; the last window also fits norms behind the blocks."""
        masters = self.parameters.of(window.stages, outside=window.kl, final=window.final, shared=True)
        return Fit(window, masters, self.sweep.ranks, self.work.request.seed + window.stages.stop)

    def _has_gradient(self, fit: Fit, name: str) -> bool:
        """Check that a fit has a gradient; its window is projected only if it has none, with a note."""
        found = fit.has_gradient()
        if not found:
            self.gradient = False
            self.work.note(f"Gradient steps of the {name} are left out: the model computes without gradients.")
        return found

    def _rate(self, window: Window, fit: Fit) -> float:
        """The learning rate, chosen by trials on the first window, and again on the first with values on a grid."""
        patterns = self.parameters.patterns.values()
        on_grids = window.final and any(grid_of(pattern) is not None for pattern in patterns)
        if on_grids not in self.rates:
            values = " on grids" if on_grids else ""
            key, work = f"round {self.stored.index} rate of blocks{values}", self.work
            trials = block_trials(self.settings)
            found = work.checkpoint.remembered(
                key, lambda: trials.choose(fit, fit.loss(), work.checkpoint, key, work.callbacks.on_measure)
            )
            self.rates[on_grids] = float(found["rate"])
            text = f"Learning rate of block reconstruction{values}: {found['rate']:g} ({found['text']})."
            if text not in work.callbacks.notes:  # as after a finished block of a resumed run
                work.note(text)
        return self.rates[on_grids]
