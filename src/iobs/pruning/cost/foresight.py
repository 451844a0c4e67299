"""Foresight of a run: the forecasts of a recipe and of its shorter forms, from prices that are measured once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from iobs.core.patterns import Pattern
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.cost.affordable import fitting, form_of, with_affordable_epochs, with_affordable_steps
from iobs.pruning.cost.memory import peaks_in_memory, present_bytes
from iobs.pruning.cost.prices import measure
from iobs.pruning.cost.work import Prices, Work, forecast
from iobs.pruning.decisions import one_kind_of_steps
from iobs.pruning.descent.sampled_text import copies_to_sample, windows_of_steps
from iobs.pruning.forecast import Forecast
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import evaluating, seeded
from iobs.pruning.recipe import Recipe
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Batch, positions
from iobs.pruning.samples.subsets import Samples, split
from iobs.pruning.store import Store
from iobs.pruning.workspace import Decisions


@dataclass(frozen=True)
class Foresight:
    """Foretells runs of recipes with one solver, on this machine.

    Decisions of a run that rest on its results are as `iobs.prune` expects them: no rounds are added.

    Attributes:
        store: of the dense model, prepared and in eval mode.
        layers: the layers to prune.
        pattern: of the run.
        data: the given calibration samples.
        fit: those that are not held out.
        chain: blocks along which the model can be run, possibly none.
        work: sizes of the run with the given samples.
        prices: of this machine.
        seed: of the run.
    """

    store: Store
    layers: tuple[Layer, ...]
    pattern: Pattern
    data: Sequence[Batch]
    fit: Samples
    chain: list[Block]
    work: Work
    prices: Prices
    seed: int

    @classmethod
    def of(
        cls,
        store: Store,
        recipe: Recipe,
        patterns: Mapping[Layer, Pattern],
        pattern: Pattern,
        data: Sequence[Batch],
        holdout: float,
        seed: int,
    ) -> Foresight:
        """Measure the prices of a recipe; the model is unchanged.

        Args:
            store: of the dense model, prepared and in eval mode.
            recipe: its solver and rules are timed.
            patterns: of the layers to prune.
            pattern: of the run.
            data: calibration samples.
            holdout: share of the samples that is held out.
            seed: of the run.
        """
        layers = tuple(patterns)
        with torch.no_grad(), seeded(store.model, seed):
            chain = store.chain(data, layers)
            fit, heldout = split(Samples.of([*data]), holdout, seed)
            every = Samples.of(fit.batches + heldout.batches)
            share = heldout.samples / every.samples
            work, prices = measure(store, recipe, patterns, pattern, chain, every, share, fit)
        return cls(store, layers, pattern, data, fit, chain, work, prices, seed)

    def forecast(self, recipe: Recipe, grown: bool = False) -> Forecast:
        """The work of a run and its time.

        Args:
            recipe: how to prune.
            grown: the run adds all rounds that the recipe leaves to it.
        """
        with torch.no_grad(), seeded(self.store.model, self.seed):
            recipe = with_affordable_epochs(recipe, self.layers, self.data, self.store.device)
            tuned = recipe.finetune is not None and recipe.finetune.lr == "auto"
            text = positions(self.data[0]) > 1
            decided = one_kind_of_steps(
                Decisions(recipe.rounds, recipe.finetune, tuned, recipe.blocks),
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
                    decided = with_affordable_steps(decided, model, self.layers, self.fit, windows > 0)
                sampled = decided.blocks.sampled if decided.blocks is not None else 0
                copies = copies_to_sample(model, self.fit) if sampled == "auto" else sampled
        more = copies * self.fit.samples
        share = 1 + more / self.work.samples
        work = replace(
            self.work,
            samples=self.work.samples + more,
            positions=round(self.work.positions * share),
            held_out=self.work.held_out / share,
        )
        return forecast(work, self.prices, recipe, decided, self.pattern, more + windows)

    def within(self, recipe: Recipe, seconds: float) -> tuple[int, str]:
        """The number of the first of a recipe's `forms` that ends in time, and a note on it; the same on all ranks.

        Raises:
            ProblemError: no form ends in time.
        """
        ranks = current()

        def foretold(form: Recipe) -> float:
            return ranks.total(self.forecast(form, grown=True).seconds) / ranks.size

        return fitting(recipe, self.pattern, seconds, foretold)


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


def foresee(
    store: Store,
    recipe: Recipe,
    patterns: Mapping[Layer, Pattern],
    pattern: Pattern,
    data: Sequence[Batch],
    *,
    holdout: float,
    seed: int,
    within: float | None = None,
) -> Foreseen:
    """The work of a run of a model in memory, its time and its memory, before it; the model is unchanged.

    Args:
        store: of the model, which is in memory.
        recipe: how to prune.
        patterns: of the layers to prune.
        pattern: of the run.
        data: calibration samples.
        holdout: share of the samples that is held out.
        seed: of the run.
        within: seconds that the run may take, or None.
    """
    present, layers = present_bytes(store.device), tuple(patterns)  # before passes of the model, which load code
    with store.prepared(), evaluating(store.model):
        foresight, form = Foresight.of(store, recipe, patterns, pattern, data, holdout, seed), ""
        if within is not None:
            number, form = foresight.within(recipe, within)
            recipe = form_of(recipe, pattern, number)
        forecast = foresight.forecast(recipe, grown=within is not None)
    return Foreseen(forecast, foresee_peaks(store, recipe, layers, pattern, data, holdout, seed, present), form)


def foresee_peaks(
    store: Store,
    recipe: Recipe,
    layers: Sequence[Layer],
    pattern: Pattern,
    data: Sequence[Batch],
    holdout: float,
    seed: int,
    present: int | None = None,
) -> dict[str, int]:
    """Peak bytes of memory of a run of a model in memory, by phase, from its sizes alone; see `peaks_in_memory`.

    The arguments are those of `foresee`; `present` is what the process takes before the run, by default now.
    """
    recipe = with_affordable_epochs(recipe, layers, data, store.device)
    fit, heldout = split(Samples.of([*data]), holdout, seed)
    present = present_bytes(store.device) if present is None else present
    return peaks_in_memory(store, recipe, fit, heldout, layers, pattern, present)
