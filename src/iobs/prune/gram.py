"""From the inputs of a layer to the quadratic that pruning it means: Gram matrices in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from iobs.prune.layers import CONVOLUTIONS, Layer

POSITIONS = 64  # output positions of a convolution that enter its Gram, for each sample; measured: no visible loss
EXPERT_TOKENS = 16  # an expert that saw fewer has no Hessian to speak of
_CHUNK = 8192  # rows of one float32 product; sums over chunks are float64
WIDE = 4096  # columns from which a finished Gram is kept in float32: half the memory, and what solvers search in


def input_rows(layer: Layer, module: nn.Module, value: Tensor, positions: Tensor | None) -> Tensor:
    """The inputs of a layer as rows that its matrix multiplies.

    Args:
        layer: the layer's address.
        module: the module that holds it.
        value: what the module was called with.
        positions: for convolutions, which output positions to take, int64; from `draw_positions`.

    Returns:
        (groups, count, columns).
    """
    if not isinstance(module, CONVOLUTIONS):
        return value.reshape(1, -1, layer.shape[1])
    assert positions is not None
    spatial = len(module.kernel_size)
    windows = _windows(module, value if value.ndim == spatial + 2 else value[None])
    outputs = windows.shape[2 : 2 + spatial]
    index = torch.unravel_index(positions, tuple(outputs))
    picked: Tensor = windows[(slice(None), slice(None), *index)]  # type: ignore[index]  # (samples, channels, positions, *kernel)
    picked = picked.movedim(2, 1).reshape(len(picked) * len(positions), layer.groups, -1)
    return picked.movedim(1, 0)


def _windows(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, value: Tensor) -> Tensor:
    """A view (samples, channels, *output positions, *kernel) of the padded input."""
    # The module's own reversed padding list serves "same" and every padding mode.
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    value = nn.functional.pad(value, module._reversed_padding_repeated_twice, mode=mode)
    spatial = len(module.kernel_size)
    for axis in range(spatial):
        reach = module.dilation[axis] * (module.kernel_size[axis] - 1) + 1
        value = value.unfold(2 + axis, reach, module.stride[axis])[..., :: module.dilation[axis]]
    return value


def draw_positions(
    module: nn.Module, value: Tensor, generator: torch.Generator, most: int = POSITIONS
) -> Tensor | None:
    """Output positions of a convolution that stand for all: at most so many, drawn anew for every batch."""
    if not isinstance(module, CONVOLUTIONS):
        return None
    spatial = len(module.kernel_size)
    windows = _windows(module, value[:1] if value.ndim == spatial + 2 else value[None])
    count = math.prod(windows.shape[2 : 2 + spatial])
    order = torch.randperm(count, generator=generator)[:most]
    return order.sort().values.to(value.device)


@dataclass
class Gram:
    """Second moments of a layer's inputs X (columns are samples): X X^T, and with dense inputs D also D X^T, D D^T.

    Tensors are (groups, columns, columns): float64 sums while samples come in, means over `count` of them once
    `finish` was called, from 4096 columns on in float32.
    """

    own: Tensor
    cross: Tensor | None = None
    dense: Tensor | None = None
    count: int = 0

    @classmethod
    def empty(cls, layer: Layer, device: torch.device, with_dense: bool) -> Gram:
        """Zeros of the layer's size."""

        def zeros() -> Tensor:
            columns = layer.shape[1]
            return torch.zeros(layer.groups, columns, columns, dtype=torch.float64, device=device)

        return cls(zeros(), zeros() if with_dense else None, zeros() if with_dense else None)

    def add(self, rows: Tensor, dense: Tensor | None = None) -> None:
        """Count samples in; both arguments are (groups, count, columns), sample by sample the same."""
        self.count += rows.shape[1]
        _accumulate(self.own, rows, rows)
        if self.cross is not None and self.dense is not None and dense is not None:
            _accumulate(self.cross, dense, rows)
            _accumulate(self.dense, dense, dense)

    def unpair(self) -> None:
        """Forget the dense inputs: not all samples had one."""
        self.cross = self.dense = None

    def finish(self) -> None:
        """Turn sums into means, when every sample of every rank has been counted in."""
        for name in ("own", "cross", "dense"):
            total = getattr(self, name)
            if total is not None and self.count:
                total /= self.count
                setattr(self, name, total.float() if total.shape[-1] >= WIDE else total)

    def energy(self, weight: Tensor) -> float:
        """Squared output of a (rows, columns) weight per input row; of finished means."""
        matrix = weight.to(self.own.dtype).reshape(len(self.own), -1, weight.shape[1])
        return _product(matrix, self.own, matrix)

    def target_cross(self) -> Tensor:
        """D X^T where dense inputs were given, else X X^T: the target is then the layer's own output."""
        return self.own if self.cross is None else self.cross

    def target_energy(self) -> Tensor:
        """D D^T where dense inputs were given, else X X^T."""
        return self.own if self.dense is None else self.dense


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    exact = torch.promote_types(left.dtype, torch.float32)
    with torch.autocast(total.device.type, enabled=False):  # the caller's own would multiply in 16 bits
        for a, b in zip(torch.split(left, _CHUNK, 1), torch.split(right, _CHUNK, 1), strict=True):
            total += a.to(exact).transpose(1, 2) @ b.to(exact)


