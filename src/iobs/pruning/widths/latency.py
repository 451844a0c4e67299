"""Time of a network as a function of its widths, from measured times of its blocks, in torch or in ONNX Runtime.

The smallest module that holds all readers and writers of a site is timed alone, with some of the site's widths. Its
inputs and outputs keep their shapes, so the time that a width saves in the module is what it saves in the network. The
savings of sites add up. Fewer units are not always faster: kernels of convolutions work on 8 or 16 channels at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from iobs.core.modes import precision_of_user, silenced
from iobs.core.structured import Runtime
from iobs.errors import ModelError, ProblemError, first_line
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.copies import copied
from iobs.pruning.network.modes import fused_attention, inferring, keeping_buffers
from iobs.pruning.runtime.ranks import current
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.structure.units import Site, remove
from iobs.pruning.widths.costs import WidthBySite

TimedCall: TypeAlias = Callable[[], object]  # a function without arguments whose time is measured
Clock: TypeAlias = Callable[[Sequence[TimedCall]], list[float]]  # seconds of every call

NAMES: dict[Runtime, str] = {"torch": "torch", "onnx": "ONNX Runtime"}
_SLICE = 1e-3  # seconds that one measurement of a call takes at least
_SECONDS = 0.15  # seconds of measurements for one call
_ROUNDS = (5, 40)  # least and most measurements of one call
_MOST = 16  # measured widths of one site
_BLOCK = 8  # channels that kernels of convolutions work on at once, or a half of them


# ---- time of a module on one input
@dataclass(frozen=True)
class Example:
    """A module with the arguments of one call.

    Attributes:
        module: in eval mode.
        arguments: positional arguments.
        named: arguments by name.
    """

    module: nn.Module
    arguments: tuple[object, ...]
    named: dict[str, object]


class _Traced(nn.Module):
    """A module as a function of the tensors among its arguments, as an export needs it."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.module = example.module
        leaves, self.structure = tree_flatten((example.arguments, example.named))
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.leaves = leaves

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of the example."""
        return tuple(self.leaves[place] for place in self.places)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the module; returns the tensors of its output."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, inputs, strict=True):
            leaves[place] = value
        arguments, named = tree_unflatten(leaves, self.structure)
        output = self.module(*arguments, **named)
        values = output.to_tuple() if hasattr(output, "to_tuple") else output
        return tuple(value for value in tree_flatten(values)[0] if isinstance(value, Tensor))


def require_runtime(runtime: Runtime) -> None:
    """Raise unless a runtime is installed.

    Raises:
        ProblemError: it is not.
    """
    missing = [name for name in ("onnx", "onnxruntime") if runtime == "onnx" and find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise ProblemError(f"runtime=\"onnx\" needs {needed}: pip install 'iobs[timing]'")


def called_in(runtime: Runtime, example: Example) -> TimedCall:
    """The call of an example in a runtime, ready to be timed.

    Raises:
        ModelError: the module cannot be exported to ONNX, or does not run there.
    """
    return _in_torch(example) if runtime == "torch" else _in_onnx(example)


def _in_torch(example: Example) -> TimedCall:
    accelerator = next((value.device for value in example.module.parameters() if value.device.type != "cpu"), None)

    def call() -> None:
        with torch.no_grad():
            example.module(*example.arguments, **example.named)
            if accelerator is not None:
                torch.accelerator.synchronize(accelerator)  # a call only starts the work there

    return call


def _in_onnx(example: Example) -> TimedCall:
    """The call of an example in ONNX Runtime, which was called once.

    Raises:
        ModelError: the module cannot be exported, or the runtime does not take it.
    """
    try:
        call = _session(example)
        call()
        return call
    except ModelError:
        raise
    except Exception as error:  # the runtime has its own, and numpy has no bfloat16
        raise ModelError(
            f"{type(example.module).__name__} does not run in ONNX Runtime ({first_line(error)}); measure it with "
            'runtime="torch".'
        ) from error


def _session(example: Example) -> TimedCall:
    import onnxruntime

    traced = _Traced(example).eval()
    names = [f"input{number}" for number in range(len(traced.inputs))]
    content = _exported(traced, names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    used = {value.name for value in session.get_inputs()}
    inputs = {
        name: value.detach().cpu().numpy() for name, value in zip(names, traced.inputs, strict=True) if name in used
    }
    return lambda: session.run(None, inputs)


def _exported(traced: _Traced, names: Sequence[str]) -> bytes:
    """A file of ONNX. The exporter that traces is tried first; the newer one knows more, and is slower.

    Raises:
        ModelError: neither can export the module.
    """
    reason = ""
    for newer in (False, True):
        if newer and find_spec("onnxscript") is None:
            reason += "; with onnxscript another exporter is tried"
            break
        try:
            with TemporaryDirectory() as folder, _silent(), torch.no_grad(), _shared_heads_repeated():
                file = Path(folder) / "module.onnx"
                options: dict[str, Any] = {"verbose": False, "external_data": False} if newer else {}
                torch.onnx.export(traced, traced.inputs, str(file), dynamo=newer, input_names=names, **options)
                return file.read_bytes()
        except Exception as error:  # operators that an exporter does not know
            reason = reason or first_line(error)
    raise ModelError(
        f'{type(traced.module).__name__} cannot be exported to ONNX ({reason}); measure it with runtime="torch".'
    )


@contextmanager
def _silent() -> Iterator[None]:
    """Context of an export, without standard output: C++ prints the graph of a module that cannot be exported."""
    output = os.dup(1)
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        with silenced("torch.onnx"):
            yield
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(nowhere)


@contextmanager
def _shared_heads_repeated() -> Iterator[None]:
    """Context in which attention repeats keys and values that several heads share: the exporter knows no other form."""
    plain = nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **named: Any
    ) -> Tensor:
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = (tensor.repeat_interleave(times, -3) for tensor in (key, value))
        return plain(query, key, value, *args, **named)

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = plain


def interleaved(calls: Sequence[TimedCall]) -> list[float]:
    """Median seconds of every call; the calls take turns, so that a change of the machine's speed meets all of them.

    With one thread these are seconds of that thread, which other programs do not change; otherwise wall seconds.
    """
    alone = torch.get_num_threads() == 1 and not torch.accelerator.is_available()
    now = time.thread_time if alone else time.perf_counter
    repeats, rounds = [], []
    for call in calls:
        call()  # the first call prepares kernels
        began = now()
        call()
        once = max(now() - began, 1e-7)
        repeats.append(max(1, round(_SLICE / once)))
        rounds.append(min(_ROUNDS[1], max(_ROUNDS[0], round(_SECONDS / (once * repeats[-1])))))
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(max(rounds)):
        for index, call in enumerate(calls):
            if number >= rounds[index]:
                continue
            began = now()
            for _ in range(repeats[index]):
                call()
            seconds[index].append((now() - began) / repeats[index])
    return [median(of_call) for of_call in seconds]


# ---- time of a network by its widths
@dataclass(frozen=True)
class Times:
    """Seconds of the block of one site.

    Attributes:
        widths: measured widths, ascending; the last is the dense width.
        seconds: of the block at each of them.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def saved(self, width: int) -> float:
        """Seconds less than at the dense width, interpolated between measured widths."""
        return self.seconds[-1] - float(np.interp(width, self.widths, self.seconds))


