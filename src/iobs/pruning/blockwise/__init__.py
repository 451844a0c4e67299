"""The machine that brings the blocks of a model to a device and away again, one or two at a time.

A `BlockSource` has the weights of the blocks that are not on the device: `MemoryBlocks` a model in main memory,
`StreamedModel` the files of a model directory. Everything else is the same for both.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from iobs.core.memory import available
from iobs.core.outputs import existing
from iobs.errors import ProblemError
from iobs.pruning.blockwise.storage import Place, Storage, choose_place, parse_place
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.cost.affordable import form_of, with_affordable_epochs
from iobs.pruning.cost.foresight import Foresight
from iobs.pruning.cost.memory import (
    GramSizes,
    Plan,
    Sizes,
    checkpoint_bytes,
    moment_bytes,
    peaks,
    present_bytes,
    streams_bytes,
    token_count,
)
from iobs.pruning.cost.work import stated_sizes
from iobs.pruning.descent.batches import in_steps
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import state
from iobs.pruning.recipe import Recipe
from iobs.pruning.runtime.memory import free_on, reachable
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Batch, Samples, size
from iobs.pruning.store import Store
from iobs.pruning.workspace import Request


class BlockSource(Protocol):
    """The weights of a model whose blocks are on a device only while they are used.

    Attributes:
        module: the model; what is outside its blocks is on the device.
        device: the device.
    """

    module: nn.Module
    device: torch.device

    def load(self, block: Block) -> None:
        """Bring the weights of a block to the device."""
        ...

    def drop(self, block: Block) -> None:
        """Free the memory of a block on the device; changes of its weights there are lost."""
        ...


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model and of its hidden states, for the prediction of a run.

    Attributes:
        weights: number of weights in every block.
        model_bytes: size of the whole model.
        dtype: of the hidden states.
        outside_bytes: size of the weights that are dropped before the first block is loaded.
        written_bytes: size of the files that a run writes beside the hidden states, once for all ranks.
        copied_bytes: size of the copies of the dense weights in main memory.
        positions: of the hidden state of every batch; None: the tokens of the batch.
        width: of the hidden states; None: as the configuration says.
        score: bytes of one output; None: as hidden states.
        reading: most bytes that conversions of tensors take while a block is read.
        writing: the same while it is written.
    """

    weights: Sequence[int]
    model_bytes: int
    dtype: torch.dtype
    outside_bytes: int = 0
    written_bytes: int = 0
    copied_bytes: int = 0
    positions: Sequence[int] | None = None
    width: int | None = None
    score: int | None = None
    reading: int = 0
    writing: int = 0


