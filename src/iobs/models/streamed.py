"""A model directory that is pruned with one block in memory at a time.

The source's files are read tensor by tensor, and the output's files are written block by block.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from iobs.core.files import expanded
from iobs.core.memory import available
from iobs.core.outputs import check_output
from iobs.core.patterns import Pattern
from iobs.errors import LayerSelectionError, ModelError, NonFiniteError, ProblemError
from iobs.models.directory import Directory
from iobs.models.output import REPORTS, copy_companions, output_of_ranks
from iobs.models.sixteen_bits import WideLinear, native
from iobs.models.skeleton import blocks_of, skeleton
from iobs.models.weights import ShardWriter
from iobs.pruning.audit import audit, audit_layers, require_promised
from iobs.pruning.blockwise import BlockwiseStore, ModelSizes
from iobs.pruning.blockwise.storage import Place, require_place
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.chains import with_formats
from iobs.pruning.calibration.replay import StopForward, replaced_blocks
from iobs.pruning.cost.memory import Plan
from iobs.pruning.coverage import Reason
from iobs.pruning.network.copies import dense_copy
from iobs.pruning.network.layers import Layer, find_layers
from iobs.pruning.network.selection import Selection, require_finite, select, unobserved
from iobs.pruning.recipe import Recipe
from iobs.pruning.report import AuditRow
from iobs.pruning.runtime.memory import giving_memory_back
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples.batches import Batch, require_all_accepted
from iobs.pruning.store import Names


@dataclass
class StreamedModel:
    """A module whose blocks have no weights yet; everything else is loaded.

    Args:
        directory: files with the weights.
        module: the module.
        blocks: its blocks, in order.
        device: of the loaded weights.
        arithmetic: dtype in which blocks are loaded and computed; the dtypes in the files are not changed.
        surplus: names of tensors in the files that the module does not have.
    """

    directory: Directory
    module: nn.Module
    blocks: list[Block]
    device: torch.device
    arithmetic: torch.dtype
    surplus: frozenset[str] = frozenset()
    _traced: bool = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        device: str = "cpu",
        arithmetic: torch.dtype | None = None,
    ) -> StreamedModel:
        """Build the module of a directory, and load the weights outside its blocks.

        Args:
            path: the directory.
            device: of the computations.
            arithmetic: dtype of the computations in blocks. The default is the widest dtype of the prunable weights, so
                that no weight is rounded further. CPUs without 16-bit instructions use float32, since emulation takes
                several times as long.

        Raises:
            ModelError: the directory is damaged, has tensors that cannot be converted to those of the module, or
                quantised weights; or the module has no list of blocks, or blocks that share parameters.
        """
        path = expanded(path)
        directory = Directory(path)
        module = skeleton(path)
        directory.use_names_of(module)
        surplus = _surplus(module, directory)
        blocks = blocks_of(module)
        prefixes = tuple(f"{block.path}." for block in blocks)
        outside = [name for name in directory.entries if not name.startswith(prefixes) and name not in surplus]
        _move_buffers(module, device)
        _fill(module, directory.read(outside, device, mapped=True))
        _tie(module, directory)
        _require_own_parameters(module, blocks)
        _widen_products(module, prefixes, torch.device(device))
        empty = [name for name, value in module.named_parameters(remove_duplicate=False) if value.is_meta]
        _require_all(directory, [name for name in empty if not name.startswith(prefixes)])
        place, dtypes = torch.device(device), {}
        for layer in find_layers(module):
            if any(block.holds(layer.path) for block in blocks) and layer.key in directory.entries:
                dtypes[layer.key] = directory.entries[layer.key].dtype
        widest = _widest(dtypes) if dtypes else torch.float32
        return cls(directory, module, blocks, place, arithmetic or native(widest, place), surplus)

    def dense_copy(self) -> StreamedModel:
        """The same files with a module of its own, whose matrices outside the blocks are shared; blocks are empty.

        Vectors such as the scale of the last norm are copied, since a reconstruction changes them.
        """
        tensors = (*self.module.parameters(), *self.module.buffers())
        shared = {id(value): value for value in tensors if value.ndim > 1 or value.is_meta}
        return replace(self, module=dense_copy(self.module, shared))

    @property
    def score_bytes(self) -> int | None:
        """Bytes of one output, in the dtype of what is outside the blocks; None if the module has no dtype."""
        dtype = getattr(self.module, "dtype", None)
        return dtype.itemsize if isinstance(dtype, torch.dtype) else None

    def select(self, include: Names, ignore: Names, depthwise: bool) -> Selection:
        """Choose the layers to prune, all of them inside blocks.

        Raises:
            LayerSelectionError: no chosen layer is inside a block, or a name pattern matches nothing.
        """
        chosen = select(self.module, include, ignore, depthwise=depthwise, check_finite=False)
        layers = tuple(layer for layer in chosen.layers if any(block.holds(layer.path) for block in self.blocks))
        outside = Reason("outside", "outside the blocks")
        dropped = {layer.name: outside for layer in chosen.layers if layer not in layers}
        if not layers:
            raise LayerSelectionError(
                f"Block by block only layers inside the blocks are pruned, and {', '.join(dropped)} is outside; choose "
                "others, or prune the model in memory."
            )
        return Selection(layers, {**unobserved(chosen.skipped), **dropped})

    def require_finite(self, layers: Sequence[Layer]) -> None:
        """Check every entry of the weights of layers in the files, one tensor after another.

        This reads the files once. A run would meet the last block after hours.

        Raises:
            NonFiniteError: an entry is NaN or infinite; names the layer, or the first expert of a parameter.
        """
        named = {layer.key: layer.name for layer in reversed(layers)}
        for key, weight in self.directory.read([*named], mapped=True):
            if not bool(torch.isfinite(weight).all()):
                raise NonFiniteError(
                    f"The weight of layer {named[key]!r} holds NaN or infinity; repair the model first."
                )

    def names(self, block: Block) -> list[str]:
        """The names of a block's tensors."""
        names = self.directory.entries.keys() - self.surplus
        return sorted(name for name in names if block.holds(name))

    def trace(self, batch: Batch) -> list[Block]:
        """Find the formats of the blocks' outputs, unless they are known; also for a `dense_copy`. Returns the blocks.

        Raises:
            ModelError: the blocks do not pass on one hidden state.
        """
        if not self._traced:
            blocks = [*self.blocks]
            self.blocks[:] = with_formats(
                self.module,
                blocks,
                batch,
                self.arithmetic,
                lambda stage: self.load(blocks[stage]),
                lambda stage: self.drop(blocks[stage]),
            )
            self._traced = True
        return self.blocks

    def load(self, block: Block) -> None:
        """Load the weights of a block; buffers that are wider in the files than `arithmetic` keep their dtype."""
        names, entries = self.names(block), self.directory.entries
        buffers = {name for name, _ in self.module.named_buffers()}
        wide = {name for name in buffers.intersection(names) if entries[name].dtype.itemsize > self.arithmetic.itemsize}
        _fill(self.module, self.directory.read([*wide], self.device))
        _fill(self.module, self.directory.read([*{*names} - wide], self.device, self.arithmetic))

    def drop(self, block: Block) -> None:
        """Drop the weights of a block; buffers that are not in the files stay, since `load` cannot bring them back."""
        tensors = {**dict(self.module.named_parameters(remove_duplicate=False)), **dict(self.module.named_buffers())}
        _fill(self.module, ((name, tensors[name].detach().to("meta")) for name in self.names(block)))

    def drop_outside(self) -> None:
        """Drop all loaded weights: the embedding has been run, and the head is never run."""
        for holder in self.module.modules():
            for name, parameter in holder._parameters.items():
                holder._parameters[name] = None if parameter is None else nn.Parameter(parameter.to("meta"), False)

    def rounded(self, name: str, value: Tensor) -> Tensor:
        """A parameter, rounded to its dtype in the files."""
        return value.to(self.directory.entries[name].dtype)


