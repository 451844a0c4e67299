"""Rounding to whole numbers times a step for each column, so that the entropy code of a matrix has a number of bits.

With H = L L^T and Y = C L the loss of a row v above that of its centre c is ||(v - c) L||^2 / 2. From the last column
to the first, Y_j is rounded to a multiple of c = steps[j] L_jj, and its error is carried to the columns before it.
Every column then has the same error c^2 / 12, whatever its bits: columns of large conditional variance get fine steps
and many bits, the others coarse steps and zeros (reverse water-filling). This is WaterSIC (Lifar, Savkin, Ordentlich
and Polyanskiy, arXiv 2603.04956, 2026), with steps of 8 significant bits and the exact count of an entropy code.

Where rows share the loss, tr(K K^T (V - C) H (V - C)^T) / 2 with a factor K, it is that of K^T (V - C) L, and rows
carry errors as columns do: each column is rounded from its last row to its first, and the error of a row is carried to
the rows before it (Tseng, Sun and De Sa, arXiv 2505.22988, 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.integers import STEP_BITS, Integers, short, step_bits
from iobs.core.linalg import cholesky
from iobs.core.patterns import Pattern, Rate
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import PatternError
from iobs.solvers.admm import ADMM

_BLOCK = 64  # columns whose errors are carried to the columns before them in one product
_CLOSE = 0.002  # bits are met within this share from below
_TRIALS = 12
_STEPS = 60  # of a bisection
_LARGEST = 2**13 - 1  # code whose product with a step and a factor is exact in float32
_MOST_SHIFT = 4.0  # octaves from one trial to the next


def carried_operations(rows: float, columns: int) -> float:
    """Operations of carrying errors from row to row of a matrix (rows, columns), in about four trials of its error."""
    return 8.0 * rows * rows * columns


@dataclass(frozen=True)
class SuccessiveRounding:
    """Round column after column, with one error for all of them that meets the bits of a `Rate`.

    Args:
        dtype: of the weights that are stored. In 16 bits steps are powers of two, and integers have no more
            significant bits than the dtype, so that weights are exact.
        rows: (rows, rows) the factor K of the metric of the rows' errors, lower triangular with a diagonal of 1; None:
            every row counts for itself.
    """

    dtype: torch.dtype = torch.float32
    rows: Tensor | None = None

    def __call__(self, problem: Quadratic, pattern: Pattern) -> Solution:
        """Round to at most the bits of the pattern; `stats` has `steps` (columns,), `factors` (rows,) and `bits`.

        Raises:
            PatternError: the pattern is no `Rate`, or its bits are not enough for the steps of the columns.
        """
        if not isinstance(pattern, Rate):
            raise PatternError(f"Successive rounding takes iobs.Rate, got {pattern}.")
        centre, mask = problem.centre().double(), torch.ones(problem.shape, dtype=torch.bool, device=problem.device)
        if pattern.zeros is not None:
            # The weights of the best zeros: rounding from the dense ones has twice the error.
            pruned = ADMM()(problem, pattern.zeros)
            centre, mask = pruned.weight.double(), pruned.mask
        lower = cholesky(problem.matrix.double())
        entries = centre.numel()
        most_bits = pattern.bits * entries
        spread = centre.square().mean(0).sqrt() * lower.diagonal()
        if self.rows is not None:
            centre = self.rows.to(centre).T @ centre
        target, lower = (centre @ lower).float(), lower.float()
        octaves = torch.log2(spread.clamp_min(1e-30)).double()
        octave = level_at(pattern.bits, lambda level: float(bits_at(octaves, level).mean()), [octaves])
        # Errors, as octaves, that need too many bits and few enough, and these bits.
        low, high = (-math.inf, math.inf), (math.inf, 0.0)
        best: Integers | None = None
        bits = spent = math.inf
        wanted = (1 - _CLOSE / 2) * most_bits
        for trial in range(1, _TRIALS + 1):
            rounded = self._rounded(target, lower, 2.0**octave, mask)
            bits = rounded.bits()
            if bits <= most_bits:
                high, best, spent = (octave, bits), rounded, bits
                if bits >= (1 - _CLOSE) * most_bits or not bool(rounded.codes.any()):
                    break
            else:
                low = octave, bits
            if math.inf in (high[0], -low[0]):
                # One octave is about one bit of each entry that is not zero.
                share = max(0.1, float((rounded.codes != 0).float().mean()))
                # Larger steps each time: bits of a small matrix jump.
                aimed = octave + trial * (bits - wanted) / entries / share
                octave = min(max(aimed, octave - _MOST_SHIFT), octave + _MOST_SHIFT)
            else:
                octave = low[0] + (high[0] - low[0]) * (low[1] - wanted) / (low[1] - high[1])
        if best is None:
            raise PatternError(
                f"{pattern} is less than the steps and tables of a matrix of {centre.shape[0]} x {centre.shape[1]} "
                f"need, {bits / entries:.2f} bits a weight; give more."
            )
        weight = best.codes.to(problem.dtype) * best.steps.to(problem.dtype)
        steps = best.steps.double()
        factors = torch.ones(len(weight), dtype=steps.dtype, device=steps.device)
        return Solution.of(problem, weight, mask, steps=steps, factors=factors, bits=spent / entries)

    def _rounded(self, target: Tensor, lower: Tensor, error: float, mask: Tensor) -> Integers:
        """Integers and steps with one error of the columns.

        Args:
            target: C L, or K^T C L, (rows, columns) float32.
            lower: L, (columns, columns) float32.
            error: c, the distance of the points of every column in the metric.
            mask: boolean (rows, columns); the integers are zero outside. Columns before carry what is missing there.
        """
        half = self.dtype.itemsize == 2
        shared = None if self.rows is None else self.rows.float().cpu().contiguous()
        diagonal = lower.diagonal()
        first = short(error / diagonal, step_bits(self.dtype))
        target = target.clone()
        codes, steps = torch.zeros_like(target), first.clone()
        for stop in range(target.shape[1], 0, -_BLOCK):
            span = slice(max(0, stop - _BLOCK), stop)
            block, square = target[:, span].T.contiguous(), lower[span, span]
            kept = mask[:, span].T.float()
            residual = torch.empty_like(block)
            for j in range(len(block) - 1, -1, -1):
                value, size = block[j], float(diagonal[span.start + j])
                step, largest = float(first[span.start + j]), float((value * kept[j]).abs().max())
                while largest > _LARGEST * step * size:  # a larger code would not be exact
                    step *= 2
                code, image = _whole(value / (step * size), kept[j], shared, self.dtype)
                if not half and step == float(first[span.start + j]):
                    step = _fitted(value / size, image, step)
                codes[:, span.start + j], steps[span.start + j] = code, step
                residual[j] = image * step
                if j:
                    block[:j].addr_(square[j, :j], residual[j], alpha=-1)
            target[:, : span.start].addmm_(residual.T, lower[span, : span.start], alpha=-1)
        return Integers(codes.to(torch.int16), steps, torch.ones(len(codes), device=codes.device))


def _whole(value: Tensor, kept: Tensor, shared: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Whole numbers z near the numbers of a column, and what they stand for there, z or K^T z.

    Args:
        value: (rows,) float32.
        kept: (rows,) 1 or 0, where z is 0.
        shared: K, (rows, rows) float32 on the processor, or None.
        dtype: in which z is exact.
    """
    half = dtype.itemsize == 2
    if shared is None:
        code = (value * kept).round_()
        code = code.to(dtype).float() if half else code
        return code, code
    from iobs.solvers.kernels.round_numba import round_column

    here = value.cpu()
    code, image = torch.empty_like(here), torch.empty_like(here)
    exact = round(2 / torch.finfo(dtype).eps) if half else _LARGEST
    round_column(here.numpy(), shared.numpy(), kept.cpu().numpy(), _LARGEST, exact, code.numpy(), image.numpy())
    return code.to(value.device), image.to(value.device)