class BlockwiseStore(Store, ABC):
    """A model of which one or two blocks are in the memory of the device at a time.

    Hidden states between the blocks have a place of their own. Subclasses keep the changes of a block (`_save`), and
    measure the model (`_sizes`).

    Args:
        source: brings the blocks.
        blocks: the blocks, in order, as far as they are known.
        streams: place of the hidden states and of fitted parameters; see `storage.choose_place`.
    """

    whole = False
    keeps_wide_inputs = False

    def __init__(self, source: BlockSource, blocks: list[Block], streams: Place) -> None:
        super().__init__(source.module)
        self.streams = parse_place(streams)
        self._source, self._blocks = source, blocks
        self._dense: BlockSource | None = None  # the dense blocks, if the recipe compares with them
        self._dense_done: set[int] = set()  # stages whose dense weights are no longer needed
        self._pruned: set[Layer] = set()
        self._changed: set[str] = set()  # parameters with changes that `_save` has not kept yet
        self._recipe = Recipe()
        self._plan: Plan | None = None  # of the run that was checked last, without times
        self._storage = Storage("device", source.device, Path())

    @abstractmethod
    def _save(self, block: Block, changed: Collection[str]) -> None:
        """Keep the values that the changed parameters of a block have on the device."""

    @abstractmethod
    def _sizes(self, layers: Sequence[Layer], batches: Sequence[Batch], recipe: Recipe) -> ModelSizes:
        """Measure the model.

        Raises:
            ModelError: the blocks cannot be run one by one.
        """

    @property
    def device(self) -> torch.device:
        """The device that blocks are computed on."""
        return self._source.device

    @property
    def dense_model(self) -> nn.Module | None:
        """The dense model with the same blocks on the device, if the recipe needs it."""
        return None if self._dense is None else self._dense.module

    # ---- before the run
    def require_possible(self, recipe: Recipe) -> None:
        """Refuse recipes that need the whole model in memory.

        Raises:
            ProblemError: names the settings.
        """
        require_streamable(recipe)
        self._recipe = recipe

    def observe(self, batches: Sequence[Batch], seed: int) -> bool:
        """Find nothing: only layers that classes show are pruned, since the whole model is not in memory at once."""
        return False

    @property
    def _compares(self) -> bool:
        """True if the recipe needs the dense block beside the pruned one."""
        return self._recipe.target != "layer" or self._recipe.blocks is not None

    def place(self, request: Request, batches: Sequence[Batch]) -> None:
        """Predict the memory of the run, and choose the place of its hidden states.

        Raises:
            ProblemError, OutputError: they have no room; see `storage.choose_place`.
        """
        self._plan = self.plan(request, batches, timed=False)
        self._storage.place = cast(Place, self._plan.streams)

    @contextmanager
    def _storing(self, folder: Path) -> Iterator[None]:
        """Context in which hidden states can be stored; their files are in a folder."""
        self._storage = Storage("device", self.device, folder)
        try:
            yield
        finally:
            self._storage.clear()

    # ---- residency
    def _block(self, stage: int) -> Block | None:
        """The block of a stage; None for the stages before and after the blocks."""
        return self._blocks[stage] if 0 <= stage < len(self._blocks) else None

    def enter(self, stage: int) -> None:
        """Bring a block and its dense copy to the device."""
        if (block := self._block(stage)) is not None:
            self._source.load(block)
            if self._dense is not None and stage not in self._dense_done:
                self._dense.load(block)

    def leave(self, stage: int) -> None:
        """Keep the changes of a block, and free its memory on the device."""
        if (block := self._block(stage)) is not None:
            changed = {name for name in self._changed if block.holds(name)}
            self._save(block, changed)
            self._changed -= changed
        self.release(stage)

    def release(self, stage: int) -> None:
        """Free the memory of a block on the device without keeping its changes."""
        if (block := self._block(stage)) is not None:
            self._source.drop(block)
            if self._dense is not None:
                self._dense.drop(block)

    def release_dense(self, stage: int) -> None:
        """Free the memory of a dense block on the device for good."""
        self._dense_done.add(stage)
        if self._dense is not None:
            self._dense.drop(self._blocks[stage])

    def keep(self, index: int, hidden: Tensor) -> Tensor:
        """Store the hidden state of a batch in the place of `streams`."""
        return self._storage.keep(f"{index}.hidden", hidden)

    def hold(self, tensor: Tensor) -> Tensor:
        """Store a tensor until the end of the run in the place of `streams`."""
        return self._storage.keep(f"{len(self._storage.kept)}.held", tensor)

    def fetch(self, stored: Tensor) -> Tensor:
        """A copy of a stored hidden state on the device of the computations."""
        return self._storage.fetch(stored)

    def park(self, name: str, moments: Tensor) -> Tensor:
        """Store moments of a wide layer in a mapped file, if hidden states are in files."""
        return self._storage.park(name, moments)

    # ---- weights
    def dense(self, layer: Layer) -> Tensor | None:
        """The dense weights of a layer in memory; None without a dense model: the current weights are still dense."""
        return None if self.dense_model is None else layer.read(self.dense_model)

    def dense_tensor(self, name: str) -> Tensor | None:
        """A dense parameter in memory; None without a dense model."""
        return None if self.dense_model is None else self.dense_model.get_parameter(name).detach()

    def write(self, layer: Layer, weight: Tensor) -> None:
        """Write a layer's pruned weights, (rows, columns)."""
        self._pruned.add(layer)
        self._changed.add(layer.key)
        super().write(layer, weight)

    def write_tensor(self, name: str, value: Tensor) -> None:
        """Write a parameter that changes besides the pruned weights, such as a bias."""
        self._changed.add(name)
        super().write_tensor(name, value)

    def put(self, layer: Layer, tensor: Tensor) -> None:
        """Write a layer's tensor from a checkpoint, in the shape and dtype of the parameter."""
        self._pruned.add(layer)
        self._changed.add(layer.key)
        super().put(layer, tensor)

    def snapshot(self) -> dict[str, Tensor]:
        """No tensors: there is only one round."""
        return {}

    # ---- cost of a run
    def plan(self, request: Request, batches: Sequence[Batch], timed: bool = True, within: float | None = None) -> Plan:
        """Predict memory, time and disk space of a run.

        Args:
            request: how to prune.
            batches: calibration data.
            timed: False measures no speeds and predicts no time.
            within: seconds that the run may take: the plan is that of the form of the recipe that ends in time.

        Raises:
            ModelError: the blocks cannot be run one by one.
            ProblemError, OutputError: the hidden states have no room; see `storage.choose_place`.
        """
        recipe, pattern, layers = request.recipe, request.pattern, tuple(request.patterns)
        foresight, form = None, ""
        if timed:
            foresight = Foresight.of(self, request, batches)
            if within is not None:
                number, form = foresight.within(within)
                recipe = form_of(recipe, pattern, number)
        recipe = with_affordable_epochs(recipe, layers, batches, self.device)
        model = self._sizes(layers, batches, recipe)
        vocabulary, hidden = stated_sizes(self.model, "vocab_size", "hidden_size")
        names = {name for name, _ in self.model.named_parameters()}
        counts = [*map(token_count, batches)]
        tokens = counts if model.positions is None else model.positions
        steps = tokens
        if recipe.blocks is not None:
            share = sum(tokens) / sum(counts)  # an image has the positions of its hidden state
            step_batches = in_steps(self.model, Samples.of(batches), recipe.blocks).batches
            steps = [round(share * token_count(batch)) for batch in step_batches]
        sizes = Sizes(
            layers,
            block=max(model.weights),
            itemsize=model.dtype.itemsize,
            tokens=max(tokens),
            step_tokens=max(steps),
            vocabulary=vocabulary,
            biased=any(f"{layer.path}.bias" in names for layer in layers),
            score=model.score,
            hidden=hidden if model.width is None else model.width,
            blocks=len(model.weights),
            reading=model.reading,
            writing=model.writing,
        )
        on_cpu, holdout, present = self.device.type == "cpu", request.holdout, present_bytes(self.device)
        parked = on_cpu and self.streams in ("auto", "disk")  # finished Grams of wide layers, in mapped files
        phases = {"before the blocks": present}
        for phase, taken in peaks(sizes, recipe, holdout > 0, parked, pattern).items():
            phases[phase] = present - model.outside_bytes + taken
        grams, shapes = GramSizes.of(sizes, recipe, holdout > 0, parked), {layer.shape: layer for layer in layers}
        weights = sum(layer.weights for layer in layers)
        predicted = Plan(
            peak_bytes=max(phases.values()),
            seconds=0.0,
            model_bytes=model.model_bytes,
            spilled_bytes=0,
            layers=len(layers),
            streams_bytes=streams_bytes(sizes, recipe, holdout, tokens, steps, sum(map(size, batches)), pattern),
            grams_bytes=sum(map(grams.parked_bytes, shapes.values())),
            checkpoint_bytes=checkpoint_bytes(weights, sizes.block, sizes.itemsize, recipe)
            + moment_bytes(layers, recipe, pattern),
            copied_bytes=model.copied_bytes,
            peaks=phases,
            form=form,
        )
        room = self._room(predicted, model.written_bytes)
        predicted = predicted.placed(choose_place(self.streams, on_cpu, predicted.streams_bytes, room), self.device)
        return predicted if foresight is None else predicted.timed(foresight.forecast(recipe))

    def _room(self, predicted: Plan, written_bytes: int) -> dict[Place, int]:
        """Free bytes in each place for this rank, besides what the run itself takes; each rank has its own device."""
        ranks = current().size
        disk = (shutil.disk_usage(existing(self._disk)).free - written_bytes) // ranks
        memory = available() // ranks - predicted.copied_bytes
        device = 0 if self.device.type == "cpu" else reachable(self.device) - predicted.peak_bytes
        return {"device": device, "memory": memory, "disk": disk}

    @property
    def _disk(self) -> Path:
        """A folder on the disk of the hidden states; it need not exist yet."""
        return self._storage.folder


