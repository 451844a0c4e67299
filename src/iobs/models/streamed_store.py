"""Store of a model directory that is pruned with one block in memory at a time.

The source's files are read tensor by tensor, and the output's files are written block by block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from iobs.core.memory import available
from iobs.core.patterns import Pattern
from iobs.errors import ProblemError
from iobs.models.output import check_output, output_of_ranks
from iobs.models.streamed import BlockWriter, StreamedModel
from iobs.pruning.audit import audit, audit_layers, require_promised
from iobs.pruning.blockwise.storage import Place, require_place
from iobs.pruning.blockwise.store import BlockwiseStore, ModelSizes
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.replay import StopForward, replaced_blocks
from iobs.pruning.cost.memory import Plan
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.selection import Selection, require_finite
from iobs.pruning.recipe import Recipe
from iobs.pruning.report import AuditRow
from iobs.pruning.runtime.memory import giving_memory_back
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Batch, require_all_accepted
from iobs.pruning.store import Names


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
        super().__init__(streamed, streamed.blocks, streams)
        self.streamed, self.output = streamed, output
        self.arithmetic, self.folder = streamed.arithmetic, output
        self._dense: StreamedModel | None = None
        self._patterns: dict[Layer, Pattern] = {}
        self._audit_rows: list[AuditRow] = []  # of the layers whose blocks were written
        self._replaceable: Collection[str] = ()  # names in the output directory
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
            self.folder, self._ready, self._replaceable = folder, True, replaceable
            with tempfile.TemporaryDirectory(dir=folder) as spill, self._storing(Path(spill)):
                yield
            if current().first:
                require_promised(audit(folder), self._audit_rows, self.output)

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

    def select(self, include: Names, ignore: Names, depthwise: bool, embeddings: bool = False) -> Selection:
        """Choose the layers to prune, all of them inside blocks: no embeddings.

        Raises:
            LayerSelectionError: no chosen layer is inside a block, or a name pattern matches nothing.
        """
        return self.streamed.select(include, ignore, depthwise)

    def check(self, batches: Sequence[Batch], selection: Selection, holdout: float) -> Selection:
        """The selection itself, after a check that every kind of batches reaches the blocks, which are not loaded yet.

        Raises:
            CalibrationError: the model does not take a batch.
            NonFiniteError: a weight holds NaN or infinity.
            ModelError: the blocks cannot be run one by one.
        """
        with replaced_blocks(self.model, self.streamed.blocks[:1], _reached):
            require_all_accepted(self.model, batches, (StopForward,))
        self.streamed.require_finite(selection.layers)
        return selection

    def require_space(self, checkpoint: str | Path | None) -> None:
        """Check that disk and memory have room for the run that was checked last.

        Raises:
            OutputError: as `require_room`.
        """
        assert self._plan is not None
        self.require_room(self._plan, checkpoint, self._replaceable)

    def chain(self, batches: Sequence[Batch], layers: tuple[Layer, ...]) -> list[Block]:
        """The blocks of the model."""
        return self.streamed.trace(batches[0])

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """All tensors of the files."""
        return self.streamed.directory.read([*self.streamed.directory.entries])

    def remember(self, parameters: Collection[str] | None) -> None:
        """Do nothing: the source's files hold the dense weights."""

    @contextmanager
    def running(self, patterns: Mapping[Layer, Pattern]) -> Iterator[None]:
        """Open the output's files for a run."""
        self._patterns, self._ready = dict(patterns), False
        if self._compares:
            self._dense = self.streamed.dense_copy()
        with BlockWriter(self.streamed, self.folder, current().first) as self._writer:
            yield

    def set_patterns(self, patterns: Mapping[Layer, Pattern]) -> None:
        """Receive the patterns by which the written zeros are checked."""
        self._patterns = dict(patterns)

    # ---- residency
    def enter(self, stage: int) -> None:
        """Load a block and its dense copy.

        Raises:
            NonFiniteError: a weight holds NaN or infinity.
        """
        super().enter(stage)
        if (block := self._block(stage)) is not None:
            require_finite(self.model, [layer for layer in self._patterns if block.holds(layer.path)])

    def leave(self, stage: int) -> None:
        """Write a block to the output and drop it; after the stage before the blocks, drop the weights outside them."""
        if stage < 0 and self._recipe.blocks is None:  # a reconstruction runs the head
            self.streamed.drop_outside()
            if self._dense is not None:
                self._dense.drop_outside()
        super().leave(stage)

    def _save(self, block: Block, changed: Collection[str]) -> None:
        """Count the zeros of the pruned layers of a block, and write the block."""
        inside = {layer: pattern for layer, pattern in self._patterns.items() if block.holds(layer.path)}
        pruned = {layer: pattern for layer, pattern in inside.items() if layer in self._pruned}
        self._audit_rows += audit_layers(self.model, pruned, self.stored_dtype)
        self._writer.block(block, {layer.key for layer in pruned} | {*changed})

    # ---- weights
    def stored_dtype(self, layer: Layer) -> torch.dtype:
        """The dtype of a layer's weights in the files."""
        return self.streamed.directory.entries[layer.key].dtype

    def write_tensor(self, name: str, value: Tensor) -> None:
        """Write a parameter into the model, rounded to its dtype in the files; outside the blocks also to its file."""
        rounded = self.streamed.rounded(name, value)
        super().write_tensor(name, rounded)
        if not any(block.holds(name) for block in self.streamed.blocks):
            self._writer.put(name, rounded)

    def write(self, layer: Layer, weight: Tensor) -> None:
        """Write a layer's pruned weights into the model, rounded to the dtype of its file."""
        super().write(layer, self.streamed.rounded(layer.key, weight))

    def zeros(self) -> int:
        """Number of zeros among all parameters, counted in the written tensors."""
        return sum(self._writer.zeros.values())

    def audit(self, patterns: Mapping[Layer, Pattern]) -> list[AuditRow]:
        """The zeros of every pruned layer, counted when its block was written."""
        return self._audit_rows

    # ---- cost of a run
    def _sizes(self, selection: Selection, batches: Sequence[Batch], recipe: Recipe) -> ModelSizes:
        """The sizes of the files. One sample runs through one block of each class.

        Raises:
            ModelError: the blocks cannot be run one by one.
        """
        self.streamed.trace(batches[0])
        entries = self.streamed.directory.entries
        model_bytes = sum(entry.bytes for entry in entries.values())
        blocks = [[entries[name] for name in self.streamed.names(block)] for block in self.streamed.blocks]
        outside = model_bytes - sum(entry.bytes for block in blocks for entry in block)
        on_cpu = self.device.type == "cpu"
        reading, writing = self._conversion_bytes(selection.layers)
        return ModelSizes(
            weights=[sum(entry.bytes // entry.dtype.itemsize for entry in block) for block in blocks],
            model_bytes=model_bytes,
            dtype=self.streamed.arithmetic,
            outside_bytes=0 if on_cpu or recipe.blocks is not None else outside,  # mapped files on a CPU
            written_bytes=model_bytes,
            score=self.streamed.score_bytes,
            reading=reading,
            writing=writing,
        )

    @property
    def _disk(self) -> Path:
        return self.output

    def _conversion_bytes(self, layers: Sequence[Layer]) -> tuple[int, int]:
        """The most bytes that the conversions of a block take while it is read, and while it is written."""
        if self.device.type != "cpu":
            return 0, 0  # tensors are converted in main memory
        directory, dtype, keys = self.streamed.directory, self.streamed.arithmetic, {layer.key for layer in layers}
        names = [{*self.streamed.names(block)} for block in self.streamed.blocks]
        reading = max(directory.reading_bytes(inside, dtype) for inside in names)
        return reading, max(directory.writing_bytes(inside & keys, dtype) for inside in names)

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