def _fitted(value: Tensor, code: Tensor, step: float) -> float:
    """The step of least squared error for given codes, in 8 significant bits, or the given one if it is better."""
    squares = float(code @ code)
    if squares == 0:
        return step
    product = float(value @ code)
    if product <= 0:
        return step
    other = float(short(torch.tensor(product / squares), STEP_BITS))

    def error(size: float) -> float:
        return size * (size * squares - 2 * product)

    return other if error(other) < error(step) else step


def level_at(bits: float, average: Callable[[float], float], octaves: Iterable[Tensor]) -> float:
    """The error as an octave, log2 c, with which entries have some bits on average.

    Args:
        bits: of an entry, on average.
        average: level -> these bits, which fall with it.
        octaves: logarithms of the spreads of the entries, in tensors of any shape.
    """
    ends = [(float(spread.min()), float(spread.max())) for spread in octaves]
    low, high = min(least for least, _ in ends) - 40, max(most for _, most in ends) + 40
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if average(middle) > bits else (low, middle)
    return high


def bits_at(octaves: Tensor, level: float) -> Tensor:
    """Bits of entries whose spread s is 2^octaves, if they are rounded with an error c of 2^level.

    They are about log2(1 + 2 pi e s^2 / c^2) / 2.
    """
    return torch.log2(1 + 2 * math.pi * math.e * torch.exp2(2 * (octaves - level).clamp(-60, 60))) / 2
