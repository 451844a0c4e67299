"""Halves of blocks: the attention and the perceptron of a block that adds to its residual stream in between.

A half is a link of a chain like a block. Its run is that of the whole block without the modules of the other half. The
run of the first half ends where the second half begins. In the run of the second half, the modules of the first half
return zeros, which change no hidden state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from iobs.errors import ProblemError
from iobs.pruning.calibration.blocks import Block, Call, Half, Tracer, with_hidden
from iobs.pruning.calibration.hooks import Args, Kwargs
from iobs.pruning.network.modes import replaced_forwards


class _Ended(Exception):
    """Raised where the second half begins."""


def run_half(module: nn.Module, block: Block, args: Args, kwargs: Kwargs) -> object:
    """Run one half of a block; returns its hidden state, the second half in the format of the block.

    Args:
        module: the whole block.
        block: the half.
        args: arguments of the block, with the hidden state at the beginning of the half.
        kwargs: keyword arguments of the block.
    """
    half = block.half
    assert half is not None
    hidden = kwargs[block.hidden] if isinstance(block.hidden, str) else args[block.hidden]
    if half.ends is None:
        with replaced_forwards((module.get_submodule(name), _zeros(hidden, rest)) for name, rest in half.without):
            return module(*args, **kwargs)
    reached: list[Tensor] = []

    def end(*given: Tensor, **named: Tensor) -> object:
        reached.extend([*given, *named.values()][:1])
        raise _Ended

    with replaced_forwards([(module.get_submodule(half.ends), end)]):
        try:
            module(*args, **kwargs)
        except _Ended:
            return reached[0]
    raise AssertionError(f"{block.path} did not call {half.ends}")


def halves_of(module: nn.Module, block: Block, tracer: Tracer) -> list[Block]:
    """The two halves of a traced block.

    Args:
        module: the block.
        block: its place in the model.
        tracer: its calls in one forward pass.

    Raises:
        ProblemError: the block does not add to its hidden state between two of its modules.
    """
    whole = next(call for call in tracer.calls if call.path == block.path)
    given = next(value for where, value in whole.arguments if where == block.hidden)
    direct = [call for call in tracer.calls if call.path.rpartition(".")[0] == block.path]
    names = [_name(call) for call in direct]
    once = max(Counter(names).values(), default=0) == 1
    outputs = {given}
    for place, call in enumerate(direct if once else []):
        begins = call.arguments[0][1] if call.arguments else given
        if place and begins not in outputs and not any(one.output is None for one in direct[:place]):
            return _divided(module, block, direct[:place], call)
        outputs.update(() if call.output is None else (call.output,))
    raise _impossible(block)


def _divided(module: nn.Module, block: Block, before: Sequence[Call], call: Call) -> list[Block]:
    """The halves of a block whose second half begins with a call; each module belongs to one half."""
    first = frozenset(_name(one) for one in before)
    held = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    if any(True for _ in module.parameters(recurse=False)):
        raise _impossible(block)
    without = tuple((_name(one), one.rest) for one in before)
    return [
        replace(block, rest=None, half=Half(first, _name(call))),
        replace(block, half=Half(frozenset(held - first), None, without)),
    ]


@torch.no_grad()
def require_exact(module: nn.Module, halves: Sequence[Block], args: Args, kwargs: Kwargs, output: Tensor) -> None:
    """Check on one batch that two halves in a row give the output of their block, bit for bit.

    On the meta device, without weights, only the shape is compared.

    Raises:
        ProblemError: they do not.
    """
    hidden = run_half(module, halves[0], args, kwargs)
    assert isinstance(hidden, Tensor)
    where = halves[1].hidden
    if isinstance(where, str):
        kwargs = {**kwargs, where: hidden}
    else:
        args = (*args[:where], hidden, *args[where + 1 :])
    found = run_half(module, halves[1], args, kwargs)
    found = found[0] if isinstance(found, tuple) else found
    if isinstance(found, Tensor) and found.is_meta:
        equal = found.shape == output.shape
    else:
        equal = isinstance(found, Tensor) and torch.equal(found, output)
    if not equal:
        raise _impossible(halves[0])


def _impossible(block: Block) -> ProblemError:
    return ProblemError(
        f"halves of blocks: {block.path} cannot be divided, because its modules do not add to one hidden state in two "
        "steps, the attention and the perceptron; take blocks.halves=false."
    )


def _name(call: Call) -> str:
    return call.path.rpartition(".")[2]


def _zeros(hidden: Tensor, rest: tuple[object, ...] | None) -> Callable[..., object]:
    return lambda *args, **kwargs: with_hidden(torch.zeros_like(hidden), rest)
