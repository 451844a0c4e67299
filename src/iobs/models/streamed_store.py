"""Store of a model directory that is pruned with one block in memory at a time.

The source's files are read tensor by tensor, and the output's files are written block by block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.errors import ProblemError
from iobs.models.block_writer import BlockWriter
from iobs.models.output import check_output, output_of_ranks
from iobs.models.streamed import StreamedModel
from iobs.pruning.audit import audit, audit_layers, require_promised
from iobs.pruning.blockwise.spill import Place, Storage, require_place, spilled_batches
from iobs.pruning.blockwise.store import BlockwiseStore
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.replay import StopForward, replaced_blocks
from iobs.pruning.cost.memory import Plan, plan, token_count
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.selection import Selection, require_finite
from iobs.pruning.recipe import Recipe
from iobs.pruning.reconstruction.step_sizes import in_steps
from iobs.pruning.report import AuditRow
from iobs.pruning.runtime.memory import MemoryWatch, available, giving_memory_back
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Batch, collect, require_all_accepted, require_known_tokens, size
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.store import Names


@dataclass
class _Run:
    """State of the only run of a store.

    Attributes:
        patterns: of every layer.
        pruned: layers that have been pruned.
        changed: other parameters of the blocks in memory that were changed.
        rows: zeros of the layers whose blocks were written.
        plan: the predicted cost.
        replaceable: names in the output directory that are replaced.
    """

    patterns: dict[Layer, Pattern] = field(default_factory=dict)
    pruned: set[Layer] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    rows: list[AuditRow] = field(default_factory=list)
    plan: Plan | None = None
    replaceable: Collection[str] = ()


class StreamedStore(BlockwiseStore):
    """A model directory that is pruned into another directory, with one block in memory at a time.

    Under torchrun every rank reads the blocks and has its own samples, and the first rank writes the output.

    Use it as a context manager. The output directory appears when the context ends without an error; after an error
    nothing is left:

        with StreamedStore.open("model", "out") as store:
            report = iobs.prune(store, batches, 0.5, "one-shot")
            write_report(report, store.folder)

    Attributes:
        folder: temporary directory of the output's files; other files may be added there.
        streamed: the model and its files.
        output: the output directory.
        arithmetic: dtype of the computations in blocks.
    """

    in_memory = False

    def __init__(self, streamed: StreamedModel, output: Path, streams: Place = "auto") -> None:
        super().__init__(streamed.module, streamed.device, streams)
        self.streamed, self.output = streamed, output
        self.arithmetic, self.folder = streamed.arithmetic, output
        self._run = _Run()
        self._dense: StreamedModel | None = None  # the same blocks of the dense model, if the recipe compares with them
        self._ready = False  # for its only run, which lets the weights outside the blocks go

    @classmethod
    @contextmanager
    def open(
        cls,
        source: str | Path,
        output: str | Path,
        *,
        device: str = "cpu",
        arithmetic: torch.dtype | None = None,
        streams: Place = "auto",
    ) -> Iterator[StreamedStore]:
        """Open a directory for pruning into another directory.

        Args:
            source: a directory with safetensors, whose tensors are those of the module, or of the hub.
            output: the directory to write; it must not exist, or be empty.
            device: of the computations.
            arithmetic: dtype of the computations in blocks; see `StreamedModel.open`.
            streams: place of the hidden states between blocks, and of the parameters that steps of the whole network
                change. "device", "memory" (page-locked for a GPU) or "disk" (mapped files beside the output). "auto":
                the first of them with enough room, but the disk for a CPU.

        Raises:
            ModelError: as `StreamedModel.open`.
            OutputError: as `iobs.models.check_output`.
            DistributedError: another rank is gone.
            AuditError: the written files hold fewer zeros than were counted in memory.
        """
        check_output(Path(output))
        store = cls(StreamedModel.open(Path(source), device=device, arithmetic=arithmetic), Path(output), streams)
        with store.writing():
            yield store

    @contextmanager
    def writing(self, replaceable: Collection[str] = ()) -> Iterator[None]:
        """Keep the output's files in a temporary folder, which becomes the output at the end.

        Args:
            replaceable: names in the output directory that are replaced then.

        Raises:
            OutputError, AuditError: as `open`.
        """
        with giving_memory_back(), output_of_ranks(self.output, replaceable) as folder:
            self.folder, self._ready, self._run.replaceable = folder, True, replaceable
            with tempfile.TemporaryDirectory(dir=folder) as spill:
                self._storage = Storage("device", self.device, Path(spill))
                try:
                    yield
                finally:
                    self._storage.clear()
            if current().first:
                require_promised(audit(folder), self._run.rows, self.output)

    # ---- before the run
    def require_possible(self, recipe: Recipe) -> None:
        """Refuse recipes that are not streamable, and a second run of the same store.

        Raises:
            ProblemError: names the settings, or the store is not open for a run.
        """
        if not self._ready:
            raise ProblemError("A streamed store takes one run, in the context of its `open`; open another one.")
        super().require_possible(recipe)

    def prepared(self) -> AbstractContextManager[None]:
        """Do nothing: the weights are in files."""
        return nullcontext()

    def select(self, include: Names, ignore: Names, depthwise: bool) -> Selection:
        """Choose the layers to prune, all of them inside blocks.

        Raises:
            LayerSelectionError: no chosen layer is inside a block, or a name pattern matches nothing.
        """
        return self.streamed.select(include, ignore, depthwise)

    def collected(self, data: Iterable[Batch] | Batch) -> list[Batch]:
        """Collect and check the batches; those of an iterator or a DataLoader are read one by one into mapped files."""
        if isinstance(data, (Tensor, Mapping, list, tuple)):
            return super().collected(data)
        found = collect(data, partial(spilled_batches, self._storage.folder))
        require_known_tokens(self.model, found)
        return found

    def checked(self, batches: Sequence[Batch], selection: Selection, holdout: float) -> Selection:
        """The selection itself, after a check that every kind of batches reaches the blocks, which are not loaded yet.

        Raises:
            CalibrationError: the model does not take a batch.
            NonFiniteError: a weight holds NaN or infinity.
            ModelError: the blocks cannot be run one by one.
            ProblemError, OutputError: the hidden states have no room; see `spill.chosen`.
        """
        with replaced_blocks(self.model, self.streamed.blocks[:1], _reached):
            require_all_accepted(self.model, batches, (StopForward,))
        self._run.plan = self.plan(selection, batches, self._recipe, holdout, timed=False)
        self.streamed.require_finite(selection.layers)
        self._storage.place = cast(Place, self._run.plan.streams)
        return selection

    def require_space(self, checkpoint: str | Path | None) -> None:
        """Check that disk and memory have room for the run that was checked last.

        Raises:
            OutputError: as `require_room`.
        """
        assert self._run.plan is not None
        self.require_room(self._run.plan, checkpoint, self._run.replaceable)

    def chain(self, batches: Sequence[Batch], layers: tuple[Layer, ...], halves: bool = False) -> list[Block]:
        """The blocks of the model, or their halves."""
        return self.streamed.halve(batches[0]) if halves else self.streamed.trace(batches[0])

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """All tensors of the files."""
        return self.streamed.directory.read([*self.streamed.directory.entries])

    def remember(self, parameters: Collection[str] | None) -> None:
        """Do nothing: the source's files hold the dense weights."""

    @contextmanager
    def running(self, patterns: Mapping[Layer, Pattern], memory: MemoryWatch) -> Iterator[None]:
        """Open the output's files for a run, and measure memory continuously."""
        self._run.patterns, self._ready = dict(patterns), False
        if self._compares:
            self._dense = self.streamed.dense_copy()
        with ExitStack() as stack:
            self._writer = stack.enter_context(BlockWriter(self.streamed, self.folder, current().first))
            stack.enter_context(memory.watching())
            yield

    def allocated(self, patterns: Mapping[Layer, Pattern]) -> None:
        """Receive the patterns by which the written zeros are checked."""
        self._run.patterns = dict(patterns)

    # ---- residency
    def enter(self, stage: int) -> None:
        """Load a block.

        Raises:
            NonFiniteError: a weight holds NaN or infinity.
        """
        if 0 <= stage < len(self.streamed.blocks):
            block = self.streamed.blocks[stage]
            self.streamed.load(block)
            if self._dense is not None and stage not in self._known:
                self._dense.load(block)
            require_finite(self.model, [layer for layer in self._run.patterns if block.holds(layer.path)])

    def leave(self, stage: int) -> None:
        """Write a block to the output and drop it; after the stage before the blocks, drop the weights outside them."""
        if stage < 0 and self._recipe.blocks is None:  # a reconstruction runs the head
            self.streamed.drop_outside()
            if self._dense is not None:
                self._dense.drop_outside()
        elif 0 <= stage < len(self.streamed.blocks):
            block = self.streamed.blocks[stage]
            written = {layer: pattern for layer, pattern in self._run.patterns.items() if layer in self._run.pruned}
            written = {layer: pattern for layer, pattern in written.items() if block.holds(layer.path)}
            self._run.rows += audit_layers(self.model, written, self.stored_dtype)
            changed = {name for name in self._run.changed if block.holds(name)}
            self._run.changed -= changed
            self._writer.block(block, {layer.key for layer in written} | changed)
            self.streamed.drop(block)
            if self._dense is not None:
                self._dense.drop(block)

    def release_dense(self, stage: int) -> None:
        """Drop the dense weights of a block for good."""
        self._known.add(stage)
        if self._dense is not None:
            self._dense.drop(self.streamed.blocks[stage])

    def release(self, stage: int) -> None:
        """Drop a block without writing it."""
        if 0 <= stage < len(self.streamed.blocks):
            self.streamed.drop(self.streamed.blocks[stage])
            if self._dense is not None:
                self._dense.drop(self.streamed.blocks[stage])

    # ---- weights
    @property
    def dense_model(self) -> nn.Module | None:
        """The dense model with the same blocks in memory, if the recipe needs it."""
        return None if self._dense is None else self._dense.module

    def stored_dtype(self, layer: Layer) -> torch.dtype:
        """The dtype of a layer's weights in the files."""
        return self.streamed.directory.entries[layer.key].dtype

    def write_tensor(self, name: str, value: Tensor) -> None:
        """Write a parameter into the model, rounded to its dtype in the files; outside the blocks also to its file."""
        rounded = self.streamed.rounded(name, value)
        super().write_tensor(name, rounded)
        if any(block.holds(name) for block in self.streamed.blocks):
            self._run.changed.add(name)
        else:
            self._writer.put(name, rounded)

    def write(self, layer: Layer, weight: Tensor) -> None:
        """Write a layer's pruned weights into the model, rounded to the dtype of its file."""
        self._run.pruned.add(layer)
        super().write(layer, self.streamed.rounded(layer.key, weight))

    def put(self, layer: Layer, tensor: Tensor) -> None:
        """Write a layer's stored tensor from a checkpoint into the model."""
        self._run.pruned.add(layer)
        super().put(layer, tensor)

    def zeros(self) -> int:
        """Number of zeros among all parameters, counted in the written tensors."""
        return sum(self._writer.zeros.values())

    def audit(self, patterns: Mapping[Layer, Pattern]) -> list[AuditRow]:
        """The zeros of every pruned layer, counted when its block was written."""
        return self._run.rows

    # ---- cost of a run
    def plan(
        self, selection: Selection, batches: Sequence[Batch], recipe: Recipe, holdout: float, timed: bool = True
    ) -> Plan:
        """Predict memory, time and disk space of a run; `timed` False measures no speeds and foretells no time.

        One sample runs through one block of each class beforehand.

        Raises:
            ModelError: the blocks cannot be run one by one.
            ProblemError, OutputError: the hidden states have no room; see `spill.chosen`.
        """
        self.streamed.trace(batches[0])
        fit, steps = recipe.blocks, batches
        if fit is not None:
            steps = in_steps(self.model, Samples.of(batches), fit).batches
            if fit.halves:
                self.streamed.halve(batches[0])
        entries, itemsize = self.streamed.directory.entries, self.streamed.arithmetic.itemsize
        model_bytes = sum(entry.bytes for entry in entries.values())
        blocks = [[entries[name] for name in self.streamed.names(block)] for block in self.streamed.blocks]
        numbers = [sum(entry.bytes // entry.dtype.itemsize for entry in block) for block in blocks]
        on_cpu = self.device.type == "cpu"
        outside = model_bytes - sum(entry.bytes for block in blocks for entry in block)
        sizes = self._sizes(selection.layers, numbers, itemsize)
        reading, writing = self._conversion_bytes(selection.layers)
        found = plan(
            replace(sizes, score=self.streamed.score_bytes, reading=reading, writing=writing),
            recipe,
            holdout,
            self.device,
            tokens=[*map(token_count, batches)],
            steps=[*map(token_count, steps)],
            samples=sum(map(size, batches)),
            outside_bytes=0 if on_cpu or fit is not None else outside,  # mapped files on a CPU
            model_bytes=model_bytes,
            parked=on_cpu and self.streams in ("auto", "disk"),
        )
        found = self._placed(found, self.output, model_bytes)
        if not timed:
            return found
        return found.timed(self._forecast(self.streamed.blocks, selection.layers, batches, recipe, holdout))

    def _conversion_bytes(self, layers: Sequence[Layer]) -> tuple[int, int]:
        """The most bytes that the conversions of a block take while it is read, and while it is written."""
        if self.device.type != "cpu":
            return 0, 0  # tensors are converted in main memory
        directory, dtype, keys = self.streamed.directory, self.streamed.arithmetic, {layer.key for layer in layers}
        names = [{*self.streamed.names(block)} for block in self.streamed.blocks]
        reading = max(directory.reading_bytes(own, dtype) for own in names)
        return reading, max(directory.writing_bytes(own & keys, dtype) for own in names)

    def require_room(self, plan: Plan, checkpoint: str | Path | None = None, replaceable: Collection[str] = ()) -> None:
        """Check that the disk has room for the output, for the activations, and for the rest of a checkpoint on it.

        Raises:
            OutputError: the disk, or main memory that was asked to hold the activations, has too little room.
        """
        require_place(self.streams, plan.streams_bytes, available() // current().size)
        needed = plan.model_bytes + current().size * plan.spilled_bytes
        needed += plan.left_of_checkpoint(checkpoint, self.output)
        check_output(self.output, needed, replaceable)


def _reached(position: int, args: object, kwargs: object) -> object:
    """In place of the first block: end the forward pass."""
    raise StopForward