def require_streamable(recipe: Recipe) -> None:
    """Raise unless a recipe needs only one block in memory at a time.

    Raises:
        ProblemError: names the settings that need the whole model.
    """
    usual = Recipe()
    whole = ["inputs", "batch_norm"]
    # On text, steps of the whole network take the place of a fine-tuning and its rounds; see `decide_steps`.
    if recipe.blocks is None or not recipe.blocks.network_steps or recipe.finetune is None:
        whole += ["rounds", "finetune"]
    names = [name for name in whole if getattr(recipe, name) != getattr(usual, name)]
    if recipe.blocks is not None and recipe.blocks.sampled not in (0, "auto"):
        names.append("blocks.sampled")
    if recipe.division.criterion == "search":
        names.append("allocation")
    if recipe.target == "model":
        names.append("target")
    if recipe.network_solver is not None:
        names.append("solver")
    if names:
        raise ProblemError(
            f"{', '.join(names)}: not with one block in memory at a time yet, because the whole model would be "
            'needed. Take the recipes "one-shot", "fast" or "best" and their solver, refine, damping, target, '
            "bias, blocks, rules and keep_zeros, or prune in memory."
        )


def resident_bytes(model: nn.Module, layers: Sequence[Layer], recipe: Recipe) -> int:
    """Bytes that a run takes at least on a device that holds the whole model, without activations and Grams.

    These are the weights, a copy of what may change, a copy of the best round, and the dense model if a loss needs it.
    """
    tensors = dict(state(model))
    whole = sum(value.nbytes for value in tensors.values())
    changed = whole if recipe.changes_all else sum(tensors[name].nbytes for name in {layer.key for layer in layers})
    return whole + 2 * changed + (whole if recipe.needs_dense_model else 0)


def fits(model: nn.Module, layers: Sequence[Layer], recipe: Recipe, device: torch.device) -> bool:
    """True if a device has room for a run that holds the whole model there, as every device but a GPU has."""
    return device.type != "cuda" or resident_bytes(model, layers, recipe) <= free_on(device)
