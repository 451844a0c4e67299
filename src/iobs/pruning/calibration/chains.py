"""Chains of blocks: their candidates in a trace of module calls, their check on real data, and what blocks return."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from iobs.errors import ModelError, unless_out_of_memory
from iobs.pruning.calibration.blocks import Block, Call, Tracer, Value, hidden_of, inside, rest_of, with_hidden
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.calibration.replay import (
    BEFORE,
    ChainError,
    StopForward,
    Stream,
    cast_floats,
    hidden_argument,
    replaced_blocks,
)
from iobs.pruning.network.calls import Args, Kwargs
from iobs.pruning.network.layers import Layer, joined
from iobs.pruning.network.selection import output_heads
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples.batches import Batch

Mark = tuple[torch.Size, int]  # shape of a tensor and weighted sum of its bits
_PIECE = 2**20  # numbers whose bits are summed at once
_ENOUGH_TOKENS = 512  # of text that show whether a model runs along its blocks


def exact_chain(
    model: nn.Module,
    data: Sequence[Batch],
    layers: tuple[Layer, ...],
    along: Callable[[list[Block]], AbstractContextManager[None]] = lambda chain: nullcontext(),
) -> list[Block]:
    """The longest chain of blocks along which the model can be run exactly; empty if there is none.

    Args:
        model: the model.
        data: calibration data.
        layers: the layers to prune.
        along: context in which a candidate is run.
    """
    for chain in find_chains(model, _few_samples(model, min(data, key=batches.size)), layers):
        if len(chain) > 1:
            with along(chain):
                if running_along_is_exact(model, chain, data, layers):
                    return chain
    return []


@torch.no_grad()
def running_along_is_exact(
    model: nn.Module, chain: list[Block], data: Sequence[Batch], layers: Sequence[Layer]
) -> bool:
    """True if the chain gives every layer the same inputs, in its own stage, as the whole model does.

    Then blocks pass on nothing but the hidden state. No layer is called from two stages or from a branch between two
    blocks. The output is compared too, for modules that are not pruned. Inputs are compared on the batch of the fewest
    samples, and on the batches of the smallest and the largest samples. For other batches only the order of the blocks
    is checked.
    """
    by_count = sorted(range(len(data)), key=lambda index: batches.size(data[index]))
    sizes = [sum(tensor[:1].numel() for tensor in batches.tensors(batch) if tensor.ndim) for batch in data]
    compared = {by_count[0], min(by_count, key=sizes.__getitem__), max(by_count, key=sizes.__getitem__)}
    try:
        for index, batch in enumerate(data):
            if index not in compared:
                Stream(model, [batch], chain, strict=True).advance(BEFORE)
                continue
            few = [_few_samples(model, batch)]
            if _input_marks(Stream(model, few, chain, strict=True), layers) != _input_marks(
                Stream(model, few, []), layers
            ):
                return False
    except unless_out_of_memory(Exception):  # the model cannot be run in stages, so it is run whole
        return False
    return True


def _few_samples(model: nn.Module, batch: Batch) -> Batch:
    """The first samples of a batch of text without padding, which all take the same way; other batches whole."""
    positions, mask = batches.positions(batch), outputs.attended(model, batch)
    if positions == 1 or not (mask is None or bool(mask.all())):
        return batch
    return batches.neighbours(batch, 0, max(1, math.ceil(_ENOUGH_TOKENS / positions)))


def _input_marks(stream: Stream, layers: Sequence[Layer]) -> tuple[dict[str, list[Mark]], Mark]:
    """Marks of the inputs of every layer in its stage, by name, and of the output; on the first batch."""
    marks: dict[str, list[Mark]] = {}

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        marks.setdefault(layer.name, []).append(_mark(value))

    for stage in stream.stages:
        others = [layer for layer in layers if layer.name not in marks]
        with captured_inputs(stream.model, stream.layers_of(stage, others), note):
            output = stream.run(stage, 0)
        if 0 <= stage < len(stream.chain):
            stream.pass_on(0, output)
        else:
            stream.advance(stage)
    return marks, _mark(outputs.logits(output))


def _mark(value: Tensor) -> Mark:
    """A checksum of a tensor; all activations of a model together may not fit into memory."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    total = 0
    for part in torch.split(value.contiguous().view(integers).flatten(), _PIECE):
        factors = torch.arange(1, 2 * len(part), 2, device=part.device)
        total = (31 * total + int((part.long() * factors).sum())) % 2**64  # integers: exact in every order
    return value.shape, total