@dataclass(frozen=True)
class Latency:
    """Seconds that a network takes for a call.

    Attributes:
        dense: seconds of the dense network.
        times: of the blocks, by name of the site.
    """

    dense: float
    times: Mapping[str, Times]

    def of(self, widths: WidthBySite) -> float:
        """Seconds at some widths; units without a width are all kept."""
        return self.dense - sum(self.times[name].saved(width) for name, width in widths.items() if name in self.times)

    def useful(self, site: Site, widths: Sequence[int]) -> tuple[int, ...]:
        """The widths of a site that are faster than every wider one; without a measurement the dense width alone.

        Channels get measured widths only, since the time between two of them may be anything.
        """
        times = self.times.get(site.name)
        if times is None:
            return (site.count,)
        useful = [site.count]
        for width in sorted((width for width in widths if width < site.count), reverse=True):
            measured = width in times.widths or site.kind != "channels"
            if measured and times.saved(width) > times.saved(useful[-1]) + 1e-3 * times.seconds[-1]:
                useful.append(width)
        return tuple(reversed(useful))


def measure(
    model: nn.Module,
    batch: Batch,
    offered: Mapping[Site, Sequence[int]],
    runtime: Runtime,
    clock: Clock = interleaved,
    samples: int = 1,
) -> Latency:
    """Time the blocks of all sites, and the network.

    Args:
        model: the dense model; unchanged.
        batch: its first samples are used.
        offered: widths that each site may get, ascending.
        runtime: in which the times are measured.
        clock: measures seconds of calls.
        samples: number of samples in a call.

    Raises:
        ModelError: a block cannot be exported to ONNX.
    """
    with inferring(model), keeping_buffers(model):
        network = whole(model, batch, samples)
        times: dict[str, Times] = {}
        for sites, example in _alike(model, network, offered):
            some = grid(sites[0], offered[sites[0]])
            calls = [called_in(runtime, _narrower(example, sites[0], width)) for width in some]
            measured = Times(some, tuple(_timed(calls, clock)))
            times |= dict.fromkeys((site.name for site in sites), measured)
        return Latency(_timed([called_in(runtime, network)], clock)[0], times)