def _widest(stored: Mapping[str, torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds the numbers of all weights; for bfloat16 and float16 together it is float32.

    Raises:
        ModelError: a weight is quantised; names it.
    """
    for name, dtype in stored.items():
        if dtype.itemsize < 2:
            raise ModelError(f"{name} is quantised ({dtype}); prune the weights that it was made from.")
    return reduce(torch.promote_types, stored.values())


def _widen_products(module: nn.Module, prefixes: tuple[str, ...], device: torch.device) -> None:
    """Let linear layers outside the blocks multiply in float32, where the CPU has no instructions for their dtype."""
    for path, child in module.named_modules():
        outside = type(child) is nn.Linear and not f"{path}.".startswith(prefixes)
        if outside and native(child.weight.dtype, device) is not child.weight.dtype:
            child.__class__ = WideLinear


def _surplus(module: nn.Module, directory: Directory) -> frozenset[str]:
    """The names of tensors in the files that the module does not have.

    Raises:
        ModelError: the files lack tensors of the module, or a tensor has another shape.
    """
    state, entries = module.state_dict(), directory.entries
    unknown = [name for name in entries if name not in state]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    present = {id(parameters[name]) for name in entries if name in parameters}  # tied parameters under all names
    missing = [name for name in state if name not in entries and id(parameters.get(name)) not in present]
    if unknown and missing:
        raise ModelError(
            f"{directory.path} names its tensors otherwise than {type(module).__name__} does ({unknown[0]}), so it "
            "cannot be pruned block by block; prune it in memory instead."
        )
    _require_all(directory, missing)
    if unknown:
        warnings.warn(
            f"{directory.path} holds {len(unknown)} tensors that {type(module).__name__} has no place for, "
            f"{unknown[0]} the first; they are not used, and are written unchanged.",
            stacklevel=2,
        )
    wrong = [name for name, entry in entries.items() if name in state and tuple(state[name].shape) != entry.shape]
    if wrong:
        raise ModelError(
            f"{wrong[0]} has the shape {entries[wrong[0]].shape} in the files of {directory.path} and "
            f"{tuple(state[wrong[0]].shape)} by its configuration; one of them is wrong."
        )
    return frozenset(unknown)


def _require_all(directory: Directory, missing: Sequence[str]) -> None:
    """Raise ModelError if names of weights are missing."""
    if missing:
        raise ModelError(f"{directory.path} lacks {len(missing)} weights, {missing[0]} the first; complete the files.")


def _require_own_parameters(module: nn.Module, blocks: Sequence[Block]) -> None:
    """Check that no parameter belongs to two blocks.

    Raises:
        ModelError: names a shared parameter.
    """
    owners: dict[int, str] = {}
    for block in blocks:
        for name, parameter in module.get_submodule(block.path).named_parameters():
            if owners.setdefault(id(parameter), block.path) != block.path:
                raise ModelError(
                    f"The blocks {owners[id(parameter)]} and {block.path} share the parameter {name}; prune the model "
                    "in memory instead of block by block."
                )


def _fill(module: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Replace parameters and buffers of the module by tensors of the same names."""
    for name, tensor in tensors:
        path, _, last = name.rpartition(".")
        holder = module.get_submodule(path)
        if last in holder._parameters:
            holder._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            holder._buffers[last] = tensor


def _move_buffers(module: nn.Module, device: str) -> None:
    for holder in module.modules():
        for name, buffer in holder._buffers.items():
            holder._buffers[name] = None if buffer is None else buffer.to(device)


def _tie(module: nn.Module, directory: Directory) -> None:
    """Tie weights as transformers does when it loads files, which may hold shared weights once, under either name.

    Weights that the files hold twice, with other values, are not tied, whatever the configuration says.
    """
    missing = {name for name in module.state_dict() if name not in directory.entries}
    module.tie_weights(missing_keys=missing, recompute_mapping=False)  # type: ignore[operator]


@dataclass
class BlockWriter:
    """Write the files of the pruned model block by block, in the layout of the source's files.

    Args:
        streamed: the model and the source's files.
        directory: of the written files.
        writes: False counts the zeros and writes nothing, on all ranks but the first.

    Attributes:
        zeros: number of zeros of every written parameter, by name; a shared parameter has one name. Tensors that are
            converted have their name in the files.
    """

    streamed: StreamedModel
    directory: Path
    writes: bool = True
    zeros: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> BlockWriter:
        source, module = self.streamed.directory, self.streamed.module
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        parameters = module.named_parameters(remove_duplicate=False)
        self.names = {name: first[id(parameter)] for name, parameter in parameters}
        self.writers: dict[Path, ShardWriter] = {}
        if self.writes:
            copy_companions(source.path, self.directory, keep_index=True, leave=REPORTS)
            self.writers = {
                file: ShardWriter(self.directory / file.name, entries, source.metadata[file])
                for file, entries in source.shards.items()
            }
        inner = {name for block in self.streamed.blocks for name in self.streamed.names(block)}
        self._put(source.write([name for name in source.entries if name not in inner], {}))
        return self

    def block(self, block: Block, pruned: set[str]) -> None:
        """Write a block: pruned tensors from memory, the others bit for bit from the source."""
        state = self.streamed.module.state_dict()
        changed = {name: state[name] for name in pruned}
        self._put(self.streamed.directory.write(self.streamed.names(block), changed, self.streamed.arithmetic))

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor into the file that holds it in the source; a second call replaces it."""
        self._put(self.streamed.directory.write([name], {name: tensor}))

    def _put(self, tensors: Iterable[tuple[str, Tensor, str | None]]) -> None:
        """Write the tensors of `Directory.write`, and count the zeros of parameters."""
        for source, tensor, name in tensors:
            counted = source if name is None else self.names.get(name)  # not buffers; tied parameters once
            for file, entries in self.streamed.directory.shards.items():
                if source in entries:
                    written = tensor.to(entries[source].dtype)
                    if counted is not None:
                        self.zeros[counted] = int((written == 0).sum())
                    if self.writes:
                        self.writers[file].put(source, written)

    def __exit__(self, kind: Any, *_: Any) -> None:
        for writer in self.writers.values():
            writer.opened.close() if kind else writer.close()


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
            OutputError: as `check_output`.
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
    def _sizes(self, layers: Sequence[Layer], batches: Sequence[Batch], recipe: Recipe) -> ModelSizes:
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
        reading, writing = self._conversion_bytes(layers)
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
