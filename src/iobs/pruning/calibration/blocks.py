"""Blocks of a chain, and the trace of module calls in which chains are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from iobs.pruning.network.calls import after_calls, before_calls
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch

Value = tuple[int, int]  # a tensor at one time: its number and its version


@dataclass
class Call:
    """One call of a module.

    Args:
        path: of the module.
        arguments: position or keyword, and value, of each tensor argument.
        began: number of the hook event at which the call began.
        ended: number of the hook event at which the call ended; -1 while it runs.
        output: hidden state that the module returns, or None.
        rest: entries after the hidden state, with None in place of tensors; None if the module returns a tensor.
    """

    path: str
    arguments: list[tuple[int | str, Value]]
    began: int
    ended: int = -1
    output: Value | None = None
    rest: tuple[object, ...] | None = None


@dataclass(frozen=True)
class Block:
    """A link of a chain: a module whose hidden state is the output of the link before it.

    Args:
        path: of the module.
        hidden: position or keyword of the hidden state among the module's arguments.
        rest: entries that the module returns after the hidden state; None if it returns the hidden state alone. Tensors
            are replaced by None: they belong to one batch and to the weights at one time. A model that computes with
            them has no chain.
    """

    path: str
    hidden: int | str
    rest: tuple[object, ...] | None = None

    def holds(self, name: str) -> bool:
        """True if a module or a parameter is this block or lies inside it."""
        return inside(name, self.path)


def number_of_block(chain: Sequence[Block], name: str) -> int | None:
    """The number of the block of a chain that holds a module or a parameter; None if it is outside the blocks."""
    return next((number for number, block in enumerate(chain) if block.holds(name)), None)


@dataclass
class Tracer:
    """Record every module call of a forward pass by hooks, which are removed afterwards.

    Tensors are numbered and not kept, since all activations of a model together may not fit into memory.
    """

    calls: list[Call] = field(default_factory=list)
    events: int = 0
    numbers: MutableMapping[Tensor, int] = field(default_factory=WeakTensorKeyDictionary)
    numbered: Iterator[int] = field(default_factory=count)

    def run(self, model: nn.Module, batch: Batch) -> object:
        """Run the model on a batch and record its calls; returns its output."""
        with self.recording(model):
            return batches.forward(model, batch)

    @contextmanager
    def recording(self, model: nn.Module, within: str = "") -> Iterator[None]:
        """Record the calls of the modules at and below the path `within`; empty for the whole model."""
        stack: list[Call] = []

        def enter(path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self.events += 1
            arguments: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
            tensors = [(where, self._value(value)) for where, value in arguments if isinstance(value, Tensor)]
            stack.append(Call(path, tensors, self.events))
            self.calls.append(stack[-1])

        def leave(
            path: str, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
        ) -> None:
            self.events += 1
            call = stack.pop()
            call.ended = self.events
            hidden = hidden_of(output)
            call.output = None if hidden is None else self._value(hidden)
            call.rest = rest_of(output)

        paths = [path for path, _ in model.get_submodule(within).named_modules(prefix=within)]
        with before_calls(model, paths, enter), after_calls(model, paths, leave):
            yield

    def _value(self, tensor: Tensor) -> Value:
        if tensor not in self.numbers:
            self.numbers[tensor] = next(self.numbered)
        return self.numbers[tensor], version_of(tensor)


def hidden_of(output: object) -> Tensor | None:
    """The hidden state in a module's output: the tensor itself, or the first entry of a tuple; otherwise None."""
    if isinstance(output, (tuple, list)) and not isinstance(output, Mapping) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def rest_of(output: object) -> tuple[object, ...] | None:
    """The entries after the hidden state in a module's output, with None for tensors; None if there is no tuple."""
    if hidden_of(output) is None or not isinstance(output, (tuple, list)):
        return None
    return tree_map_only(Tensor, lambda _: None, tuple(output[1:]))  # type: ignore[no-any-return]


def with_hidden(hidden: Tensor, rest: tuple[object, ...] | None) -> object:
    """An output with a hidden state in the format of a block: the tensor, or a tuple with `rest` after it."""
    return hidden if rest is None else (hidden, *rest)


def version_of(value: Tensor) -> int:
    """The number of in-place changes of a tensor so far; 0 in inference mode, which does not count them."""
    return 0 if value.is_inference() else value._version


def inside(name: str, path: str) -> bool:
    """True if a module or a parameter is the module at a path or lies inside it."""
    return name == path or name.startswith(f"{path}.")
