"""Targets: the output that every layer should match, by the value of the recipe's field `target`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from iobs.pruning.descent.scoring import Scoring
from iobs.pruning.network.layers import Layer
from iobs.pruning.store import Store


@dataclass(frozen=True)
class Target:
    """The output T D that a layer V X should match: ||V X - T D||^2.

    With a drift E of the residual the layer should match T D + E.

    Attributes:
        teacher: (scoring, dense) -> the model whose layer inputs are D; None: D = X, the layer's own input. `dense`
            is True if the model still has its dense weights.
        dense: True if T and its bias are those of the dense model, otherwise the current ones of the layer.
        drift: True if E is the drift of the residual, otherwise E = 0.
    """

    teacher: Callable[[Scoring, bool], nn.Module | None]
    dense: bool = False
    drift: bool = False

    def weights(self, store: Store, layer: Layer) -> Tensor | None:
        """T, (rows, columns); None: the layer's current weights."""
        return store.dense(layer) if self.dense else None

    def biases(self, store: Store, name: str) -> Tensor | None:
        """The bias that belongs to T, by parameter name, (rows,); None: the current bias."""
        return store.dense_tensor(name) if self.dense else None


TARGETS: dict[str, Target] = {
    # The layer's current weights on its own input, as in the paper.
    "layer": Target(lambda scoring, dense: None),
    # The dense model's output on inputs that have not drifted.
    "dense": Target(lambda scoring, dense: scoring.reference, dense=True),
    # The same; a layer that adds to a residual matches the dense model's sum.
    "residual": Target(lambda scoring, dense: scoring.reference, dense=True, drift=True),
    # The output of the model at the start of the round: the dense one at first, the fine-tuned one later.
    "model": Target(lambda scoring, dense: scoring.reference if dense else scoring.current_copy()),
}
