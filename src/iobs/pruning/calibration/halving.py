"""Division of the blocks of a chain into halves, found in a trace and checked on one sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from iobs.pruning.calibration.blocks import Block, Tracer, hidden_of
from iobs.pruning.calibration.half_blocks import halves_of, require_exact
from iobs.pruning.calibration.replay import BEFORE, Stream, inserted
from iobs.pruning.samples.batches import Batch, take


@torch.no_grad()
def halved(
    model: nn.Module,
    chain: list[Block],
    batch: Batch,
    dtype: torch.dtype | None = None,
    enter: Callable[[int], None] = lambda stage: None,
    release: Callable[[int], None] = lambda stage: None,
) -> list[Block]:
    """The chain with two halves in place of every block.

    The first of several blocks with the same children is traced and checked, and stands for the others.

    Args:
        model: the model.
        chain: its blocks.
        batch: calibration data; its first sample is run.
        dtype: of the computations in blocks; None: that of the model.
        enter: brings a block into memory.
        release: releases it.

    Raises:
        ProblemError: a block cannot be divided.
    """
    stream = Stream(model, [take(batch, torch.arange(1))], chain)
    stream.advance(BEFORE)
    if dtype is not None:
        stream.cast_arguments(dtype)
        stream.hidden = [hidden.to(dtype) for hidden in stream.hidden]
    known: dict[tuple[object, ...], list[Block]] = {}
    found: list[Block] = []
    for stage, block in enumerate(chain):
        module = model.get_submodule(block.path)
        kind = type(module), block.hidden, block.rest, *(name for name, _ in module.named_children())
        if kind not in known:
            enter(stage)
            tracer = Tracer()
            with tracer.recording(model, block.path):
                output = hidden_of(stream.run(stage, 0))
            assert output is not None
            halves = halves_of(module, block, tracer)
            arguments = inserted(stream.arguments[0][stage], block.hidden, stream.state(0))
            require_exact(module, halves, *arguments, output)
            release(stage)
            known[kind] = halves
        found += [Block(block.path, block.hidden, one.rest, one.half) for one in known[kind]]
    return found