@torch.no_grad()
def find_chains(model: nn.Module, batch: Batch, layers: tuple[Layer, ...]) -> Iterator[list[Block]]:
    """Candidate chains of modules: the input of each module is the output of the module before it.

    The first chain holds the most layers. It may cut off a residual connection around a module, so the second chain
    consists of whole elements of the model's ModuleLists. The caller must check a chain on real data. Modules may be
    nested anywhere; computations outside the chain are left to the model.
    """
    tracer = Tracer()
    tracer.run(model, batch)
    counts = Counter(call.path for call in tracer.calls)
    once = [call for call in tracer.calls if counts[call.path] == 1 and call.path and call.output is not None]
    elements = {
        joined(path, name)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for name, _ in module.named_children()
    }
    yield _longest(once, layers)
    yield _longest([call for call in once if call.path in elements], layers)


def _longest(calls: list[Call], layers: tuple[Layer, ...]) -> list[Block]:
    """The chain among the calls that holds the most layers, by dynamic programming."""
    counts = {call.path: sum(inside(layer.path, call.path) for layer in layers) for call in calls}
    makers: dict[Value, list[Call]] = {}
    best: dict[str, tuple[tuple[int, int], Call | None, int | str]] = {}
    for call in sorted(calls, key=lambda call: call.ended):
        # In the order in which calls end, every possible predecessor of a call already has its score.
        first = next((where for where, _ in call.arguments), None)
        if first is None:
            continue
        score, before, hidden = (counts[call.path], 1), None, first
        for where, value in call.arguments:
            for maker in makers.get(value, []):
                reached = best[maker.path][0]
                total = (reached[0] + counts[call.path], reached[1] + 1)
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
    # Links without layers at both ends (embeddings, a last norm) are left to the model.
    useful = [index for index, block in enumerate(chain) if counts[block.path]]
    return chain[useful[0] : useful[-1] + 1] if useful else []


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
    sample = [batches.first_sample(batch)]
    last = max(kinds.index(kind) for kind in kinds)  # here all classes have been seen
    stream = Stream(model, sample, chain[: last + 1])
    stream.advance(BEFORE)
    stream.cast_arguments(dtype)
    hidden = stream.hidden[0].to(dtype)
    rests: dict[type, tuple[object, ...] | None] = {}
    alone = True  # no block returns a tensor beside its hidden state
    for stage in range(last + 1):
        stream.hidden = [hidden]
        enter(stage)
        output = stream.run(stage, 0)
        release(stage)
        next_hidden = hidden_of(output)
        if next_hidden is None:
            raise _no_chain(model)
        rests[kinds[stage]], hidden = rest_of(output), next_hidden
        alone = alone and not (isinstance(output, (tuple, list)) and outputs.tensors_of(output[1:]))
    blocks = [replace(block, rest=rests[kind]) for block, kind in zip(chain, kinds, strict=True)]
    try:
        Stream(model, sample, blocks, strict=True).advance(BEFORE)
    except ChainError as error:
        raise _no_chain(model) from error
    _require_one_pass(model, sample[0], blocks)
    if not alone:
        _require_hidden_state_alone(Stream(model, sample, blocks[:2]), dtype, enter, release)
    return blocks


def _require_hidden_state_alone(
    stream: Stream, dtype: torch.dtype, enter: Callable[[int], None], release: Callable[[int], None]
) -> None:
    """Raise unless the second block gives the same on the hidden state alone as inside the model.

    Blocks that return a residual beside the hidden state, and add it in the next block, do not.

    Raises:
        ModelError: it gives something else.
    """
    model = stream.model
    expected: Tensor | None = None
    modules = [model.get_submodule(block.path) for block in stream.chain]

    def begin(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        enter(modules.index(module))
        arguments: tuple[Args, Kwargs] = cast_floats((args, kwargs), dtype, {})
        return arguments

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
        batches.forward(model, stream.data[0])
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
    """Raise unless no block is called again after the last one, as in models that run their blocks in cycles.

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
        return with_hidden(hidden_argument(block, args, kwargs), block.rest)

    def stop(head: nn.Module, args: Args) -> None:
        raise StopForward

    with ExitStack() as stack:
        for head in output_heads(model):
            stack.callback(head.register_forward_pre_hook(stop).remove)
        stack.enter_context(replaced_blocks(model, chain, pass_on))
        stack.enter_context(suppress(StopForward))
        batches.forward(model, sample)


def _no_chain(model: nn.Module) -> ModelError:
    return ModelError(
        f"The blocks of {type(model).__name__} do not pass one hidden state from each to the next, so they cannot be "
        "run one by one; prune the model in memory instead."
    )
