"""Census of a model: the number of entries of every layer and of every other weight, each parameter counted once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import nn

from iobs.pruning.coverage import Coverage, DenseWeight
from iobs.pruning.network.layers import find_layers
from iobs.pruning.network.selection import Selection, other_parameters


@dataclass(frozen=True)
class Census:
    """Entries of the weights of a model.

    Args:
        parameters: entries of all parameters.
        entries: of every layer and of every other weight matrix, by name.
        slots: the part of a parameter behind each name; names that share it have equal slots.
    """

    parameters: int
    entries: dict[str, int]
    slots: dict[str, Hashable]

    @classmethod
    def of(cls, model: nn.Module) -> Census:
        """Count the entries of a model; its weights may be on the meta device."""
        entries: dict[str, int] = {}
        slots: dict[str, Hashable] = {}
        layers = find_layers(model)
        for layer in layers:
            entries[layer.name] = layer.weights
            slots[layer.name] = layer.slot
        for name, _, parameter in other_parameters(model, layers):
            entries[name] = parameter.numel()
            slots[name] = id(parameter)
        return cls(sum(parameter.numel() for parameter in model.parameters()), entries, slots)

    def coverage(self, selection: Selection, zeros: int) -> Coverage:
        """The coverage of a selection.

        Args:
            selection: the pruned layers, and the reasons of the other weights.
            zeros: number of zeros among all parameters.
        """
        counted = {self.slots[layer.name] for layer in selection.layers}
        pruned = sum(layer.weights for layer in selection.layers)
        dense: list[DenseWeight] = []
        for name, reason in selection.skipped.items():
            entries = 0 if self.slots[name] in counted else self.entries[name]
            counted.add(self.slots[name])
            dense.append(DenseWeight(name, reason.kind, reason.text, entries))
        return Coverage(self.parameters, pruned + sum(one.entries for one in dense), pruned, zeros, tuple(dense))
