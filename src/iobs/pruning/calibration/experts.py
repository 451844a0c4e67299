"""Experts in one parameter: their loads, and the Gram matrices of the tokens that each of them receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from iobs.pruning.calibration.gram import Gram, Statistics, statistics_of
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.calibration.inputs import require_finite
from iobs.pruning.calibration.replay import Stream
from iobs.pruning.network.layers import Layer
from iobs.pruning.runtime.ranks import Ranks

EXPERT_MEMORY = 2**30  # bytes of the Grams of experts that are computed in one pass over the data


@dataclass
class Stack:
    """The experts of one parameter in one stage of a sweep.

    Args:
        stream: the model, at the stage.
        stage: of the experts.
        layers: the experts.
        batches: (position in the stream, held out or not, number of the caller's batch) of the batches of this rank.
        ranks: processes that share the batches.

    Attributes:
        wanted: experts whose Grams will be needed; all of them unless another sequence is set.
    """

    stream: Stream
    stage: int
    layers: tuple[Layer, ...]
    batches: Sequence[tuple[int, bool, int]]
    ranks: Ranks
    wanted: Sequence[Layer] = ()
    _statistics: dict[Layer, Statistics] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.wanted = self.layers

    @torch.no_grad()
    def loads(self) -> list[float]:
        """The number of tokens of every expert times the squared norm of its matrix, about the energy of its outputs.

        Tokens are those of all ranks.
        """
        counts = dict.fromkeys(self.layers, 0)

        def note(layer: Layer, value: Tensor, held_out: bool, number: int) -> None:
            counts[layer] += value.numel() // layer.shape[1]

        self._run(self.layers, note)
        tokens = torch.tensor([*counts.values()], device=self._device)
        self.ranks.sum(tokens)
        norms = [float(layer.tensor(self.stream.model).double().square().sum()) for layer in self.layers]
        return [count * norm for count, norm in zip(tokens.tolist(), norms, strict=True)]

    def statistics(self, layer: Layer) -> Statistics:
        """The Grams of the tokens of one of the wanted experts.

        One pass computes the Grams of as many experts as fit into `EXPERT_MEMORY`, when the first of them is needed.
        """
        if layer not in self._statistics:
            size = max(1, EXPERT_MEMORY // (2 * 8 * layer.shape[1] ** 2))
            first = self.wanted.index(layer) // size * size
            self._statistics = {}  # before others take its place
            self._statistics = self._measure(self.wanted[first : first + size])
        return self._statistics[layer]

    @torch.no_grad()
    def _measure(self, experts: Sequence[Layer]) -> dict[Layer, Statistics]:
        """The statistics of some experts, from one pass over the data."""

        def empty(layer: Layer) -> Gram:
            return Gram.empty(layer, self._device, False)

        pairs = {layer: (empty(layer), empty(layer)) for layer in experts}

        def note(layer: Layer, value: Tensor, held_out: bool, number: int) -> None:
            require_finite([value], layer, number)
            pairs[layer][held_out].add(value.reshape(1, -1, layer.shape[1]))

        self._run(experts, note)
        for gram in (gram for pair in pairs.values() for gram in pair):
            gram.sum_over(self.ranks)
            gram.finish()
        return {layer: statistics_of(*pairs[layer], routed=True) for layer in experts}

    def _run(self, experts: Sequence[Layer], note: Callable[[Layer, Tensor, bool, int], None]) -> None:
        """Run the stage, and call `note(layer, input, held out, number)` for every input of some experts."""
        for index, held_out, number in self.batches:

            def note_input(
                layer: Layer, module: nn.Module, value: Tensor, held_out: bool = held_out, number: int = number
            ) -> None:
                note(layer, value, held_out, number)

            with captured_inputs(self.stream.model, experts, note_input):
                self.stream.run(self.stage, index)

    @property
    def _device(self) -> torch.device:
        return self.layers[0].tensor(self.stream.model).device