def seconds_of_measuring(
    model: nn.Module, batch: Batch, offered: Mapping[Site, Sequence[int]], runtime: Runtime, samples: int = 1
) -> float:
    """Seconds that `measure` takes with these arguments, from one width of every block that it times."""
    with inferring(model), keeping_buffers(model):
        network, total = whole(model, batch, samples), 0.0
        for sites, example in _alike(model, network, offered):
            widths = grid(sites[0], offered[sites[0]])
            total += len(widths) * _seconds_of_timing(runtime, _narrower(example, sites[0], widths[len(widths) // 2]))
        return total + _seconds_of_timing(runtime, network)


def seconds_of_shares(model: nn.Module, batch: Batch, runtime: Runtime, samples: int = 1) -> float:
    """Seconds that `shares_of` takes for two networks as large as the model."""
    with inferring(model), keeping_buffers(model):
        return 2 * _seconds_of_timing(runtime, whole(model, batch, samples))


def _seconds_of_timing(runtime: Runtime, example: Example) -> float:
    """Seconds in which a call is prepared and timed."""
    began = time.perf_counter()
    _timed([called_in(runtime, example)], interleaved)
    return time.perf_counter() - began


def grid(site: Site, widths: Sequence[int]) -> tuple[int, ...]:
    """The widths of a site that are measured: multiples of a block of channels, and others in equal steps."""
    step = max(1, -(-len(widths) // _MOST))
    some = {*widths[::-step], widths[0], site.count}
    if site.kind == "channels":
        block = _BLOCK * max(1, -(-site.count // (_BLOCK * _MOST)))
        some |= {width for width in widths if width % block == 0}
    return tuple(sorted(some))


def shares_of(
    wide: nn.Module, narrow: nn.Module, batch: Batch, runtime: Runtime, clock: Clock = interleaved, samples: int = 1
) -> tuple[float, float]:
    """Seconds of two networks for the first samples of a batch, measured in turns."""
    with inferring(wide), inferring(narrow), keeping_buffers(wide), keeping_buffers(narrow):
        first, second = _timed(
            [called_in(runtime, whole(network, batch, samples)) for network in (wide, narrow)], clock
        )
    return first, second


def _timed(calls: Sequence[TimedCall], clock: Clock) -> list[float]:
    """Seconds of calls with the fused attention and the precision that a model has outside of a run.

    All ranks have those of the first, so that they choose the same widths.
    """
    with fused_attention(True), precision_of_user():
        return current().agreed(clock(calls))


def narrowed(model: nn.Module, sites: Sequence[Site], widths: WidthBySite) -> nn.Module:
    """A copy of a model with some widths, for timing: the first units of every site are kept."""
    narrow = copied(model)
    remove(narrow, sites, {site.name: range(widths[site.name]) for site in sites if widths[site.name] < site.count})
    return narrow


def whole(model: nn.Module, batch: Batch, samples: int = 1) -> Example:
    """A model with the first samples of a batch, which are repeated if the batch has fewer."""
    device = next((value.device for value in model.parameters()), torch.device("cpu"))
    rows = torch.arange(samples) % batches.size(batch)
    inputs = batches.to_device(batches.inputs(batches.take(batch, rows)), device)
    if isinstance(inputs, Mapping):
        return Example(model, (), dict(inputs))
    return Example(model, (inputs,), {})


def _examples(model: nn.Module, network: Example, paths: set[str]) -> dict[str, Example]:
    """The modules at some paths with the arguments of their first call."""
    examples: dict[str, Example] = {"": network} if "" in paths else {}

    def keep(path: str, module: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        examples.setdefault(path, Example(module, arguments, dict(named)))

    with torch.no_grad(), before_calls(model, filter(None, paths), keep):
        model(*network.arguments, **network.named)
    return examples


def _alike(
    model: nn.Module, network: Example, offered: Mapping[Site, Sequence[int]]
) -> list[tuple[list[Site], Example]]:
    """Sites whose blocks take the same time, with the call of one of the blocks.

    Sites whose block the first sample does not call as a module are left out.
    """
    examples = _examples(model, network, {site.owner for site in offered})
    alike: dict[object, tuple[list[Site], Example]] = {}
    for site in offered:
        if site.owner in examples:
            example = examples[site.owner]
            alike.setdefault(_signature(site, example), ([], example))[0].append(site)
    return [*alike.values()]


def _signature(site: Site, example: Example) -> object:
    """Properties that the time of a block depends on: blocks with equal signatures are timed once.

    Shapes are not all of it: a stride or a dilation changes the time and no shape of a parameter.
    """
    shapes = tuple((name, tuple(value.shape)) for name, value in example.module.state_dict().items())
    inputs = tuple(
        tuple(part.shape) for part in tree_leaves((example.arguments, example.named)) if isinstance(part, Tensor)
    )
    inner = site.inside()
    parts = tuple((part.key, part.axis, tuple(map(len, part.index))) for part in inner.slices)
    return repr(example.module), shapes, inputs, parts


def _narrower(example: Example, site: Site, width: int) -> Example:
    """The example with a narrower copy of its module."""
    module = copied(example.module)
    inner = site.inside()
    if width < site.count:
        remove(module, [inner], {inner.name: range(width)})
    return Example(module, example.arguments, example.named)
