"""Store: reads, writes, copies and restores the weights of a model while it is pruned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.pruning.audit import audit_layers
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.chains import exact_chain
from iobs.pruning.calibration.observe import multiplied_as_they_are, observe, require_repeatable
from iobs.pruning.calibration.replay import Residency
from iobs.pruning.network.folding import folded
from iobs.pruning.network.layers import Layer, overlapping
from iobs.pruning.network.modes import keeping_buffers, put, state, structure_kept_on_failure
from iobs.pruning.network.selection import Selection, select
from iobs.pruning.recipe import Recipe
from iobs.pruning.report import AuditRow
from iobs.pruning.samples.batches import Batch, collect, require_all_accepted, require_known_tokens

Names = str | Sequence[str] | None


class Store(Residency):
    """The weights of a model that is in memory, and copies of the original weights.

    Subclasses keep the weights elsewhere, such as `OffloadedStore` and `StreamedStore`. `iobs.prune` takes a
    store in place of a model.

    Args:
        model: any `nn.Module`.
        built_by_code: the result is written as weights, and code that builds the full width makes the rest anew.

    Attributes:
        whole: True if the model can be run as a whole, as losses, gradients and a dense copy need it.
        in_memory: True if all weights are in memory, of a device or not. Then a sweep may begin again after its blocks
            were left, and parameters keep the mark of the user that they are frozen.
    """

    whole = True
    in_memory = True

    def __init__(self, model: nn.Module, built_by_code: bool = False) -> None:
        self.model, self.built_by_code = model, built_by_code
        self._original: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return next(self.model.parameters()).device

    @property
    def dense_model(self) -> nn.Module | None:
        """The dense model beside the model, if the store holds one; models in memory are copied by `Scoring`."""
        return None

    # ---- before the run
    def runnable(self) -> AbstractContextManager[None]:
        """Context in which the model can be called, without gradients and outside a run."""
        return nullcontext()

    def require_possible(self, recipe: Recipe) -> None:
        """Raise unless the recipe works with the part of the model that is in memory at one time.

        Raises:
            ProblemError: it does not; the message names the settings.
        """

    def prepared(self) -> AbstractContextManager[None]:
        """Context of all work with the model: weights that are computed from other parameters are parameters."""
        return folded(self.model)

    def observe(self, batches: Sequence[Batch], seed: int) -> bool:
        """Find the layers that a forward pass shows but no class of a module; `select` then includes them.

        Returns:
            True if there are any.

        Raises:
            CalibrationError: the model does not take a batch, and no class shows a layer.
        """
        return observe(self.model, batches, seed)

    def select(self, include: Names, ignore: Names, depthwise: bool, embeddings: bool = False) -> Selection:
        """Choose the layers to prune; arguments and errors as in `network.selection.select`."""
        return select(self.model, include, ignore, depthwise=depthwise, embeddings=embeddings)

    def collect_batches(self, data: Iterable[Batch] | Batch) -> list[Batch]:
        """Collect and check the calibration batches.

        Raises:
            CalibrationError, NonFiniteError: as in `samples.batches.collect`, or the model does not know a token id.
        """
        batches = collect(data)
        require_known_tokens(self.model, batches)
        return batches

    def check(self, batches: Sequence[Batch], selection: Selection, holdout: float) -> Selection:
        """Check the batches and the layers on the model; `holdout` is the share of the samples that is held out.

        Returns:
            The selection without layers whose forward changes the weight before multiplying.

        Raises:
            CalibrationError: the model does not take a batch.
            ModelError: it gives two outputs for one batch.
        """
        with keeping_buffers(self.model):
            require_all_accepted(self.model, batches)
            require_repeatable(self.model, batches[0])
            return multiplied_as_they_are(self.model, selection, batches[0])

    def place(self, request: Any, batches: Sequence[Batch]) -> None:
        """Choose the place of hidden states for a `Request`: nothing to choose for a model in memory."""

    def require_space(self, checkpoint: str | Path | None) -> None:
        """Check, before any work, that disk and memory have room for a run; `check` comes first.

        Args:
            checkpoint: directory of intermediate results, or None.

        Raises:
            OutputError: they have not.
        """

    def chain(self, batches: Sequence[Batch], layers: tuple[Layer, ...]) -> list[Block]:
        """The blocks along which the model can be run, possibly none. Call it while the model is dense.

        Args:
            batches: calibration data.
            layers: the layers to prune.
        """
        return exact_chain(self.model, batches, layers)

    def as_dense(self) -> AbstractContextManager[object]:
        """Context at the start of a run in which the model computes what the dense model does."""
        return nullcontext()

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Every stored tensor with its name; a checkpoint is valid only for these tensors."""
        return state(self.model)

    def remember(self, parameters: Collection[str] | None) -> None:
        """Keep copies of all tensors that the run may change: parameters and all buffers. Earlier copies are dropped.

        Args:
            parameters: names of the parameters to copy; None for all.
        """
        self.forget()
        for name, value in self.model.named_parameters():
            if parameters is None or name in parameters:
                self._original[name] = value.detach().clone()
        self._original |= {name: value.detach().clone() for name, value in self.model.named_buffers()}

    @contextmanager
    def running(self, patterns: Mapping[Layer, Pattern]) -> Iterator[None]:
        """Context of a run: restores the original weights if the run fails or is interrupted.

        Args:
            patterns: of every layer, for subclasses.
        """
        try:
            yield
        except BaseException:  # an interrupted user must get the weights back too
            self.reset()
            raise

    @contextmanager
    def unchanged_by_failure(self) -> Iterator[None]:
        """Context in which a model may lose units and modules: after an error it is as before, weights included."""
        self.forget()  # of an earlier run
        try:
            with structure_kept_on_failure(self.model):
                yield
        except BaseException:
            self.reset()  # by names and shapes, so after the structure
            raise

    def set_patterns(self, patterns: Mapping[Layer, Pattern]) -> None:
        """Receive the pattern of every layer after the allocation, for subclasses."""

    # ---- weights of a layer
    def stored_dtype(self, layer: Layer) -> torch.dtype:
        """The dtype that a layer's weights are stored in."""
        return layer.stored(self.model).dtype

    def dense(self, layer: Layer) -> Tensor | None:
        """The layer's weights in the dense model, (rows, columns); None if the current weights are still dense."""
        return layer.matrix(self._original[layer.key])

    def dense_tensor(self, name: str) -> Tensor | None:
        """A parameter of the dense model by name; None if the current parameter is still dense."""
        return self._original[name]

    def write(self, layer: Layer, weight: Tensor) -> None:
        """Write a layer's pruned weights, (rows, columns)."""
        layer.write(self.model, weight)

    def write_tensor(self, name: str, value: Tensor) -> None:
        """Write a parameter that changes besides the pruned weights, such as a bias."""
        self.model.get_parameter(name).detach().copy_(value)

    def put(self, layer: Layer, tensor: Tensor) -> None:
        """Write a layer's tensor from a checkpoint, in the shape and dtype of the parameter."""
        layer.tensor(self.model).copy_(tensor)

    # ---- weights of the model
    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all tensors that the run may change, by name."""
        return {name: value.detach().clone() for name, value in state(self.model) if name in self._original}

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Write the tensors of a snapshot."""
        for name, tensor in state(self.model):
            if name in values:
                put(tensor, values[name])

    def reset(self) -> None:
        """Write the original weights."""
        self.restore(self._original)

    def forget(self) -> None:
        """Drop the copies of the original weights."""
        self._original = {}

    def support(self) -> dict[str, Tensor]:
        """Support of the original weights, by parameter: True where an entry is not zero. Matrices only."""
        return {name: value != 0 for name, value in self._original.items() if value.ndim > 1}

    def lost_zeros(self) -> tuple[int, int]:
        """Zeros of the original matrices, and how many of these entries have values now; none of matrices of zeros."""
        now, support = dict(self.model.named_parameters()), self.support()
        zeros = [(now[name].detach(), ~there) for name, there in support.items() if name in now and there.any()]
        return sum(int(there.sum()) for _, there in zeros), sum(int((one != 0)[there].sum()) for one, there in zeros)

    def zeros(self) -> int:
        """Number of zeros among all parameters, counted entry by entry; shared memory counts once."""
        again = overlapping(self.model)
        named = self.model.named_parameters()
        return sum(int((value.detach() == 0).sum()) for name, value in named if name not in again)

    def audit(self, patterns: Mapping[Layer, Pattern]) -> list[AuditRow]:
        """Count the zeros of every pruned layer, entry by entry.

        Raises:
            AuditError: fewer zeros than the pattern asks for.
        """
        return audit_layers(self.model, patterns)
