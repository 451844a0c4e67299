"""Store of a model in main memory whose blocks visit a device, such as a GPU that is too small for the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iobs.core.files import expanded
from iobs.core.memory import available
from iobs.core.patterns import Pattern
from iobs.errors import ModelError, OutputError, ProblemError, first_line
from iobs.pruning.blockwise import BlockwiseStore, ModelSizes
from iobs.pruning.blockwise.storage import Place, require_place
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.chains import exact_chain
from iobs.pruning.calibration.replay import BEFORE, ChainError, Stream
from iobs.pruning.cost.memory import Plan
from iobs.pruning.network.copies import dense_copy
from iobs.pruning.network.layers import Layer, joined
from iobs.pruning.network.modes import evaluating, replaced_forwards, state
from iobs.pruning.network.selection import Selection, require_usable, unobserved
from iobs.pruning.recipe import Recipe
from iobs.pruning.runtime.ranks import current
from iobs.pruning.runtime.scratch import scratch_folder
from iobs.pruning.samples.batches import Batch, first_sample, kind_of
from iobs.pruning.store import Names
from iobs.pruning.workspace import Request


class OffloadedStore(BlockwiseStore):
    """A model in main memory that is pruned in place, with one to three of its blocks on a device at a time.

    `iobs.prune` takes it in place of a model. The model is traced first: every `nn.Module` is taken that runs exactly
    along a chain of blocks. What is outside the blocks stays on the device. Main memory holds the model and a copy of
    what is pruned. If the run fails or is interrupted the weights are as before.

        store = OffloadedStore(model, device="cuda")
        report = iobs.prune(store, batches, 0.5, "fast")

    Args:
        model: any `nn.Module` with its weights in main memory.
        device: of the computations.
        streams: place of the hidden states between blocks, and of the parameters that steps of the whole network
            change. "device", "memory" (page-locked for a GPU) or "disk" (mapped files). "auto": the first of them with
            enough room, but the disk for a CPU.
        folder: where the mapped files are, in a temporary folder of their own. None: the default folder for temporary
            files, which may be small or lie in main memory.

    Raises:
        ModelError, LayerSelectionError: as in `require_usable`.
        ProblemError: the device cannot be used, or there is no such place.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device = "cuda",
        streams: Place = "auto",
        folder: str | Path | None = None,
    ) -> None:
        require_usable(model)
        self._memory = MemoryBlocks(model, _usable(device))
        super().__init__(self._memory, [], streams)
        self.folder = None if folder is None else expanded(folder)
        self._layers: tuple[Layer, ...] = ()
        self._hidden: list[Tensor] = []  # hidden states at the first block without data, by batch

    # ---- before the run
    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Context of all work with the model: what is outside its lists of blocks is on the device."""
        with super().prepared(), scratch_folder(self.folder) as folder, self._storing(folder):
            self._dense_done, self._pruned, self._changed = set(), set(), set()
            try:
                self._memory.settle(parts_of(self.model))
                yield
            finally:
                self._memory.send_all()
                self._dense, self._original = None, {}

    def select(self, include: Names, ignore: Names, depthwise: bool, embeddings: bool = False) -> Selection:
        """Choose the layers to prune, among those that classes show; arguments and errors as in `Store.select`."""
        selection = super().select(include, ignore, depthwise, embeddings)
        return Selection(selection.layers, unobserved(selection.skipped))

    @contextmanager
    def runnable(self) -> Iterator[None]:
        """Context in which the model can be called on the device, without gradients and outside a run."""
        with self.prepared(), self._memory.on_call(parts_of(self.model)):
            yield

    def check(self, batches: Sequence[Batch], selection: Selection, holdout: float) -> Selection:
        """Check the batches and the layers on the model, and find its blocks.

        Raises:
            CalibrationError: the model does not take a batch.
            ModelError: the model does not run exactly along a chain of blocks.
        """
        with self._memory.on_call(parts_of(self.model)):
            selection = super().check(batches, selection, holdout)
        self._layers = selection.layers
        with torch.no_grad():
            self._blocks = self._find_blocks(batches)
        return selection

    def _find_blocks(self, batches: Sequence[Batch]) -> list[Block]:
        """The blocks of the model; afterwards everything else is on the device, and buffers are as before.

        The chain is compared with the whole model on one sample of each kind of batches, and its order on all batches.
        """
        parts = parts_of(self.model)

        def along(chain: list[Block]) -> AbstractContextManager[None]:
            self._memory.settle([*parts, *chain])
            return self._memory.on_call([*parts, *chain])

        samples = [first_sample(batch) for batch in {kind_of(batch): batch for batch in batches}.values()]
        with self._memory.on_call(parts):
            chain = exact_chain(self.model, samples, self._layers, along)
        if not chain:
            raise self._no_chain()
        self._memory.settle(chain)
        self._hidden = [self._first_hidden(batch, chain) for batch in batches]
        return chain

    def _first_hidden(self, batch: Batch, chain: list[Block]) -> Tensor:
        """The input of the first block on a batch, without data."""
        stream = Stream(self.model, [batch], chain, strict=True)
        try:
            stream.advance(BEFORE)
        except ChainError as error:
            raise self._no_chain() from error
        return stream.hidden[0].to("meta")

    def _no_chain(self) -> ModelError:
        return ModelError(
            f"{type(self.model).__name__} does not run exactly along a chain of blocks, so its blocks cannot visit "
            f"{self.device} one at a time; prune it on a device that holds all of it, such as the CPU."
        )

    def require_space(self, checkpoint: str | Path | None) -> None:
        """Check, before any work, that main memory and the disk have room for the run that was checked last.

        Main memory holds copies of the dense weights. The disk holds the hidden states and fitted parameters that have
        their place in files, and the rest of a checkpoint if it is on the same disk.

        Raises:
            OutputError: main memory or the disk has too little room.
        """
        assert self._plan is not None
        copied, free = self._plan.copied_bytes, available() // current().size
        if 0 < free < copied:
            raise OutputError(
                f"Copies of the dense weights take {copied / 1e9:.1f} GB, and main memory has {free / 1e9:.1f} GB "
                "left. Free some, prune fewer layers at a time (include), or prune from files (StreamedStore)."
            )
        require_place(self.streams, self._plan.streams_bytes, free and max(1, free - copied))
        folder = self._storage.folder
        needed = current().size * self._plan.spilled_bytes + self._plan.left_of_checkpoint(checkpoint, folder)
        free_disk = shutil.disk_usage(folder).free
        if self._plan.spilled_bytes and free_disk < needed:
            raise OutputError(
                f"Files of hidden states and fitted parameters need {needed / 1e9:.1f} GB, and {folder.parent} has "
                f"{free_disk / 1e9:.1f} GB left. Free some, give fewer samples, or choose a folder on another disk "
                "(OffloadedStore(folder=); for a command its output)."
            )

    def chain(self, batches: Sequence[Batch], layers: tuple[Layer, ...]) -> list[Block]:
        """The blocks of the model that `check` has found."""
        return self._blocks

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Every stored tensor with its name, in main memory."""
        return ((name, self._memory.at_home(value)) for name, value in state(self.model))

    def remember(self, parameters: Collection[str] | None) -> None:
        """Keep copies in main memory of the layers to prune, of all vectors and of all buffers."""
        names = {layer.key for layer in self._layers} | {name for name, _ in self.model.named_buffers()}
        for name, value in self.state():
            if name in names or value.ndim == 1:
                self._original[name] = value.clone()

    @contextmanager
    def running(self, patterns: Mapping[Layer, Pattern]) -> Iterator[None]:
        """Context of a run: gives main memory the new weights, or the original ones if the run fails."""
        try:
            if self._compares:
                self._dense = self._memory.dense_copy(self._blocks, self._original)
            with self._memory.on_call(self._blocks):  # for callbacks
                yield
            self._memory.save(self._changed)
            self._memory.send_all()
        except BaseException:  # an interrupted user must get the weights back too
            self._memory.send_all()
            self.reset()
            raise

    def _save(self, block: Block, changed: Collection[str]) -> None:
        self._memory.save(changed)

    # ---- cost of a run
    def foreseen(
        self, request: Request, batches: Sequence[Batch], within: float | None = None, timed: bool = True
    ) -> Plan:
        """Predict memory and time of a run; the model is traced for that.

        Raises:
            ProblemError, CalibrationError, ModelError, OutputError: as a run would.
        """
        self.require_possible(request.recipe)
        with self.prepared(), evaluating(self.model):
            layers = self.check(batches, Selection(tuple(request.patterns), {}), request.holdout).layers
            request = replace(request, patterns={layer: request.patterns[layer] for layer in layers})
            return self.plan(request, batches, timed, within)

    def _sizes(self, layers: Sequence[Layer], batches: Sequence[Batch], recipe: Recipe) -> ModelSizes:
        """The sizes of the model and of the hidden states that `check` has found."""
        first = self._hidden[0]
        width = first.shape[1] if first.ndim == 4 else first.shape[-1]
        values = dict(self.state())
        return ModelSizes(
            weights=[sum(tensor.numel() for tensor in self._memory.visitors(block)) for block in self._blocks],
            model_bytes=sum(value.nbytes for value in values.values()),
            dtype=first.dtype,
            copied_bytes=sum(values[name].nbytes for name in {layer.key for layer in layers}),
            positions=[hidden.numel() // width for hidden in self._hidden],
            width=width,
        )


def _usable(device: str | torch.device) -> torch.device:
    """The device with its number.

    Raises:
        ProblemError: it cannot be used.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ProblemError(f"The device {device} cannot be used ({first_line(error)}); give another one.") from error


# ---- blocks of a model in main memory that visit a device: their parameters and buffers move there, and back
class MemoryBlocks:
    """A model in main memory whose blocks visit a device. What is outside the blocks stays on the device.

    A visiting parameter stays the same object, with its data on the device. So optimizers, tied weights and name
    patterns see no difference.

    Args:
        module: the model, in main memory.
        device: the device.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self._away: dict[int, tuple[Tensor, Tensor]] = {}  # visiting tensors with their data in main memory
        self._residents: set[int] = set()  # identities of the tensors that stay on the device

    def settle(self, blocks: Sequence[Block]) -> None:
        """Bring everything outside the blocks to the device, and send the blocks back.

        Parameters that two blocks share count as outside. So does the first parameter of the model, whose device tells
        models where they compute. Changes on the device are lost.

        Args:
            blocks: disjoint or nested.
        """
        self.send_all()
        outermost = sorted(blocks, key=lambda block: block.path.count("."))
        owners: dict[int, set[str | None]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in _named_tensors(self.module):
            owner = next((block.path for block in outermost if block.holds(name)), None)
            owners.setdefault(id(tensor), set()).add(owner)
            tensors[id(tensor)] = tensor
        inside = {key for key, paths in owners.items() if len(paths) == 1 and None not in paths}
        inside -= {id(parameter) for parameter in list(self.module.parameters())[:1]}
        self._residents = tensors.keys() - inside
        self._bring(tensors[key] for key in self._residents)

    def visitors(self, block: Block) -> list[Tensor]:
        """The tensors of a block that visit the device."""
        tensors = {id(tensor): tensor for name, tensor in _named_tensors(self.module) if block.holds(name)}
        return [tensor for key, tensor in tensors.items() if key not in self._residents]

    def load(self, block: Block) -> None:
        """Move copies of a block to the device; tensors that are there stay."""
        self._bring(self.visitors(block))

    def drop(self, block: Block) -> None:
        """Give the tensors of a block their values in main memory."""
        self._send(self.visitors(block))

    def save(self, changed: Iterable[str]) -> None:
        """Copy the values of parameters on the device to main memory."""
        for name in changed:
            parameter = self.module.get_parameter(name)
            if id(parameter) in self._away:
                self._away[id(parameter)][1].copy_(parameter.data)

    def send_all(self) -> None:
        """Give all tensors their values in main memory."""
        self._send([tensor for tensor, _ in self._away.values()])

    def at_home(self, tensor: Tensor) -> Tensor:
        """The values of a tensor in main memory, which a visit does not change."""
        return self._away[id(tensor)][1] if id(tensor) in self._away else tensor.detach()

    def dense_copy(self, blocks: Sequence[Block], originals: Mapping[str, Tensor]) -> MemoryBlocks:
        """A second model: its blocks lie in copies of the original weights, and matrices outside them are shared.

        Args:
            blocks: of the model.
            originals: the copies, by name; other tensors of the blocks are shared.

        Raises:
            ModelError: an attribute of a module cannot be copied.
        """
        shared: dict[int, object] = {}
        inside = {id(tensor) for block in blocks for tensor in self.visitors(block)}
        for name, tensor in state(self.module):
            if id(tensor) in inside:
                data = originals.get(name, self.at_home(tensor)).detach()
                shared[id(tensor)] = nn.Parameter(data, False) if isinstance(tensor, nn.Parameter) else data
            elif name not in originals:
                shared[id(tensor)] = tensor
        dense = MemoryBlocks(dense_copy(self.module, shared), self.device)
        copies = dict(_named_tensors(dense.module))
        names = [name for name, tensor in _named_tensors(self.module) if id(tensor) in self._residents]
        dense._residents = {id(copies[name]) for name in names}
        return dense

    @contextmanager
    def on_call(self, blocks: Iterable[Block]) -> Iterator[None]:
        """Context in which the model can be called, without gradients: a block visits the device for its own call.

        A block that is there already is called as it is.
        """
        paths = dict.fromkeys(block.path for block in blocks)
        modules = [self.module.get_submodule(path) for path in paths]
        with replaced_forwards([(module, self._visiting(module)) for module in modules]):
            yield

    def _visiting(self, module: nn.Module) -> Callable[..., object]:
        """The forward of a module, before which its tensors come to the device, and after which they leave."""
        forward = module.forward
        tensors = {id(tensor): tensor for _, tensor in _named_tensors(module)}

        @wraps(forward)
        def run(*args: object, **kwargs: object) -> object:
            visitors = [tensor for key, tensor in tensors.items() if key not in self._residents]
            if any(id(tensor) in self._away for tensor in visitors):
                return forward(*args, **kwargs)
            try:
                self._bring(visitors)
                return forward(*args, **kwargs)
            finally:
                self._send(visitors)

        return run

    def _bring(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._away:
                self._away[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.to(self.device, copy=True)

    def _send(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) in self._away:
                _, tensor.data = self._away.pop(id(tensor))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all their names, without those of lazy layers that were never called."""
    for tensors in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        yield from ((name, tensor) for name, tensor in tensors if not is_lazy(tensor))


def parts_of(model: nn.Module) -> list[Block]:
    """The elements of the outermost lists and sequences of a model, which can visit the device before a chain is known.

    Elements without modules inside are left out: their weights stay on the device, where hooks read them.
    """
    parts: list[Block] = []
    for path, module in model.named_modules():
        if any(part.holds(path) for part in parts) or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for name, child in module.named_children():
            if any(True for _ in child.children()):
                parts.append(Block(joined(path, name), 0))
    return parts
