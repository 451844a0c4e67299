"""The state of one run: model, samples, losses, checkpoint and decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from iobs.core.patterns import Pattern, Rate
from iobs.errors import ProblemError, first_line
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.gram import Gram, plain_gram
from iobs.pruning.calibration.row_fisher import RowFisher, row_fisher
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.descent import Descent, RateSchedule, StepCheckpoint
from iobs.pruning.descent.augment import copies_to_sample, require_sampling, with_sampled_text
from iobs.pruning.descent.batches import drawn_batches, samples_of_step
from iobs.pruning.descent.gradients import LossGradient, Masters, ModelLoss
from iobs.pruning.descent.scoring import Scoring, frozen_copy
from iobs.pruning.layerwise.patterns import free_zeros, rounding_of, rows_compete
from iobs.pruning.layerwise.problem import couples
from iobs.pruning.network.layers import Layer, biases_of, embeddings_of, holds_weights
from iobs.pruning.network.selection import Selection
from iobs.pruning.recipe import BlockFit, FineTune, Recipe, Rounds
from iobs.pruning.recipe.text import describe_part, plain
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.checkpoint import Checkpoint, fingerprint, identity_of, open_checkpoint
from iobs.pruning.runtime.memory import MemoryWatch
from iobs.pruning.runtime.ranks import Ranks, current
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Batch, Samples, divide, split
from iobs.pruning.store import Store
from iobs.pruning.structure.units import SitesOfLayers
from iobs.solvers.row_metric import RowMetric

_SAMPLED, _FISHER = "sampled text", "Fisher information of rows"  # keys in the checkpoint


def _key_of_moment(layer: Layer) -> str:
    """Key in the checkpoint of the second moment of a layer's rows."""
    return f"moment of rows {layer.name}"


@dataclass(frozen=True)
class Request:
    """Checked arguments of `iobs.prune` that say how to prune.

    Args:
        recipe: how to prune.
        patterns: the pattern of every layer before the allocation: the pattern of its rule, or `pattern`.
        pattern: the pattern of all layers without a rule.
        holdout: share of the samples that is held out.
        seed: seed of every random choice.
        checkpoint: directory of the checkpoint, or None.
        sites: the units that layers read, if whole units are removed.
        tied: names of sites that keep equal numbers of units.
        offered: numbers of units, by name of the site, for sites that cannot keep every number.
        require_counts: raises if the model's class cannot have some numbers of units, by name of the site.
        added: paths of the readers that have a bias for the run only, of zeros before the first projection.
        within: seconds that the run may take, or None.
        in_file: the layers that share the rate of a budget of bytes, those that turn out to receive no input too; empty
            without a budget.
    """

    recipe: Recipe
    patterns: Mapping[Layer, Pattern]
    pattern: Pattern
    holdout: float
    seed: int
    checkpoint: str | Path | None
    sites: SitesOfLayers = field(default_factory=SitesOfLayers)
    tied: tuple[tuple[str, ...], ...] = ()
    offered: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    require_counts: Callable[[Mapping[str, int]], None] | None = None
    added: tuple[str, ...] = ()
    within: float | None = None
    in_file: tuple[Layer, ...] = ()

    @property
    def sharing(self) -> tuple[Layer, ...]:
        """The layers that have the pattern of the run, none of their own by a rule."""
        return tuple(layer for layer, pattern in self.patterns.items() if pattern is self.pattern)

    def facts(self) -> JsonObject:
        """The request in plain types, for the report."""
        recipe = describe_part(self.recipe)
        facts = {"pattern": str(self.pattern), "holdout": self.holdout, "seed": self.seed, "recipe": recipe}
        return facts if self.within is None else {**facts, "within": self.within}

    def identity(self) -> JsonObject:
        """The request as part of a checkpoint's identity: one entry per setting, so that errors name it."""
        pattern = plain(self.pattern, False, fingerprint)  # the text of a pattern would be rounded
        facts = {"pattern": pattern, "holdout": self.holdout, "seed": self.seed}
        # A resumed run keeps its form of the recipe, whatever time is given then.
        facts |= {} if self.within is None else {"time for the run": "limited"}
        return {**describe_part(self.recipe, fingerprint), **facts}


