"""The common part of stores that hold one or two blocks of a model in the memory of the device at a time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from iobs.core.patterns import Unstructured
from iobs.pruning.blockwise.spill import Place, Room, Storage, chosen, place_named
from iobs.pruning.blockwise.streamable import require_streamable
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.cost.memory import Plan, Sizes
from iobs.pruning.cost.prices import measure
from iobs.pruning.cost.work import forecast
from iobs.pruning.forecast import Forecast
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import Recipe, Rounds
from iobs.pruning.runtime.memory import available, left
from iobs.pruning.runtime.ranks import current
from iobs.pruning.runtime.scratch import existing
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.subsets import Samples
from iobs.pruning.store import Store
from iobs.pruning.workspace import Decisions


class BlockwiseStore(Store):
    """A model of which one or two blocks are in the memory of the device at a time.

    Hidden states between the blocks have a place of their own. Subclasses say where the blocks are otherwise, and bring
    a block and its dense copy in `enter`.

    Args:
        model: the module.
        device: of the computations.
        streams: place of the hidden states and of fitted parameters; see `spill.chosen`.
    """

    whole = False

    def __init__(self, model: nn.Module, device: torch.device, streams: Place) -> None:
        super().__init__(model)
        self.streams = place_named(streams)
        self._recipe = Recipe()
        self._storage = Storage("device", device, Path())
        self._known: set[int] = set()  # blocks whose dense weights are no longer needed

    @property
    def device(self) -> torch.device:
        """The device that blocks are computed on."""
        return self._storage.device

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

    # ---- residency
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

    def snapshot(self) -> dict[str, Tensor]:
        """No tensors: there is only one round."""
        return {}

    # ---- cost of a run
    def _sizes(self, layers: Sequence[Layer], blocks: Sequence[int], itemsize: int) -> Sizes:
        """The sizes of the model, without those of the data.

        Args:
            layers: the layers to prune.
            blocks: number of weights in every block.
            itemsize: bytes of a number in a forward pass.
        """
        config = getattr(self.model, "config", None)
        vocabulary, hidden = (int(getattr(config, name, 0) or 0) for name in ("vocab_size", "hidden_size"))
        names = {name for name, _ in self.model.named_parameters()}
        biased = any(f"{layer.path}.bias" in names for layer in layers)
        return Sizes(layers, max(blocks), itemsize, 0, 0, vocabulary, biased, None, hidden, len(blocks))

    def _forecast(
        self, chain: list[Block], layers: Sequence[Layer], batches: Sequence[Batch], recipe: Recipe, holdout: float
    ) -> Forecast:
        """The work of a run and its time on this machine."""
        patterns = dict.fromkeys(layers, Unstructured(0.5))
        work, prices = measure(self, recipe, patterns, chain, Samples.of(batches), holdout)
        return forecast(work, prices, recipe, Decisions(Rounds(), None, blocks=recipe.blocks))

    def _placed(self, found: Plan, folder: Path, written: int = 0) -> Plan:
        """The plan with the hidden states in the place that was asked for, or in the first one with room.

        Args:
            found: the plan.
            folder: of files.
            written: bytes of other files that the run writes there, once for all ranks.

        Raises:
            OutputError: no place has enough room.
        """
        on_cpu = self.device.type == "cpu"
        room = self._room(found, folder, written)
        return found.placed(chosen(self.streams, on_cpu, found.streams_bytes, room), self.device)

    def _room(self, found: Plan, folder: Path, written: int) -> Room:
        """Free bytes in each place for this rank, besides what the run itself takes; each rank has its own device."""
        ranks = current().size
        disk = (shutil.disk_usage(existing(folder)).free - written) // ranks
        memory = available() // ranks - found.copied_bytes
        if self.device.type == "cpu":
            return Room(0, memory, disk)
        return Room(left(self.device) - found.peak_bytes, memory, disk)
