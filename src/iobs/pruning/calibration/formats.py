"""Formats of the outputs of blocks whose weights are not all in memory, found by running one sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch
from torch import nn

from iobs.errors import ModelError
from iobs.pruning.calibration.blocks import Block, hidden_of, rest_of, with_hidden
from iobs.pruning.calibration.hooks import Args, Kwargs
from iobs.pruning.calibration.replay import BEFORE, ChainError, StopForward, Stream, replaced_blocks
from iobs.pruning.network.selection import output_heads
from iobs.pruning.samples.batches import Batch, forward, take


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
        ModelError: a block does not read the hidden state that the block before it gives, or is called again.
    """
    kinds = [type(model.get_submodule(block.path)) for block in chain]
    sample = [take(batch, torch.arange(1))]
    last = max(kinds.index(kind) for kind in kinds)  # here all classes have been seen
    stream = Stream(model, sample, chain[: last + 1])
    stream.advance(BEFORE)
    stream.cast_arguments(dtype)
    hidden = stream.hidden[0].to(dtype)
    found: dict[type, tuple[object, ...] | None] = {}
    for stage in range(last + 1):
        stream.hidden = [hidden]
        enter(stage)
        output = stream.run(stage, 0)
        release(stage)
        given = hidden_of(output)
        if given is None:
            raise _no_chain(model)
        found[kinds[stage]], hidden = rest_of(output), given
    known = [replace(block, rest=found[kind]) for block, kind in zip(chain, kinds, strict=True)]
    try:
        Stream(model, sample, known, strict=True).advance(BEFORE)
    except ChainError as error:
        raise _no_chain(model) from error
    _require_one_pass(model, sample[0], known)
    return known


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