@dataclass(frozen=True)
class Decisions:
    """Rounds and fine-tuning as the run decides them; at first as in the recipe.

    `pruning.decisions` makes the decisions. The sparsity of each layer is not here: `allocate` returns it.

    Attributes:
        rounds: number, schedule and fine-tuning of the rounds.
        finetune: gradient steps after the last round, or None.
        tuned: True if the recipe leaves the learning rate of `finetune` to trials.
        blocks: block reconstruction of the first round, or None.
        widths: number of units that are kept, by name of the site, after an allocation of widths.
    """

    rounds: Rounds
    finetune: FineTune | None
    tuned: bool = False
    blocks: BlockFit | None = None
    widths: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe) -> Decisions:
        """The decisions of a recipe, before any is made."""
        tuned = recipe.finetune is not None and recipe.finetune.lr == "auto"
        return cls(recipe.rounds, recipe.finetune, tuned, recipe.blocks)

    def describe_part(self) -> JsonObject:
        """The decisions in plain types, for the report."""
        steps = {"finetune": self.finetune and describe_part(self.finetune)}
        blocks = {} if self.blocks is None else {"blocks": describe_part(self.blocks)}
        return {"rounds": describe_part(self.rounds), **steps, **blocks}


@dataclass
class Workspace:
    """The state that all rounds of a run share.

    Attributes:
        store: the model's weights.
        request: what was asked.
        selection: the layers to prune. The first round removes layers without input.
        batches: all samples that were given.
        callbacks: callbacks of the run; they also store the notes.
        frozen: names of the parameters that the user froze.
        opened: the checkpoint, if it is open already.
        fit: calibration samples.
        heldout: held-out samples.
        checkpoint: the checkpoint, or the null checkpoint.
        scoring: losses of the model; None if the model cannot be run as a whole.
        decided: rounds and fine-tuning as decided so far.
        memory: watch of the peak memory.
    """

    store: Store
    request: Request
    selection: Selection
    batches: InitVar[list[Batch]]
    callbacks: Callbacks
    frozen: frozenset[str]
    opened: Checkpoint | None = None
    fit: Samples = field(init=False)
    heldout: Samples = field(init=False)
    checkpoint: Checkpoint = field(init=False)
    scoring: Scoring | None = field(init=False)
    decided: Decisions = field(init=False)
    memory: MemoryWatch = field(init=False)
    _chain: list[Block] | None = field(default=None, init=False)

    def __post_init__(self, batches: list[Batch]) -> None:
        recipe = self.recipe
        self.fit, self.heldout = split(Samples.of(batches), self.request.holdout, self.request.seed)
        self.memory = MemoryWatch(self.store.device)
        self.decided = Decisions.of(recipe)
        changed = {*(layer.key for layer in self.selection.layers), *self.biases().values()}
        self.store.remember(None if recipe.changes_all else changed)
        copies = self._copies_to_sample()
        if copies:
            # Of the given samples: the bits of the model, and so the sampled text, may differ on another machine.
            self.checkpoint = self._open()

            def windows(sample: Callable[[], Tensor]) -> Tensor:
                """The sampled windows of an interrupted run, or new ones."""
                return self.checkpoint.tensors(_SAMPLED, lambda: {"windows": sample()})["windows"]

            self.fit = with_sampled_text(self.store.model, self.fit, copies, self.request.seed, windows)
        self.scoring = None
        if self.store.whole and recipe.compares:
            model, reference = self.store.model, self.store.dense_model
            if recipe.needs_dense_model and reference is None:
                reference = frozen_copy(model, self.fit)
            self.scoring = Scoring(
                model,
                self.fit,
                self.heldout,
                (recipe.rounds.finetune, recipe.finetune),
                self.request.seed,
                lambda: self.chain,
                self.callbacks.on_note,
                reference if recipe.needs_dense_model else None,
            )
        for index in range(recipe.rounds.count):
            self.ranks.require_enough(self.portion(index))
        if not copies:
            self.checkpoint = self._open()

    def _copies_to_sample(self) -> int:
        """Windows to sample from the dense model for every calibration window, with a note."""
        model, blocks = self.store.model, self.recipe.blocks
        copies = 0 if blocks is None else blocks.sampled
        if copies == "auto":
            copies = copies_to_sample(model, self.fit) if self.store.whole else 0
        elif copies:
            require_sampling(model, self.fit)
        if copies:
            self.callbacks.on_note(f"Calibration: {copies} windows sampled from the dense model for every given one.")
        return copies

    @property
    def recipe(self) -> Recipe:
        """The recipe of the request."""
        return self.request.recipe

    def recipe_of_round(self, index: int) -> Recipe:
        """The recipe of a round, with the blocks as decided."""
        recipe = self.recipe
        if index > 0:
            return recipe.of_later_rounds
        return recipe if recipe.blocks is None else recipe.but(blocks=self.decided.blocks)

    @property
    def ranks(self) -> Ranks:
        """The processes of this run."""
        return current()

    def biases(self, index: int = 0) -> dict[Layer, str]:
        """The biases that the projection of a round refits: parameter names by layer, without those the user froze."""
        if not self.recipe_of_round(index).refits_biases:
            return {}
        biases = biases_of(self.store.model, self.selection.layers)
        return {layer: name for layer, name in biases.items() if name not in self.frozen}

    @property
    def chain(self) -> list[Block]:
        """The blocks along which the model can be run; found at the first use, while the model is dense."""
        if self._chain is None:
            self._chain = self.store.chain([*self.fit.batches, *self.heldout.batches], self.selection.layers)
        return self._chain

    @cached_property
    def fisher(self) -> RowFisher:
        """Prices of the errors of rows; measured at the first use, while the model is dense, or from the checkpoint.

        Empty with a note if the outputs of the model have no gradient.

        Raises:
            ProblemError: they have none, and the recipe's allocation asks for prices by name.
        """
        if _FISHER in self.checkpoint:
            fisher = RowFisher.of(self.checkpoint.get(_FISHER)[0], self.selection.layers)
            layers = [layer for layer in self.selection.layers if _key_of_moment(layer) in self.checkpoint]
            return replace(
                fisher, moments={layer: self.checkpoint.get(_key_of_moment(layer))[0]["moment"] for layer in layers}
            )
        fisher = self._measured_fisher()
        self.callbacks.on_measure("prices of rows", 1, 1)
        for layer, moment in fisher.moments.items():  # an entry each: one is in memory while it is written
            self.checkpoint.put(_key_of_moment(layer), {"moment": moment}, {})
        self.checkpoint.put(_FISHER, fisher.tensors(), {})
        return fisher

    def _measured_fisher(self) -> RowFisher:
        try:
            return row_fisher(
                self.store.model,
                self.selection.layers,
                self.chain,
                self.fit,
                seed=self.request.seed,
                tables=self.tables,
                coupled=[layer for layer in self.selection.layers if self._couples_rows(layer)],
                ranks=self.ranks,
                residency=self.store,
            )
        except ProblemError as error:
            if self.recipe.division.criterion in ("fisher", "search"):
                raise
            self.note(f"All layers and rows count equally: {first_line(error)}")
            return RowFisher()

    @cached_property
    def tables(self) -> tuple[Layer, ...]:
        """The layers that are coded as tables of embeddings, in the order of the model's modules."""
        tables = dict.fromkeys(embeddings_of(self.store.model, self.selection.layers).values())
        return tuple(layer for layer in tables if isinstance(self.request.patterns[layer], Rate))

    @property
    def table_metrics(self) -> dict[Layer, Gram]:
        """The metrics of the rows of tables of embeddings; the plain one where prices are not known."""
        lookups, device = self.fisher.lookups if self.tables else {}, self.store.device
        return {
            layer: lookups[layer].gram(device) if layer in lookups else plain_gram(1, layer.shape[1], device)
            for layer in self.tables
        }

    @property
    def _weighs_rows(self) -> bool:
        """True if errors of rows count by their Fisher information."""
        return self.recipe.weighs_rows_of(data_batches.positions(self.fit.batches[0]))

    def _couples_rows(self, layer: Layer) -> bool:
        """True if the rows of a layer are solved together."""
        pattern = self.request.patterns[layer]
        return self._weighs_rows and couples(layer, self.recipe.for_layer(layer.name), pattern)

    def metric_of(self, layer: Layer) -> RowMetric | None:
        """The metric of the errors of a layer's rows; None if it decides nothing."""
        weighs = self._weighs_rows and rows_compete(self.request.patterns[layer])
        weighs = weighs or layer in self.tables  # frequencies of tokens
        metric = self.fisher.metric(layer) if weighs or self._couples_rows(layer) else None
        if metric is None or self.fisher.by_position or not isinstance(self.request.patterns[layer], Rate):
            return metric
        # Errors of integers go where few samples, whose positions share one output, saw no gradient: MiniLM as a model
        # of one embedding for a text loses 9 percent by it, and as one of a state for each token gains 14 (LOG.md).
        return metric.uncoupled()

    @property
    def metrics(self) -> dict[Layer, RowMetric]:
        """Metrics of the rows' errors, by layer; empty if all rows count equally."""
        metrics = {layer: self.metric_of(layer) for layer in self.selection.layers}
        return {layer: metric for layer, metric in metrics.items() if metric is not None}

    @property
    def reenters(self) -> bool:
        """True if one process may begin a sweep again after its blocks were left."""
        return self.store.in_memory and self.ranks.size == 1

    def run_whole(self) -> None:
        """Run the model as a whole, not along its blocks."""
        self._chain = []

    def note(self, text: str) -> None:
        """Add a note to the report, and send it to the callbacks."""
        self.callbacks.on_note(text)

    def remembered(self, key: str, compute: Callable[[], JsonObject]) -> JsonObject:
        """The JSON values of an entry of the checkpoint; a resumed run gets the notes of their computation again."""
        resumed, before = key in self.checkpoint, len(self.callbacks.notes)
        values = self.checkpoint.remembered(key, lambda: {**compute(), "notes": self.callbacks.notes[before:]})
        if resumed:
            self.note_again(values)
        return values

    def note_again(self, values: JsonObject) -> None:
        """Add the notes that an entry of the checkpoint holds."""
        for text in values.get("notes", []):
            self.note(text)

    def note_memory(self) -> None:
        """Add a note on the peak memory of a GPU that blocks visit: the peak of main memory may be higher."""
        peak = self.memory.on_device
        if not self.store.whole and peak is not None:
            self.note(f"Peak memory of {self.store.device}: {peak / 1e9:.2f} GB.")

    def portion(self, index: int) -> Samples:
        """The calibration samples of a round."""
        rounds = self.recipe.rounds
        if rounds.data == "fixed" or self.decided.rounds.count == 1:
            return self.fit
        # With "auto" the first projection may be the only one, so it uses all samples.
        whole = 1 if rounds.schedule == "auto" else 0
        if index < whole:
            return self.fit
        return divide(self.fit, rounds.count - whole, self.request.seed)[index - whole]

    # ---- gradient steps
    def masks(
        self, patterns: Mapping[Layer, Pattern], support: Literal["dense", "fixed"] = "fixed"
    ) -> dict[str, Tensor]:
        """Masks of the entries that gradient steps may change, by parameter. Without a mask all entries may change.

        Args:
            patterns: of every layer.
            support: "fixed": only current nonzeros change, and all entries of dense grids. "dense": all entries change,
                except zeros that `keep_zeros` keeps.
        """
        masks = self.store.support() if self.recipe.keep_zeros else {}
        if support == "fixed":
            model = self.store.model
            masks |= {layer.key: model.get_parameter(layer.key) != 0 for layer in self.selection.layers}
            free_zeros(masks, {layer: patterns[layer] for layer in self.selection.layers})
        return masks

    def descent(self, step: FineTune, samples: Samples, patterns: Mapping[Layer, Pattern] | None = None) -> Descent:
        """Gradient steps on the model's current weights.

        Args:
            step: settings; neither optimizer nor rate is "auto".
            samples: of the steps.
            patterns: of every layer: the steps keep the zeros and the grids of the current weights. None: they keep
                none; set the masks of the masters before a run.
        """
        assert self.scoring is not None
        prunable = {layer.key for layer in self.selection.layers}
        names = [
            name
            for name, value in self.store.model.named_parameters()
            if name in prunable or (step.parameters == "all" and holds_weights(value) and name not in self.frozen)
        ]
        masters = Masters.of(self.store, names, {}, zero_outside=True)
        if patterns is not None:
            masters.masks = self.masks(patterns)
            of_layers = {layer: patterns[layer] for layer in self.selection.layers}
            masters.rounding = rounding_of(self.store.model, of_layers, self.store.stored_dtype)
        gradient = LossGradient(self._loss(step), masters, self.ranks)
        return Descent(gradient, step.optimizer, self.order(step, samples), self.scoring.comparison_loss, self.ranks)

    def descend(self, descent: Descent, step: FineTune, *, total: int, index: int, key: str) -> list[float]:
        """Take the steps of fine-tuning after round `index`, or continue them from the checkpoint.

        Args:
            descent: of the model.
            step: settings.
            total: number of steps of all runs of this descent, for the decay of the learning rate.
            index: of the round.
            key: of the steps in the checkpoint.

        Returns:
            The loss before each step, including the steps from the checkpoint.
        """
        assert step.lr != "auto"

        def on_step(done: int, steps: int, loss: float) -> None:
            self.callbacks.on_step(index, done, steps, loss)
            self.memory.look()

        schedule: RateSchedule = "linear" if step.decay else "constant"
        saved = StepCheckpoint(self.checkpoint, key)
        return descent.run(step.steps, step.lr, schedule, total=total, saved=saved, on_step=on_step)

    def require_gradient(self, step: FineTune) -> None:
        """Check, before any work, that the loss of gradient steps has a gradient on the samples of one step.

        Raises:
            CalibrationError: the loss asks for labels that the data do not have.
            ProblemError: the loss has no gradient.
        """
        sample = self.fit.first(samples_of_step(step, self.fit)).batches[0]
        with torch.enable_grad():
            self._loss(step).loss(data_batches.to_device(sample, self.store.device))

    def _loss(self, step: FineTune) -> ModelLoss:
        """The loss of gradient steps."""
        assert self.scoring is not None
        return ModelLoss(self.store.model, self.scoring.loss_of(step)[1])

    def order(self, step: FineTune, samples: Samples) -> Callable[[int], Iterator[list[Batch]]]:
        """Number of steps before -> the batches of all further steps."""
        assert self.scoring is not None
        augmentation, seed = self.scoring.augmentation(step), self.request.seed
        return lambda taken: drawn_batches(step, samples, augmentation, self.store.device, seed + taken)

    def facts(self) -> JsonObject:
        """The request and the decisions in plain types, for the report."""
        arithmetic = {} if self.store.arithmetic is None else {"arithmetic": str(self.store.arithmetic)}
        decided = {"samples": self.fit.samples, "decided": self.decided.describe_part()}
        return {**self.request.facts(), **arithmetic, **decided}

    def _open(self) -> Checkpoint:
        return self.opened or checkpoint_of(
            self.store, self.request, self.selection, self.fit, self.heldout, self.frozen
        )


def checkpoint_of(
    store: Store, request: Request, selection: Selection, fit: Samples, heldout: Samples, frozen: frozenset[str]
) -> Checkpoint:
    """Open the checkpoint of a run: it is valid only for the same weights, data and settings.

    Args:
        store: of the dense model.
        request: what was asked.
        selection: the layers to prune.
        fit: calibration samples.
        heldout: held-out samples.
        frozen: names of the parameters that the user froze.

    Raises:
        CheckpointError: as `open_checkpoint`.
    """

    def identity() -> JsonObject:
        layers = [layer.name for layer in selection.layers]
        settings = {**request.identity(), "layers": layers, "arithmetic": str(store.arithmetic)}
        settings |= {"device": store.device.type, "ranks": current().size}
        settings |= {"frozen parameters": sorted(frozen)} if frozen else {}
        return identity_of(settings, store.state(), fit.batches, heldout.batches)

    return open_checkpoint(request.checkpoint, identity)
