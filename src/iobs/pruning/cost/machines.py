"""Memory and time of a run on machines that are not here, from the shapes of a network and stated rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from iobs.core.patterns import Unstructured
from iobs.pruning.cost.memory import Sizes, held_blocks, moment_bytes, peaks
from iobs.pruning.cost.prices import UPDATE_BYTES
from iobs.pruning.cost.work import Prices, Work, forecast, inputs_by_width
from iobs.pruning.descent.batches import tokens_of_block_step
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import Recipe, Rounds
from iobs.pruning.workspace import Decisions

_ROOM = 0.95  # share of the device's memory that a run can use


@dataclass(frozen=True)
class Rates:
    """Speeds of a machine.

    Args:
        product: floating-point operations per second of a product in the dtype of the blocks.
        solve: the same in float32, as solvers need it.
        transfer: bytes per second from the place of the weights to the device; infinite if they stay there.
        double: operations per second of a product in float64; None: half of `solve`.
        memory: bytes per second of entrywise work; infinite: not counted.
        inner: operations per second of the products of layer inputs for Grams; None: `solve`.
    """

    product: float
    solve: float
    transfer: float = float("inf")
    double: float | None = None
    memory: float = float("inf")
    inner: float | None = None

    def prices(self, weights: int, head: int) -> Prices:
        """The prices of the work on a network whose blocks, and whose head, have these numbers of weights."""
        return Prices(
            forward=2.0 * weights / self.product,
            gram=1 / (self.inner or self.solve),
            solve=1 / self.solve,
            double=1 / (self.double or self.solve / 2),
            update=UPDATE_BYTES / self.memory,
            byte=1 / self.transfer,
            head=2.0 * head / self.product,
        )


@dataclass(frozen=True)
class Machine:
    """One or several equal GPUs.

    Args:
        name: of the GPU.
        memory: bytes of one GPU.
        rates: of one GPU.
        count: number of GPUs.
    """

    name: str
    memory: int
    rates: Rates
    count: int = 1


def _gpu(
    name: str,
    gigabytes: int,
    operations: tuple[float, float, float],
    transfer: tuple[float, float],
    bfloat16: bool = True,
) -> Machine:
    """A GPU at half of its vendor's figures.

    Args:
        name: of the GPU.
        gigabytes: of its memory.
        operations: of products in 16 bits, in float32 and in float64, TFLOP/s.
        transfer: of the bus and of its memory, GB/s.
        bfloat16: True if it multiplies inputs in bfloat16 as they are.
    """
    product, solve, double = (value / 2 * 1e12 for value in operations)
    bus, memory = (value / 2 * 1e9 for value in transfer)
    return Machine(name, gigabytes * 10**9, Rates(product, solve, bus, double, memory, product if bfloat16 else None))


GPUS = (
    _gpu("16 GB (T4)", 16, (65, 8.1, 0.25), (16, 320), bfloat16=False),
    _gpu("24 GB (RTX 4090)", 24, (165, 82.6, 1.3), (32, 1008)),
    _gpu("80 GB (H100 SXM)", 80, (989, 67, 34), (64, 3350)),
)


@dataclass(frozen=True)
class Network:
    """The shapes of a network of blocks.

    Args:
        layers: matrices to prune.
        block: number of weights in the largest block.
        outside: number of weights outside the blocks.
        weights: number of all weights.
        vocabulary: number of outputs.
        itemsize: bytes of a stored weight.
        width: of the residual stream; 0: the least number of columns of a layer.
        blocks: number of blocks.
        context: most tokens of a sample; None: not limited.
    """

    layers: Sequence[Layer]
    block: int
    outside: int
    weights: int
    vocabulary: int
    itemsize: int = 2
    width: int = 0
    blocks: int = 1
    context: int | None = None


@dataclass(frozen=True)
class Need:
    """Memory and time of a run on a machine.

    Attributes:
        machine: the machine.
        peak_bytes: peak memory of one GPU, by phase, without the hidden states.
        streams_bytes: hidden states between blocks, second moments of rows, and parameters that steps of the whole
            network change, per rank.
        phases: seconds by phase.
    """

    machine: Machine
    peak_bytes: dict[str, int]
    streams_bytes: int
    phases: dict[str, float]

    @property
    def fits(self) -> bool:
        """True if every phase fits into the memory of a GPU."""
        return max(self.peak_bytes.values()) <= _ROOM * self.machine.memory

    @property
    def streams(self) -> str:
        """Place of the hidden states: on the device if they fit there beside the rest."""
        room = _ROOM * self.machine.memory - max(self.peak_bytes.values())
        return "device" if self.streams_bytes <= room else "memory"


def need(
    network: Network,
    recipe: Recipe,
    samples: int,
    length: int,
    batch: int,
    machine: Machine,
    holdout: float = 0.0,
    itemsize: int | None = None,
) -> Need:
    """Predict the memory and time of a run.

    Args:
        network: the shapes.
        recipe: how to prune.
        samples: number of calibration samples.
        length: tokens per sample; at most the context of the network.
        batch: samples per forward pass.
        machine: where it runs; the ranks share the samples.
        holdout: share of the samples that is held out.
        itemsize: bytes of a number in blocks; None: as they are stored.
    """
    held, size, fit = held_blocks(recipe), itemsize or network.itemsize, recipe.blocks
    length = min(length, network.context or length)
    tokens, at_once = samples * length, min(batch, samples) * length
    step = at_once if fit is None else min(tokens, tokens_of_block_step(length, batch, fit))
    sizes = Sizes(
        network.layers,
        network.block,
        size,
        at_once,
        step,
        network.vocabulary,
        score=network.itemsize,
        hidden=network.width,
        blocks=network.blocks,
    )
    outside = network.outside * network.itemsize if fit is not None else 0
    peak_bytes = {name: outside + peak for name, peak in peaks(sizes, recipe, holdout > 0).items()}
    workload = Work(
        network.layers,
        samples,
        tokens,
        holdout,
        network.blocks,
        step,
        inputs_by_width(network.layers, network.blocks),
        network.itemsize * network.weights,
        ranks=machine.count,
    )
    streams = held.streams * size * workload.swept(recipe).positions * sizes.width // machine.count
    rates = machine.rates if size < 4 else replace(machine.rates, product=machine.rates.solve)
    decided = Decisions(Rounds(), None, blocks=fit)
    prices = rates.prices(workload.weights, network.vocabulary * sizes.width)
    phases = forecast(workload, prices, recipe, decided).phases
    kept = held.masters * workload.weights + moment_bytes(network.layers, recipe, Unstructured(0.5))
    return Need(machine, peak_bytes, streams + kept, phases)
