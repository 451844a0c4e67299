"""Memory and time of a run on machines that are not here, from the shapes of a network and stated rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iobs.pruning.cost.memory_plan import forward_bytes, gathering_bytes, held_blocks, solving_bytes
from iobs.pruning.cost.phases import STEP_TOKENS, Matrix, Rates, Work, phases
from iobs.pruning.recipe import Recipe

_LOGITS = 6  # tensors of (tokens, vocabulary) in float32 at once in a divergence and its gradient
_ROOM = 0.95  # share of the device's memory that a run can use


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


def _gpu(name: str, gigabytes: int, product: float, solve: float, transfer: float) -> Machine:
    """A GPU at half of its vendor's figures: products in 16 bits and in float32 (TFLOP/s), and the bus (GB/s)."""
    return Machine(name, gigabytes * 10**9, Rates(product / 2 * 1e12, solve / 2 * 1e12, transfer / 2 * 1e9))


GPUS = (
    _gpu("16 GB (T4)", 16, 65, 8.1, 16),
    _gpu("24 GB (RTX 4090)", 24, 165, 82.6, 32),
    _gpu("80 GB (H100 SXM)", 80, 989, 67, 64),
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
    """

    layers: Sequence[Matrix]
    block: int
    outside: int
    weights: int
    vocabulary: int
    itemsize: int = 2


@dataclass(frozen=True)
class Need:
    """Memory and time of a run on a machine.

    Attributes:
        machine: the machine.
        peak_bytes: peak memory of one GPU, by phase, without the hidden states.
        streams_bytes: hidden states between blocks, and parameters that steps of the whole network change, per rank.
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
        left = _ROOM * self.machine.memory - max(self.peak_bytes.values())
        return "device" if self.streams_bytes <= left else "memory"


def need(network: Network, recipe: Recipe, samples: int, length: int, batch: int, machine: Machine) -> Need:
    """Predict the memory and time of a run.

    Args:
        network: the shapes.
        recipe: how to prune.
        samples: number of calibration samples.
        length: tokens per sample.
        batch: samples per forward pass.
        machine: where it runs; the ranks share the samples.
    """
    held, size = held_blocks(recipe), network.itemsize
    tokens = samples * length
    fit = recipe.blocks
    at_once = max(length, STEP_TOKENS) if fit is not None else batch * length
    inside = held.bytes(network.block, size)
    outside = network.outside * size if fit is not None else 0
    solving = max(solving_bytes(layer, recipe, 1) for layer in network.layers)
    gathering = max(gathering_bytes(layer, 1, at_once, size) for layer in network.layers)
    activations = forward_bytes(network.layers, at_once, size)
    logits = _LOGITS * 4 * at_once * network.vocabulary
    peaks = {"Grams": outside + inside + gathering + activations, "solves": outside + inside + solving}
    if fit is not None:
        peaks["steps of blocks"] = outside + inside + 2 * activations + (logits if fit.last == "kl" else 0)
    if fit is not None and fit.network_steps:
        # The dense head, the block with its masters and gradients, and the input of every block for one batch.
        peaks["steps of the network"] = outside + (size + 8) * network.block + 2 * activations + logits
    hidden = size * tokens * min(layer.shape[1] for layer in network.layers) // machine.count
    work = Work(network.layers, tokens, size * network.weights, machine.count)
    streams = held.streams * hidden + held.masters * work.weights
    return Need(machine, peaks, streams, phases(work, recipe, machine.rates))
