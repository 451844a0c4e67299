"""Time of a network as a function of its widths, from measured times of its blocks.

The smallest module that holds all readers and writers of a site is timed alone, with some of the site's widths. Its
inputs and outputs keep their shapes, so the time that a width saves in the module is what it saves in the network. The
savings of sites add up. Fewer units are not always faster: kernels of convolutions work on 8 or 16 channels at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from iobs.core.modes import precision_of_user
from iobs.core.structured import Runtime
from iobs.pruning.network.calls import before_calls
from iobs.pruning.network.copies import copied
from iobs.pruning.network.modes import fused_attention, inferring, keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.structure.removal import remove
from iobs.pruning.structure.units import Site
from iobs.pruning.widths.clock import Clock, Example, TimedCall, called_in, interleaved
from iobs.pruning.widths.costs import WidthBySite

_MOST = 16  # measured widths of one site
_BLOCK = 8  # channels that kernels of convolutions work on at once, or a half of them


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
            known = width in times.widths or site.kind != "channels"
            if known and times.saved(width) > times.saved(useful[-1]) + 1e-3 * times.seconds[-1]:
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
        examples = _examples(model, network, {site.owner for site in offered})
        by_signature: dict[object, Times] = {}
        times: dict[str, Times] = {}
        for site, widths in offered.items():
            example = examples.get(site.owner)
            if example is None:
                continue  # the first sample does not call it as a module
            key = _signature(site, example)
            if key not in by_signature:
                some = grid(site, widths)
                calls = [called_in(runtime, _narrower(example, site, width)) for width in some]
                by_signature[key] = Times(some, tuple(_timed(calls, clock)))
            times[site.name] = by_signature[key]
        return Latency(_timed([called_in(runtime, network)], clock)[0], times)


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
    """Seconds of calls with the fused attention and the precision that a model has outside of a run."""
    with fused_attention(True), precision_of_user():
        return clock(calls)


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


def _signature(site: Site, example: Example) -> object:
    """Properties that the time of a block depends on: blocks with equal signatures are timed once.

    Shapes are not all of it: a stride or a dilation changes the time and no shape of a parameter.
    """
    shapes = tuple((name, tuple(value.shape)) for name, value in example.module.state_dict().items())
    inputs = tuple(
        tuple(one.shape) for one in tree_leaves((example.arguments, example.named)) if isinstance(one, Tensor)
    )
    inner = site.inside()
    parts = tuple((one.key, one.axis, tuple(map(len, one.index))) for one in inner.slices)
    return repr(example.module), shapes, inputs, parts


def _narrower(example: Example, site: Site, width: int) -> Example:
    """The example with a narrower copy of its module."""
    module = copied(example.module)
    inner = site.inside()
    if width < site.count:
        remove(module, [inner], {inner.name: range(width)})
    return Example(module, example.arguments, example.named)