@dataclass
class Statistics:
    """Grams of one layer's inputs: on the samples that it is solved for, and on held-out ones where there are any."""

    calibration: Gram
    heldout: Gram | None = field(default=None)
    tokens: int | None = None  # of an expert: how many were routed to it
    rule: str = ""  # what was done instead, where they were too few


def of_called(calibration: Gram, heldout: Gram | None) -> Statistics:
    """The statistics of a layer that the network feeds something on some samples, if not on both kinds."""
    held = heldout if heldout is not None and heldout.count else None
    if calibration.count:
        return Statistics(calibration, held)
    groups, columns = calibration.own.shape[:2]
    return by_magnitude(groups, columns, calibration.own.device, "no sample that is calibrated on reaches it", held)


def of_routed(calibration: Gram, heldout: Gram) -> Statistics:
    """The statistics of an expert; one that saw fewer than `EXPERT_TOKENS` tokens is pruned by magnitude."""
    seen, held = calibration.count, heldout if heldout.count else None
    if seen >= EXPERT_TOKENS:
        return Statistics(calibration, held, seen)
    groups, columns = calibration.own.shape[:2]
    return by_magnitude(groups, columns, calibration.own.device, f"{seen} tokens were routed to it", held, seen)


def by_magnitude(
    groups: int, columns: int, device: torch.device, why: str, heldout: Gram | None = None, seen: int = 0
) -> Statistics:
    """Statistics under which the least entries go, with the identity as Gram."""
    identity = torch.eye(columns, dtype=torch.float64, device=device).repeat(groups, 1, 1)
    return Statistics(Gram(identity, count=1), heldout, seen, f"pruned by magnitude: {why}")


def relative_output_error(gram: Gram, weight: Tensor, target: Tensor) -> float:
    """||V X - T D||^2 / ||T D||^2 over all groups, from the Grams alone; 0 where the target's output is zero.

    NaN where a weight or a Gram holds NaN.
    """
    parts, dtype = gram.own.shape[0], gram.own.dtype
    weight, target = (matrix.to(dtype).reshape(parts, -1, matrix.shape[1]) for matrix in (weight, target))
    energy = _product(target, gram.target_energy(), target)
    if gram.cross is None:
        difference = weight - target
        error = _product(difference, gram.own, difference)
    else:
        error = _product(weight, gram.own, weight) - 2 * _product(target, gram.cross, weight) + energy
    return 0.0 if energy <= 0 else max(error / energy, 0.0)  # in this order NaN stays NaN


def _product(left: Tensor, gram: Tensor, right: Tensor) -> float:
    return float((left @ gram).mul_(right).sum(dtype=torch.float64))
