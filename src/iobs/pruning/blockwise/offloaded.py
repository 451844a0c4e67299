"""Store of a model in main memory whose blocks visit a device, such as a GPU that is too small for the model."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from iobs.core.paths import expanded
from iobs.core.patterns import Pattern
from iobs.errors import ModelError, OutputError, ProblemError, first_line, is_out_of_memory
from iobs.pruning.blockwise.spill import Place, Storage, require_place
from iobs.pruning.blockwise.store import BlockwiseStore
from iobs.pruning.blockwise.visits import Visits, parts_of
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.halving import halved
from iobs.pruning.calibration.replay import BEFORE, ChainError, Stream, exact_chain
from iobs.pruning.cost.memory import Plan, plan, token_count
from iobs.pruning.finetune.scoring import NOT_COPIED
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import evaluating, state
from iobs.pruning.network.selection import Selection, require_module, unobserved
from iobs.pruning.recipe import Recipe
from iobs.pruning.reconstruction.step_sizes import in_steps
from iobs.pruning.runtime.memory import MemoryWatch, available
from iobs.pruning.runtime.ranks import current
from iobs.pruning.runtime.scratch import scratch_folder
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.store import Names


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
        ModelError: the model is no module.
        ProblemError: the device cannot be used, or there is no such place.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device = "cuda",
        streams: Place = "auto",
        folder: str | Path | None = None,
    ) -> None:
        require_module(model)
        super().__init__(model, _usable(device), streams)
        self.folder = None if folder is None else expanded(folder)
        self._plan: Plan | None = None  # of the run that was checked last, without times
        self.visits = Visits(model, self.device)
        self._dense: Visits | None = None  # the dense model, if the recipe compares with it
        self._blocks: list[Block] = []
        self._layers: tuple[Layer, ...] = ()
        self._hidden: list[Tensor] = []  # hidden states at the first block without data, by batch
        self._changed: set[str] = set()  # parameters that the run has changed

    # ---- before the run
    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Context of all work with the model: what is outside its lists of blocks is on the device.

        Raises:
            ModelError: weights of the model are not in memory.
        """
        away = [name for name, value in state(self.model) if value.is_meta]
        if away:
            raise ModelError(f"{away[0]} is not in memory; load the whole model into main memory first.")
        with super().prepared(), scratch_folder(self.folder) as folder:
            self._storage = Storage("device", self.device, folder)
            self._known, self._changed = set(), set()
            try:
                self.visits.settle(parts_of(self.model))
                yield
            finally:
                self.visits.send_all()
                self._storage.clear()
                self._dense, self._original = None, {}

    def select(self, include: Names, ignore: Names, depthwise: bool) -> Selection:
        """Choose the layers to prune, among those that classes show; arguments and errors as in `Store.select`."""
        found = super().select(include, ignore, depthwise)
        return Selection(found.layers, unobserved(found.skipped))

    @contextmanager
    def runnable(self) -> Iterator[None]:
        """Context in which the model can be called on the device, without gradients and outside a run."""
        with self.prepared(), self.visits.on_call(parts_of(self.model)):
            yield

    def checked(self, batches: Sequence[Batch], selection: Selection, holdout: float) -> Selection:
        """Check the batches and the layers on the model, find its blocks, and choose the place of the hidden states.

        Raises:
            CalibrationError: the model does not take a batch.
            ModelError: the model does not run exactly along a chain of blocks.
            ProblemError: a block cannot be divided into halves.
            OutputError: the hidden states have no room.
        """
        with self.visits.on_call(parts_of(self.model)):
            selection = super().checked(batches, selection, holdout)
        fit = self._recipe.blocks
        self._layers = selection.layers
        with torch.no_grad():
            self._blocks = self._chain(batches, fit is not None and fit.halves)
        self._plan = self.plan(selection, batches, self._recipe, holdout, timed=False)
        self._storage.place = cast(Place, self._plan.streams)
        return selection

    def _chain(self, batches: Sequence[Batch], halves: bool) -> list[Block]:
        """The blocks of the model; afterwards everything else is on the device, and buffers are as before.

        The chain is compared with the whole model on one sample of each kind of batches, and its order on all batches.
        """
        parts, found = parts_of(self.model), _samples(batches)

        def along(chain: list[Block]) -> AbstractContextManager[None]:
            self.visits.settle([*parts, *chain])
            return self.visits.on_call([*parts, *chain])

        with self.visits.on_call(parts):
            chain = exact_chain(self.model, found, self._layers, along)
        if not chain:
            raise self._no_chain()
        self.visits.settle(chain)
        self._hidden = [self._first_hidden(batch, chain) for batch in batches]
        if not halves:
            return chain
        members = [self.visits.members(block.holds) for block in chain]
        chain = halved(
            self.model,
            chain,
            batches[0],
            enter=lambda stage: self.visits.bring(members[stage]),
            release=lambda stage: self.visits.send(members[stage]),
        )
        self.visits.settle(chain)
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
        copied, free = self._copied(self._layers), available() // current().size
        if 0 < free < copied:
            raise OutputError(
                f"Copies of the dense weights take {copied / 1e9:.1f} GB, and main memory has {free / 1e9:.1f} GB "
                "left. Free some, prune fewer layers at a time (include), or prune from files (StreamedStore)."
            )
        assert self._plan is not None
        require_place(self.streams, self._plan.streams_bytes, free and max(1, free - copied))
        place = self._storage.folder
        needed = current().size * self._plan.spilled_bytes + self._plan.left_of_checkpoint(checkpoint, place)
        left = shutil.disk_usage(place).free
        if self._plan.spilled_bytes and left < needed:
            raise OutputError(
                f"Files of hidden states and fitted parameters need {needed / 1e9:.1f} GB, and {place.parent} has "
                f"{left / 1e9:.1f} GB left. Free some, give fewer samples, or choose a folder on another disk "
                "(OffloadedStore(folder=); for a command its output)."
            )

    def _copied(self, layers: Iterable[Layer]) -> int:
        """Bytes of the copies of the dense weights of layers."""
        values = dict(self.state())
        return sum(values[name].nbytes for name in {layer.key for layer in layers})

    def chain(self, batches: Sequence[Batch], layers: tuple[Layer, ...], halves: bool = False) -> list[Block]:
        """The blocks of the model, or their halves, that `checked` has found."""
        return self._blocks

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Every stored tensor with its name, in main memory."""
        return ((name, self.visits.at_home(value)) for name, value in state(self.model))

    def remember(self, parameters: Collection[str] | None) -> None:
        """Keep copies in main memory of the layers to prune, of all vectors and of all buffers."""
        own = {layer.key for layer in self._layers} | {name for name, _ in self.model.named_buffers()}
        for name, value in self.state():
            if name in own or value.ndim == 1:
                self._original[name] = value.clone()

    @contextmanager
    def running(self, patterns: Mapping[Layer, Pattern], memory: MemoryWatch) -> Iterator[None]:
        """Context of a run: gives main memory the new weights, or the original ones if the run fails."""
        try:
            if self._compares:
                self._dense = self._dense_model()
            with self.visits.on_call(self._blocks):  # for callbacks
                yield
            self.visits.send_all(self._identities())
        except BaseException:  # an interrupted user must get the weights back too
            self.visits.send_all()
            self.reset()
            raise

    def _dense_model(self) -> Visits:
        """The dense model: its blocks lie in the copies of the original weights, and matrices outside them are shared.

        Raises:
            ModelError: an attribute of a module cannot be copied.
        """
        known: dict[int, object] = {}
        inside = {id(tensor) for block in self._blocks for tensor in self.visits.members(block.holds)}
        for name, tensor in state(self.model):
            if id(tensor) in inside:
                data = self._original.get(name, self.visits.at_home(tensor)).detach()
                known[id(tensor)] = nn.Parameter(data, False) if isinstance(tensor, nn.Parameter) else data
            elif name not in self._original:
                known[id(tensor)] = tensor
        try:
            return Visits(copy.deepcopy(self.model, known), self.device)
        except (RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(NOT_COPIED.format(first_line(error))) from error

    # ---- residency
    def enter(self, stage: int) -> None:
        """Bring a block and its dense copy to the device."""
        if 0 <= stage < len(self._blocks):
            holds = self._blocks[stage].holds
            self.visits.bring(self.visits.members(holds))
            if self._dense is not None and stage not in self._known:
                self._dense.bring(self._dense_members(stage))

    def leave(self, stage: int) -> None:
        """Send a block back with its changes."""
        self._send_back(stage, self._identities())

    def release(self, stage: int) -> None:
        """Send a block back without its changes."""
        self._send_back(stage, ())

    def _send_back(self, stage: int, changed: Collection[int]) -> None:
        if 0 <= stage < len(self._blocks):
            self.visits.send(self.visits.members(self._blocks[stage].holds), changed)
            if self._dense is not None:
                self._dense.send(self._dense_members(stage))

    def release_dense(self, stage: int) -> None:
        """Send the dense block back for good."""
        self._known.add(stage)
        if self._dense is not None:
            self._dense.send(self._dense_members(stage))

    def _dense_members(self, stage: int) -> list[Tensor]:
        """The tensors of a dense block that visit the device: those that visit it in the model."""
        assert self._dense is not None
        own = {id(tensor) for tensor in self.visits.members(self._blocks[stage].holds)}
        names = [name for name, tensor in state(self.model) if id(tensor) in own]
        found = dict(state(self._dense.model))
        return [found[name] for name in names]

    def _identities(self) -> set[int]:
        """The identities of the changed parameters."""
        return {id(self.model.get_parameter(name)) for name in self._changed}

    # ---- weights
    @property
    def dense_model(self) -> nn.Module | None:
        """The dense model with the same blocks on the device, if the recipe needs it."""
        return None if self._dense is None else self._dense.model

    def write(self, layer: Layer, weight: Tensor) -> None:
        """Write a layer's pruned weights, (rows, columns)."""
        self._changed.add(layer.key)
        super().write(layer, weight)

    def write_tensor(self, name: str, value: Tensor) -> None:
        """Write a parameter that changes besides the pruned weights, such as a bias."""
        self._changed.add(name)
        super().write_tensor(name, value)

    def put(self, layer: Layer, tensor: Tensor) -> None:
        """Write a layer's tensor from a checkpoint, in the shape and dtype of the parameter."""
        self._changed.add(layer.key)
        super().put(layer, tensor)

    # ---- cost of a run
    def foreseen(self, selection: Selection, batches: Sequence[Batch], recipe: Recipe, holdout: float) -> Plan:
        """Predict memory and time of a run; the model is traced for that.

        Raises:
            ProblemError, CalibrationError, ModelError, OutputError: as a run would.
        """
        self.require_possible(recipe)
        with self.prepared(), evaluating(self.model):
            return self.plan(self.checked(batches, selection, holdout), batches, recipe, holdout)

    def plan(
        self, selection: Selection, batches: Sequence[Batch], recipe: Recipe, holdout: float, timed: bool = True
    ) -> Plan:
        """Predict memory and time of a run; `timed` False measures no speeds. Call it after `checked`."""
        first = self._hidden[0]
        width = first.shape[1] if first.ndim == 4 else first.shape[-1]
        tokens = [hidden.numel() // width for hidden in self._hidden]
        numbers = [sum(one.numel() for one in self.visits.members(block.holds)) for block in self._blocks]
        sizes, steps = self._sizes(selection.layers, numbers, first.dtype.itemsize), tokens
        if recipe.blocks is not None:
            share = sum(tokens) / sum(map(token_count, batches))  # an image has the positions of its hidden state
            part = in_steps(self.model, Samples.of(batches), recipe.blocks)
            steps = [round(share * token_count(batch)) for batch in part.batches]
        found = plan(
            replace(sizes, hidden=width),
            recipe,
            holdout,
            self.device,
            tokens=tokens,
            steps=steps,
            samples=sum(map(data_batches.size, batches)),
            outside_bytes=0,  # stays on the device
            model_bytes=sum(value.nbytes for _, value in self.state()),
            parked=self.device.type == "cpu" and self.streams in ("auto", "disk"),
        )
        found = self._placed(replace(found, copied_bytes=self._copied(selection.layers)), self._storage.folder)
        return found.timed(self._forecast(self._blocks, selection.layers, batches, recipe, holdout)) if timed else found


def _samples(batches: Sequence[Batch]) -> list[Batch]:
    """The first sample of one batch of each kind; kinds differ in shapes or dtypes."""
    kinds = {
        (data_batches.layout(one), tuple(each.dtype for each in data_batches.tensors(one))): one for one in batches
    }
    return [data_batches.first_sample(one) for one in kinds.values()]


def _usable(device: str | torch.device) -> torch.device:
    """The device with its number.

    Raises:
        ProblemError: it cannot be used.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ProblemError(f"The device {device} cannot be used ({first_line(error)}); give another one.") from error
