"""Formats of the outputs of blocks whose weights are not all in memory, found by running one sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from iobs.errors import ModelError
from iobs.pruning.calibration.blocks import Block, hidden_of, rest_of, with_hidden
from iobs.pruning.calibration.hooks import Args, Kwargs
from iobs.pruning.calibration.replay import BEFORE, ChainError, StopForward, Stream, cast_floats, replaced_blocks
from iobs.pruning.network.selection import output_heads
from iobs.pruning.samples.batches import Batch, forward, take
from iobs.pruning.samples.outputs import tensors_of


@torch.no_grad()
def with_formats(
    model: nn.Module,
    chain: list[Block],
    batch: Batch,
    dtype: torch.dtype,
    enter: Callable[[int], None],
    release: Callable[[int], None],
) -> list[Block]:
    """The blocks of a chain with what they return after the hidden state; blocks of one class return the same.

    Args:
        model: the model.
        chain: its blocks, all whole.
        batch: calibration data; its first sample is run.
        dtype: of the computations in blocks.
        enter: brings a block into memory.
        release: releases it.

    Raises:
        ModelError: a block does not read the hidden state that the block before it gives, reads more of the output of
            that block, or is called again.
    """
    kinds = [type(model.get_submodule(block.path)) for block in chain]
    sample = [take(batch, torch.arange(1))]
    last = max(kinds.index(kind) for kind in kinds)  # here all classes have been seen
    stream = Stream(model, sample, chain[: last + 1])
    stream.advance(BEFORE)
    stream.cast_arguments(dtype)
    hidden = stream.hidden[0].to(dtype)
    found: dict[type, tuple[object, ...] | None] = {}
    alone = True  # no block returns a tensor beside its hidden state
    for stage in range(last + 1):
        stream.hidden = [hidden]
        enter(stage)
        output = stream.run(stage, 0)
        release(stage)
        given = hidden_of(output)
        if given is None:
            raise _no_chain(model)
        found[kinds[stage]], hidden = rest_of(output), given
        alone = alone and not (isinstance(output, (tuple, list)) and tensors_of(output[1:]))
    known = [replace(block, rest=found[kind]) for block, kind in zip(chain, kinds, strict=True)]
    try:
        Stream(model, sample, known, strict=True).advance(BEFORE)
    except ChainError as error:
        raise _no_chain(model) from error
    _require_one_pass(model, sample[0], known)
    if not alone:
        _require_hidden_state_alone(Stream(model, sample, known[:2]), dtype, enter, release)
    return known


def _require_hidden_state_alone(
    stream: Stream, dtype: torch.dtype, enter: Callable[[int], None], release: Callable[[int], None]
) -> None:
    """Check that the second block gives the same on the hidden state alone as inside the model.

    Blocks that return a residual beside the hidden state, and add it in the next block, do not.

    Raises:
        ModelError: it gives something else.
    """
    model = stream.model
    expected: Tensor | None = None
    modules = [model.get_submodule(block.path) for block in stream.chain]

    def begin(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        enter(modules.index(module))
        found: tuple[Args, Kwargs] = cast_floats((args, kwargs), dtype, {})
        return found

    def end(module: nn.Module, args: Args, output: object) -> None:
        nonlocal expected
        release(modules.index(module))
        if module is modules[-1]:
            expected = hidden_of(output)
            raise StopForward

    with ExitStack() as stack, suppress(StopForward):
        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end).remove)
        forward(model, stream.data[0])
    stream.advance(BEFORE)
    stream.cast_arguments(dtype)
    stream.hidden = [stream.hidden[0].to(dtype)]
    for stage in range(len(modules)):
        enter(stage)
        stream.advance(stage)
        release(stage)
    assert expected is not None
    if not torch.allclose(stream.hidden[0].float(), expected.float(), rtol=1e-2, atol=1e-3, equal_nan=True):
        raise _no_chain(model)


def _require_one_pass(model: nn.Module, sample: Batch, chain: list[Block]) -> None:
    """Check that no block is called again after the last one, as in models that run their blocks in cycles.

    The blocks pass their input on. The pass ends at the output head, whose scores of a long text may have no room.

    Raises:
        ModelError: names the block.
    """
    called: set[int] = set()

    def pass_on(position: int, args: Args, kwargs: Kwargs) -> object:
        block = chain[position]
        if position in called:
            raise ModelError(
                f"{type(model).__name__} calls {block.path} more than once in a forward pass, so its blocks cannot be "
                "run one by one; prune the model in memory instead."
            )
        called.add(position)
        return with_hidden(kwargs[block.hidden] if isinstance(block.hidden, str) else args[block.hidden], block.rest)

    def stop(head: nn.Module, args: Args) -> None:
        raise StopForward

    with ExitStack() as stack:
        for head in output_heads(model):
            stack.callback(head.register_forward_pre_hook(stop).remove)
        stack.enter_context(replaced_blocks(model, chain, pass_on))
        stack.enter_context(suppress(StopForward))
        forward(model, sample)


def _no_chain(model: nn.Module) -> ModelError:
    return ModelError(
        f"The blocks of {type(model).__name__} do not pass one hidden state from each to the next, so they cannot be "
        "run one by one; prune the model in memory instead."
    )
