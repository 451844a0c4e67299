"""Shortcuts through a block: modules that need not run again once the input of one layer is known.

After q, k and v are pruned, attention is computed once, up to the input of the output projection. The layers behind it
need only this input: the attention module is replaced by one that returns the output projection of the input, and
computes nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from iobs.pruning.calibration.blocks import Call, hidden_of, with_hidden
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import replaced_forwards


@dataclass(frozen=True)
class Shortcut:
    """A module whose output follows from the input of one layer.

    Args:
        path: of the module.
        layer: the layer.
        applied: True: the module's hidden state is the output of the layer; False: it is the layer's input.
        rest: entries that the module returns after the hidden state, as in `Block`.
    """

    path: str
    layer: Layer
    applied: bool
    rest: tuple[object, ...] | None

    @contextmanager
    def taken(self, model: nn.Module, value: Callable[[], Tensor]) -> Iterator[None]:
        """Replace the forward of the module; restored on exit.

        Args:
            model: the model.
            value: returns the input of the layer; a copy, since the model may change it in place.
        """

        def forward(*_: object, **__: object) -> object:
            found = value()
            if self.applied:
                found = model.get_submodule(self.layer.path)(found)
            return with_hidden(found, self.rest)

        with replaced_forwards([(model.get_submodule(self.path), forward)]):
            yield


@dataclass
class Shortcuts:
    """The shortcuts of one block, and the inputs of their layers as far as they are known.

    Args:
        found: the shortcuts.
        keep: (position of a shortcut, index of a batch, input) -> the tensor to store.
        fetch: a stored tensor -> a copy of it on the device of the model.

    Attributes:
        known: inputs by layer and index of the batch.
    """

    found: Sequence[Shortcut]
    keep: Callable[[int, int, Tensor], Tensor]
    fetch: Callable[[Tensor], Tensor] = Tensor.clone
    known: dict[tuple[Layer, int], Tensor] = field(default_factory=dict, init=False)

    def note(self, layers: Sequence[Layer], index: int, value: Tensor, hidden: Tensor) -> None:
        """Store the common input of layers on a batch, if a shortcut needs it.

        An input is not stored if it takes more memory than the hidden state, or has another dtype.
        """
        if value.numel() > hidden.numel() or value.dtype != hidden.dtype:
            return
        for place, shortcut in enumerate(self.found):
            if shortcut.layer in layers:
                self.known[shortcut.layer, index] = self.keep(place, index, value)

    @contextmanager
    def taken(self, model: nn.Module, index: int) -> Iterator[None]:
        """Take the shortcuts whose inputs are known on a batch; modules are restored on exit."""
        with ExitStack() as stack:
            for one in self.found:
                if (known := self.known.get((one.layer, index))) is not None:
                    stack.enter_context(one.taken(model, partial(self.fetch, known)))
            yield


def find_shortcuts(model: nn.Module, calls: Sequence[Call], block: str, layers: Sequence[Layer]) -> list[Shortcut]:
    """The shortcuts of a block, from the module calls of one run: at most one per layer, the outermost module.

    A module qualifies under two conditions. It holds a matrix besides the matrix of the layer, and every layer inside
    it has been called once before the end of the shortcut. So all these layers are pruned when the input of the
    shortcut's layer is known.

    Args:
        model: the model.
        calls: module calls of one run of the block.
        block: path of the block.
        layers: layers that are pruned in this block.
    """
    counts = Counter(call.path for call in calls)
    once = {call.path: call for call in calls if counts[call.path] == 1}
    inner = [call for call in once.values() if call.path.startswith(f"{block}.") and call.output is not None]
    found: dict[str, Shortcut] = {}
    for layer in layers:
        own = once.get(layer.path)
        if own is None or not layer.is_called or layer.expert is not None:
            continue
        outer: Call | None = None
        for call in inner:
            applied = layer.path.startswith(f"{call.path}.") and call.output == own.output
            given = call.ended < own.began and any(value == call.output for _, value in own.arguments[:1])
            if not (applied or given) or not _holds_more(model, call.path, layer):
                continue
            inside = [one for one in layers if one.path.startswith(f"{call.path}.") or one.path == call.path]
            if any(one.path not in once or once[one.path].began > own.began for one in inside):
                continue
            if outer is None or call.began < outer.began:
                outer = call
        if outer is not None:
            applied = layer.path.startswith(f"{outer.path}.")
            found.setdefault(outer.path, Shortcut(outer.path, layer, applied, outer.rest))
    return [*found.values()]


def _holds_more(model: nn.Module, path: str, layer: Layer) -> bool:
    """Check that a module holds a matrix besides that of a layer; without one a shortcut saves nothing."""
    own = model.get_parameter(layer.key)
    return any(value.ndim > 1 and value is not own for value in model.get_submodule(path).parameters())


@torch.no_grad()
def same_output(given: object, expected: object) -> bool:
    """Check that two outputs of a block have the same hidden state, bit for bit."""
    one, other = hidden_of(given), hidden_of(expected)
    return one is not None and other is not None and one.device == other.device and torch.equal(one, other)
