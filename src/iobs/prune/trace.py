"""What a forward pass does, module by module, and the chain of blocks that it falls apart into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from iobs.prune import batches
from iobs.prune.batches import Batch
from iobs.prune.layers import Layer

Value = tuple[int, int]  # a tensor as it was at one time: its number, and its version


@dataclass
class Call:
    """One call of a module: its inputs and output, and when it began and ended (in hook events)."""

    path: str
    arguments: list[tuple[int | str, Value]]  # where, and what
    began: int
    ended: int = -1
    output: Value | None = None
    rest: tuple[Any, ...] | None = None  # its tensors left out


@dataclass(frozen=True)
class Block:
    """A link of the chain: a module whose hidden state comes from the link before it."""

    path: str
    hidden: int | str  # position or keyword of the hidden state among its arguments
    # What it returns after the hidden state, or None where it returns that alone. None stands for its tensors: they
    # belong to one batch and to the weights of one time, so no chain exists where anything is computed from them.
    rest: tuple[Any, ...] | None = None


@dataclass
class Tracer:
    """Records every module call of a forward pass, through hooks that it removes afterwards.

    Tensors are numbered and not kept: all activations of a network together need not fit into memory.
    """

    calls: list[Call] = field(default_factory=list)
    events: int = 0
    numbers: MutableMapping[Tensor, int] = field(default_factory=WeakTensorKeyDictionary)
    numbered: Iterator[int] = field(default_factory=count)

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """Forward one batch and record it."""
        stack: list[Call] = []

        def enter(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.events += 1
            named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            given = [(where, self._value(value)) for where, value in named if isinstance(value, Tensor)]
            stack.append(Call(path, given, self.events))
            self.calls.append(stack[-1])

        def leave(output: Any) -> None:
            self.events += 1
            call = stack.pop()
            call.ended = self.events
            hidden = hidden_of(output)
            call.output = None if hidden is None else self._value(hidden)
            alone = hidden is None or isinstance(output, Tensor)
            call.rest = None if alone else tree_map_only(Tensor, lambda _: None, tuple(output[1:]))

        handles = []
        for path, module in model.named_modules():
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: enter(path, args, kwargs), with_kwargs=True
                )
            )
            handles.append(module.register_forward_hook(lambda _, __, output: leave(output)))
        try:
            return batches.forward(model, batch)
        finally:
            for handle in handles:
                handle.remove()

    def _value(self, tensor: Tensor) -> Value:
        if tensor not in self.numbers:
            self.numbers[tensor] = next(self.numbered)
        return self.numbers[tensor], tensor._version


def hidden_of(output: Any) -> Tensor | None:
    """The hidden state in a module's output: the tensor, or the first entry of a tuple."""
    if isinstance(output, (tuple, list)) and not isinstance(output, Mapping) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def with_hidden(hidden: Tensor, rest: tuple[Any, ...] | None) -> Any:
    """An output that holds a hidden state, laid out as a block lays out its own."""
    return hidden if rest is None else (hidden, *rest)


def inside(layer: Layer, path: str) -> bool:
    """Whether a layer is the module at a path or one of its parts."""
    return layer.path == path or layer.path.startswith(f"{path}.")


@torch.no_grad()
def find_chains(model: nn.Module, batch: Batch, layers: tuple[Layer, ...]) -> Iterator[list[Block]]:
    """Chains of modules, each fed by the one before, that hold the most of the layers; the longest first.

    Modules may be nested anywhere; what a network computes between, before and after them is left to the network.
    Whether running along a chain is exact is for the caller to check, on real data. Where the longest is not, since
    what goes round a module (a residual) was cut off, the chain of whole elements of the network's lists may be.
    """
    tracer = Tracer()
    tracer.run(model, batch)
    counts = Counter(call.path for call in tracer.calls)
    once = [call for call in tracer.calls if counts[call.path] == 1 and call.path and call.output is not None]
    elements = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for name, _ in module.named_children()
    }
    yield _longest(once, layers)
    yield _longest([call for call in once if call.path in elements], layers)


def _longest(calls: list[Call], layers: tuple[Layer, ...]) -> list[Block]:
    held = {call.path: sum(inside(layer, call.path) for layer in layers) for call in calls}
    makers: dict[Value, list[Call]] = {}
    best: dict[str, tuple[tuple[int, int], Call | None, int | str]] = {}
    for call in sorted(calls, key=lambda one: one.ended):
        # Calls are taken as they end, so every call that may precede this one has been scored already.
        own = (held[call.path], 1)
        first = next((where for where, _ in call.arguments), None)
        if first is None:
            continue
        score, before, hidden = own, None, first
        for where, value in call.arguments:
            for maker in makers.get(value, []):
                reached = best[maker.path][0]
                total = (reached[0] + own[0], reached[1] + 1)
                if maker.ended < call.began and total > score:
                    score, before, hidden = total, maker, where
        best[call.path] = (score, before, hidden)
        assert call.output is not None
        makers.setdefault(call.output, []).append(call)
    if not best:
        return []
    end = max(best, key=lambda path: best[path][0])
    by_path = {call.path: call for call in calls}
    chain: list[Block] = []
    link: Call | None = by_path[end]
    while link is not None:
        _, before, hidden = best[link.path]
        chain.append(Block(link.path, hidden, link.rest))
        link = before
    chain.reverse()
    # Links at the ends that hold nothing to prune (embeddings, a last norm) are left to the network itself.
    useful = [index for index, block in enumerate(chain) if held[block.path]]
    return chain[useful[0] : useful[-1] + 1] if useful else []
