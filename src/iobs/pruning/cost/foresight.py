"""Foresight of a run: the forecasts of a recipe and of its shorter forms, from prices that are measured once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from iobs.pruning.calibration.blocks import Block
from iobs.pruning.cost.affordable import fitting, form_of, with_affordable_epochs, with_affordable_steps
from iobs.pruning.cost.memory import peaks_in_memory, present_bytes
from iobs.pruning.cost.prices import measure
from iobs.pruning.cost.work import Prices, Work, forecast
from iobs.pruning.decisions import one_kind_of_steps
from iobs.pruning.descent.augment import copies_to_sample, windows_of_steps
from iobs.pruning.forecast import Forecast
from iobs.pruning.network.modes import evaluating, seeded
from iobs.pruning.recipe import Recipe
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Batch, Samples, positions, split
from iobs.pruning.store import Store
from iobs.pruning.workspace import Decisions, Request


@dataclass(frozen=True)
class Foresight:
    """Foretells runs of recipes with one solver, on this machine.

    Decisions of a run that rest on its results are as `iobs.prune` expects them: no rounds are added.

    Attributes:
        store: of the dense model, prepared and in eval mode.
        request: its solver and rules are timed.
        data: the given calibration samples.
        fit: those that are not held out.
        chain: blocks along which the model can be run, possibly none.
        workload: sizes of the run with the given samples.
        prices: of this machine.
    """

    store: Store
    request: Request
    data: Sequence[Batch]
    fit: Samples
    chain: list[Block]
    workload: Work
    prices: Prices

    @classmethod
    def of(cls, store: Store, request: Request, data: Sequence[Batch]) -> Foresight:
        """Measure the prices of a run; the model is unchanged. Arguments as the attributes."""
        with torch.no_grad(), seeded(store.model, request.seed):
            chain = store.chain(data, tuple(request.patterns))
            fit, heldout = split(Samples.of([*data]), request.holdout, request.seed)
            every = Samples.of(fit.batches + heldout.batches)
            workload, prices = measure(store, request, chain, every, heldout.samples / every.samples, fit)
        return cls(store, request, data, fit, chain, workload, prices)

    def forecast(self, recipe: Recipe, grown: bool = False) -> Forecast:
        """The work of a run and its time.

        Args:
            recipe: how to prune.
            grown: the run adds all rounds that the recipe leaves to it.
        """
        layers = tuple(self.request.patterns)
        with torch.no_grad(), seeded(self.store.model, self.request.seed):
            recipe = with_affordable_epochs(recipe, layers, self.data, self.store.device)
            text = positions(self.data[0]) > 1
            decided = one_kind_of_steps(
                Decisions.of(recipe),
                bool(self.chain),
                text or not self.store.whole,
            )
            if grown and decided.rounds.schedule == "auto":
                decided = replace(decided, rounds=replace(decided.rounds, schedule="cubic"))
            copies = windows = 0
            if self.store.whole:
                model, steps = self.store.model, (recipe.rounds.finetune, recipe.finetune)
                if decided.finetune is not None or decided.rounds.finetune is not None:
                    windows = windows_of_steps(model, self.fit, steps) if recipe.needs_dense_model else 0
                    decided = with_affordable_steps(decided, model, layers, self.fit, windows > 0)
                sampled = decided.blocks.sampled if decided.blocks is not None else 0
                copies = copies_to_sample(model, self.fit) if sampled == "auto" else sampled
        more = copies * self.fit.samples
        share = 1 + more / self.workload.samples
        workload = replace(
            self.workload,
            samples=self.workload.samples + more,
            positions=round(self.workload.positions * share),
            held_out=self.workload.held_out / share,
        )
        return forecast(workload, self.prices, recipe, decided, self.request.pattern, more, windows)

    def within(self, seconds: float) -> tuple[int, str]:
        """The number of the recipe's first form (see `forms`) that ends in time, and a note on it; equal on all ranks.

        Raises:
            ProblemError: no form ends in time.
        """
        ranks = current()

        def foretold(form: Recipe) -> float:
            return ranks.total(self.forecast(form, grown=True).seconds) / ranks.size

        return fitting(self.request.recipe, self.request.pattern, seconds, foretold)


@dataclass(frozen=True)
class Foreseen:
    """Time and memory that a run of a model in memory will take.

    Args:
        forecast: its work and time.
        peaks: peak bytes of memory by phase; empty where they are not foretold.
        form: note on the form of the recipe that ends in a given time; empty without one.
    """

    forecast: Forecast
    peaks: dict[str, int]
    form: str = ""


def foresee(store: Store, request: Request, data: Sequence[Batch], within: float | None = None) -> Foreseen:
    """The work of a run of a model in memory, its time and its memory, before it; the model is unchanged.

    Args:
        store: of the model, which is in memory.
        request: how to prune.
        data: calibration samples.
        within: seconds that the run may take, or None.
    """
    present, form = present_bytes(store.device), ""  # before passes of the model, which load code
    with store.prepared(), evaluating(store.model):
        foresight = Foresight.of(store, request, data)
        if within is not None:
            number, form = foresight.within(within)
            request = replace(request, recipe=form_of(request.recipe, request.pattern, number))
        forecast = foresight.forecast(request.recipe, grown=within is not None)
    return Foreseen(forecast, peaks_in_memory(store, request, data, present), form)
