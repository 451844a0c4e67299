"""Gram matrices of layer inputs, summed in float64, and the output errors computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from iobs.pruning.network.layers import CONVOLUTIONS, Layer
from iobs.pruning.runtime.ranks import ALONE, Ranks

POSITIONS = 64  # output positions per sample that enter the Gram of a convolution; more gave no visible gain
EXPERT_TOKENS = 16  # an expert with fewer tokens has no usable Hessian
_CHUNK = 8192  # inputs of one product; sums over chunks are float64
STRIPE = 512  # most columns of one product
_LEAST_STRIPE = 192  # a triangle in narrower stripes saves operations and loses speed
_CONSTANT = 1e-6  # share of a second moment below which a variance is rounding
SEARCH_COLUMNS = 256  # columns from which a problem is solved in float32, in half of the time
WIDE = 4096  # columns from which finished Grams are float32: half the memory, and the dtype in which solvers search


def input_rows(layer: Layer, module: nn.Module, value: Tensor, positions: Tensor | None) -> Tensor:
    """The inputs of a layer as the rows that its matrix multiplies.

    Args:
        layer: the layer's address.
        module: the module that holds the layer.
        value: the input of the module.
        positions: for convolutions the output positions to take, int64, from `draw_positions`.

    Returns:
        (groups, count, columns).
    """
    if not isinstance(module, CONVOLUTIONS):
        return value.reshape(1, -1, layer.shape[1])
    assert positions is not None
    windows = _windows(module, value if value.ndim == len(module.kernel_size) + 2 else value[None])
    picked = windows_at(windows, positions)
    return picked.reshape(len(picked) * len(positions), layer.groups, -1).movedim(1, 0)


def output_rows(layer: Layer, value: Tensor, positions: Tensor | None) -> Tensor:
    """A tensor in the layout of a layer's output, as the rows that belong to `input_rows`.

    Returns:
        (groups, count, rows of a group).
    """
    rows = layer.shape[0]
    if positions is not None:
        value = value if value.ndim > 2 and value.shape[1] == rows else value[None]  # a single sample
        value = value.flatten(2)[..., positions].movedim(2, 1)
    return value.reshape(-1, layer.groups, rows // layer.groups).movedim(1, 0)


def _windows(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, value: Tensor) -> Tensor:
    """A view (samples, channels, *output positions, *kernel) of the padded input."""
    # The module's reversed padding list is right for "same" and for every padding mode.
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    value = nn.functional.pad(value, module._reversed_padding_repeated_twice, mode=mode)
    return sliding_windows(value, module.kernel_size, module.stride, module.dilation)


def sliding_windows(value: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The windows of a convolution over a padded input, a view (samples, channels, *output positions, *kernel)."""
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        value = value.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
    return value


def windows_at(windows: Tensor, positions: Tensor) -> Tensor:
    """The windows at some output positions, int64, counted row by row: (samples, positions, channels, *kernel)."""
    spatial = (windows.ndim - 2) // 2
    index = torch.unravel_index(positions, tuple(windows.shape[2 : 2 + spatial]))
    picked: Tensor = windows[(slice(None), slice(None), *index)]  # type: ignore[index]
    return picked.movedim(2, 1)


def draw_positions(
    module: nn.Module, value: Tensor, generator: torch.Generator, most: int = POSITIONS
) -> Tensor | None:
    """A random sample of at most `most` output positions of a convolution, (count,) int64; None for other modules."""
    if not isinstance(module, CONVOLUTIONS):
        return None
    spatial = len(module.kernel_size)
    windows = _windows(module, value[:1] if value.ndim == spatial + 2 else value[None])
    count = math.prod(windows.shape[2 : 2 + spatial])
    order = torch.randperm(count, generator=generator)[:most]
    return order.sort().values.to(value.device)


@dataclass
class Gram:
    """Second moments X X^T of a layer's inputs X, whose columns are samples.

    With dense inputs D (the inputs of the same layer in another model) there are D X^T and D D^T too. Tensors are
    (groups, columns, columns): float64 sums while samples are added, then means over `count` samples after
    `finish`. Means of 4096 columns or more are float32.

    A layer of its own that adds to a residual stream has target outputs Y in place of D: the dense outputs T D plus
    the drift of the residual. Then one matrix Y X^T is enough, and it has fewer entries.

    Args:
        own: X X^T.
        cross: D X^T, or Y X^T (groups, rows of a group, columns); None without dense inputs and target outputs.
        dense: D D^T, or None without dense inputs.
        count: number of samples (columns of X).
        means: mean inputs, or None.
        outputs: squared norm of Y over all groups, a float64 scalar; None without target outputs.
    """

    own: Tensor
    cross: Tensor | None = None
    dense: Tensor | None = None
    count: int = 0
    means: Means | None = None
    outputs: Tensor | None = None

    @classmethod
    def empty(
        cls, layer: Layer, device: torch.device, with_dense: bool, means: bool = False, outputs: bool = False
    ) -> Gram:
        """A Gram of no samples, with zeros of the layer's size.

        Args:
            layer: the layer.
            device: of the tensors.
            with_dense: there are dense inputs.
            means: compute the means of the inputs.
            outputs: there are target outputs in place of dense inputs.
        """
        rows, columns = layer.shape

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        gram = cls(zeros(layer.groups, columns, columns))
        if outputs:
            gram.cross, gram.outputs = zeros(layer.groups, rows // layer.groups, columns), zeros()
        elif with_dense:
            gram.cross, gram.dense = torch.zeros_like(gram.own), torch.zeros_like(gram.own)
        gram.means = Means.empty(gram.own, gram.cross) if means else None
        return gram

    def add(self, rows: Tensor, dense: Tensor | None = None) -> None:
        """Add samples: the layer's inputs, and their dense inputs or target outputs, in the same order.

        Inputs are (groups, count, columns), target outputs are (groups, count, rows of a group).
        """
        if not rows.shape[1]:  # an expert that is called without a token: it has no mean to begin with
            return
        self.count += rows.shape[1]
        if self.outputs is not None and dense is not None:
            self.outputs += torch.linalg.vector_norm(dense, dtype=torch.float64).square()
        if self.means is not None:
            self.means.add(rows, dense)
            rows, dense = self.means.shifted(rows, dense)
        _accumulate(self.own, rows)
        if self.cross is not None and dense is not None:
            for term in (dense,) if self.outputs is None else terms(dense, rows):
                _accumulate(self.cross, term, rows)
        if self.dense is not None and dense is not None:
            _accumulate(self.dense, dense)

    @property
    def is_finite(self) -> bool:
        """True if the sums hold neither NaN nor infinity; the diagonal and one column show it of all of them."""
        shown = self.own.diagonal(dim1=1, dim2=2).sum()
        return bool((shown if self.cross is None else shown + self.cross[..., 0].sum()).isfinite())

    def unpair(self) -> None:
        """Discard the dense inputs or target outputs, because some samples had none."""
        self.cross = self.dense = self.outputs = None
        if self.means is not None:
            self.means.dense = None

    def sum_over(self, ranks: Ranks) -> None:
        """Add up the samples of all ranks, in place."""
        self._restore()
        for tensor in (self.own, self.cross, self.dense, self.outputs):
            if tensor is not None:
                ranks.sum(tensor)
        if self.means is not None:
            self.means.sum_over(ranks)
        count = torch.tensor(self.count, device=self.own.device)
        ranks.sum(count)
        self.count = int(count)

    def finish(self) -> None:
        """Turn sums into means, after all samples of all ranks have been added."""
        self._restore()
        for name in ("own", "cross", "dense"):
            total = getattr(self, name)
            if total is not None and self.count:
                if name != "cross":
                    _mirror(total)
                total /= self.count
                setattr(self, name, total.float() if total.shape[-1] >= WIDE else total)
        if self.outputs is not None and self.count:
            self.outputs /= self.count
        if self.means is not None and self.count:
            self.means.divide(self.count)

    def _restore(self) -> None:
        """Let the sums of products be those of whole inputs."""
        if self.means is not None:
            self.means.restore(self.own, self.cross, self.dense, self.count)

    def centred(self) -> Gram:
        """The Gram of inputs without their means: errors are then those of a layer whose bias is refitted.

        Needs the means, after `finish`.
        """
        assert self.means is not None
        mean, target = self.means.own, self.means.target
        hessian = _without_means(self.own, mean, mean)
        outputs = None if self.outputs is None else self.outputs - target.square().sum()
        cross = None if self.cross is None else _without_means(self.cross, target, mean)
        dense = None if self.dense is None else _without_means(self.dense, target, target)
        # An input that is constant up to rounding tells nothing: the bias takes its place.
        diagonal = self.own.diagonal(dim1=1, dim2=2)
        constant = hessian.diagonal(dim1=1, dim2=2) <= _CONSTANT * diagonal
        hessian.masked_fill_(constant[:, None, :] | constant[:, :, None], 0.0)
        if cross is not None:
            cross.masked_fill_(constant[:, None, :], 0.0)
        return Gram(hessian, cross, dense, self.count, self.means, outputs)

    def park(self, part: str, store: Callable[[str, Tensor], Tensor]) -> None:
        """Store the moments of a wide layer elsewhere: in a mapped file they take no anonymous memory during solves.

        Args:
            part: "calibration" or "heldout"; moments of the layer before, under the same names, are overwritten.
            store: (name, moments) -> the moments in their place.
        """
        if self.own.shape[-1] < WIDE:
            return
        for name in ("own", "cross", "dense"):
            moments = getattr(self, name)
            if moments is not None:
                shape = "x".join(map(str, moments.shape))
                setattr(self, name, store(f"{part}.{name}.{shape}.gram", moments))

    def energies(self, weight: Tensor) -> Tensor:
        """Mean squared output of each row of a (rows, columns) weight, (rows,) float64; after `finish`."""
        matrix = weight.to(_dtype_of_errors(self.own)).reshape(len(self.own), -1, weight.shape[1])
        energies = (matrix @ self.own.to(matrix.dtype)).mul_(matrix).sum(-1, dtype=torch.float64)
        return energies.flatten().clamp_min_(0.0)  # NaN stays NaN

    def linear(self, target: Tensor, group: int) -> Tensor:
        """T D X^T of one group, T X X^T without dense inputs, or Y X^T; (rows of the group, columns).

        Args:
            target: T, (rows of the group, columns).
            group: number of the group.
        """
        if self.outputs is not None:
            assert self.cross is not None
            return self.cross[group].to(target.dtype)
        return target @ (self.own if self.cross is None else self.cross)[group]

    def rows(self, part: slice) -> Gram:
        """The Gram for some rows of a layer without groups; `outputs` stays that of all rows."""
        return self if self.outputs is None or self.cross is None else replace(self, cross=self.cross[:, part])

    def forget_energy(self) -> None:
        """Free what only the energy of a target needs."""
        self.dense = None


def _without_means(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Second moments, (groups, columns, columns), minus the products of the means."""
    return (total - left[:, :, None] * right[:, None, :]).to(total.dtype)


def _accumulate(total: Tensor, left: Tensor, right: Tensor | None = None) -> None:
    """Add left^T right, or the lower triangle of left^T left, a stripe of columns of `left` at a time.

    A triangle takes little more than half of the operations, and a stripe little memory. `finish` fills the rest.
    """
    with torch.autocast(total.device.type, enabled=False):  # the caller's autocast would multiply in 16 bits
        others = torch.split(left if right is None else right, _CHUNK, 1)
        for a, b in zip(torch.split(left, _CHUNK, 1), others, strict=True):
            a, b = prepared(a) * 2 if right is None else prepared(a, b)
            for stripe in _triangle(total.shape[-1]) if right is None else _stripes(total.shape[1], STRIPE):
                end = stripe.stop if right is None else None
                total[:, stripe, :end] += inner(a[..., stripe], b[..., :end])


def _triangle(columns: int) -> list[slice]:
    """The stripes of a symmetric product: about eight of a wide matrix, one of a narrow one."""
    return _stripes(columns, min(STRIPE, max(_LEAST_STRIPE, columns // 8)))


def _stripes(columns: int, width: int) -> list[slice]:
    """Ranges of at most `width` columns."""
    return [slice(start, min(start + width, columns)) for start in range(0, columns, width)]


def _mirror(total: Tensor) -> None:
    """Copy the stripes below the diagonal of a symmetric matrix (groups, columns, columns) to the other side."""
    for stripe in _triangle(total.shape[-1])[1:]:
        total[:, : stripe.start, stripe] = total[:, stripe, : stripe.start].transpose(1, 2)


@dataclass(frozen=True)
class Energies:
    """Energies of the outputs of a layer: of its target, on calibration and held-out samples, and of dense weights."""

    calibration: float
    heldout: float
    dense: float


@dataclass
class Statistics:
    """Grams of the inputs of one layer.

    Args:
        calibration: on the calibration samples.
        heldout: on the held-out samples, or None.
        tokens: number of tokens that were routed to an expert; None for other layers.
        rule: the rule that replaced the Grams if there were too few inputs; otherwise empty.
        energies: by name of the layer, computed before the Grams that they need are freed.
    """

    calibration: Gram
    heldout: Gram | None = None
    tokens: int | None = None
    rule: str = ""
    energies: dict[str, Energies] = field(default_factory=dict)

    @cached_property
    def centred(self) -> Statistics:
        """The statistics of inputs without their means, for a layer whose bias is refitted."""
        heldout = None if self.heldout is None else self.heldout.centred()
        return Statistics(self.calibration.centred(), heldout, self.tokens, self.rule)

    def forget_energy(self) -> None:
        """Free what only the energies of targets need, once they are computed."""
        for statistics in (self, vars(self).get("centred")):
            for gram in () if statistics is None else (statistics.calibration, statistics.heldout):
                if gram is not None:
                    gram.forget_energy()


def statistics_of(calibration: Gram, heldout: Gram | None, routed: bool = False) -> Statistics:
    """The statistics of a layer that has calibration or held-out inputs, but perhaps not both.

    A layer without calibration inputs is pruned by magnitude, and so is an expert, to which tokens are `routed`, with
    fewer than `EXPERT_TOKENS` of them.
    """
    heldout = heldout if heldout is not None and heldout.count else None
    count = calibration.count
    if count >= (EXPERT_TOKENS if routed else 1):
        return Statistics(calibration, heldout, count if routed else None)
    groups, columns = calibration.own.shape[:2]
    reason = f"{count} tokens were routed to it" if routed else "no sample that is calibrated on reaches it"
    return by_magnitude(groups, columns, calibration.own.device, reason, heldout, count)


def by_magnitude(
    groups: int, columns: int, device: torch.device, reason: str, heldout: Gram | None = None, tokens: int = 0
) -> Statistics:
    """Statistics with the identity as Gram, under which the smallest entries are removed.

    Args:
        groups: number of groups of the layer.
        columns: of the layer's matrix.
        device: of the Gram.
        reason: for the report.
        heldout: Gram on held-out samples, or None.
        tokens: that were routed to an expert.
    """
    return Statistics(plain_gram(groups, columns, device), heldout, tokens, f"pruned by magnitude: {reason}")


def plain_gram(groups: int, columns: int, device: torch.device) -> Gram:
    """The identity as Gram."""
    return Gram(torch.eye(columns, dtype=torch.float64, device=device).repeat(groups, 1, 1), count=1)


def target_energy(gram: Gram, target: Tensor, ranks: Ranks = ALONE) -> float:
    """||T D||^2 over all groups, or the energy of target outputs; arguments as in `relative_output_error`."""
    if gram.outputs is not None:
        return float(gram.outputs)
    assert gram.dense is not None or gram.cross is None, "forgotten"
    (target,), gram, ranks = _shared(gram, (target,), ranks)
    return ranks.total(_product(target, gram.own if gram.dense is None else gram.dense, target))


def relative_output_error(
    gram: Gram, weight: Tensor, target: Tensor, ranks: Ranks = ALONE, energy: float | None = None
) -> float:
    """||V X - T D||^2 / ||T D||^2 over all groups, from the Grams alone.

    Target outputs Y take the place of T D. The error is 0 if the target's output is zero, and NaN if a weight or a
    Gram holds NaN.

    Args:
        gram: of the inputs X, and of dense inputs D (X itself without them).
        weight: V, (rows, columns).
        target: T, (rows, columns).
        ranks: processes that all hold these matrices, and each compute the terms of some rows.
        energy: `target_energy` of the target, if it is known.
    """
    if energy is None:
        energy = target_energy(gram, target, ranks)
    (weight, target), gram, ranks = _shared(gram, (weight, target), ranks)
    if gram.cross is None:
        difference = weight - target
        error = ranks.total(_product(difference, gram.own, difference))
    else:
        pull = _product(target, gram.cross, weight) if gram.outputs is None else _inner(gram.cross, weight)
        change = _product(weight, gram.own, weight) - 2 * pull
        error = ranks.total(change) + energy
    return 0.0 if energy <= 0 else max(error / energy, 0.0)  # in this order NaN stays NaN


def _shared(gram: Gram, matrices: Sequence[Tensor], ranks: Ranks) -> tuple[list[Tensor], Gram, Ranks]:
    """This rank's rows of (rows, columns) matrices and of target outputs; all rows of a layer with groups.

    The matrices come in the dtype that errors are computed in, (groups, rows of a group, columns).
    """
    parts = gram.own.shape[0]
    if parts > 1:
        ranks = ALONE
    elif ranks.size > 1:
        rows = ranks.part(len(matrices[0]))
        matrices = [matrix[rows] for matrix in matrices]
        gram = gram.rows(rows)
    dtype = _dtype_of_errors(gram.own)
    return [matrix.to(dtype).reshape(parts, -1, matrix.shape[1]) for matrix in matrices], gram, ranks


def _dtype_of_errors(gram: Tensor) -> torch.dtype:
    """float32 for many columns: float64 takes four times as long, for a difference of 1e-7 of the energy."""
    return torch.float32 if gram.shape[-1] >= SEARCH_COLUMNS else gram.dtype


def _product(left: Tensor, gram: Tensor, right: Tensor) -> float:
    """trace(left gram right^T), summed over groups in float64."""
    return float((left @ gram.to(left.dtype)).mul_(right).sum(dtype=torch.float64))


def _inner(left: Tensor, right: Tensor) -> float:
    """Sum of the products of the entries of two tensors, in float64."""
    return float((left.double() * right.double()).sum())


# ---- products of inputs, and their means beside a Gram matrix
# Products are float32 or wider. A GPU multiplies 16-bit inputs as they are, and sums in float32.
# An input whose variance is far below its squared mean would leave only rounding in float32 once the mean is subtracted
# from its product. So such inputs are multiplied without an origin near their mean, which the float64 sums get back at
# the end.
_FAR = 100.0  # squared mean over variance from which products are taken without an origin
_HALVES = torch.bfloat16, torch.float16
_PROBED = 16  # side of the product that shows whether a device sums in float32
_ROWS = 256  # first inputs that an origin is computed from


def prepared(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Inputs in a dtype whose products are exact enough: unchanged where `inner` multiplies 16 bits, else wider.

    The product of two 16-bit numbers is exact in float32. So a GPU's tensor cores, which sum in float32, give what a
    product of float32 gives up to the rounding of its sums, many times as fast.

    Args:
        *inputs: two tensors of `inner`, or one for both.
    """
    dtypes = {value.dtype for value in inputs}
    exact = torch.float32
    for dtype in dtypes:
        exact = torch.promote_types(exact, dtype)
    short = len(dtypes) == 1 and sums_in_float32(inputs[0].device, inputs[0].dtype)
    return inputs if short else tuple(value.to(exact) for value in inputs)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float32 or float64, of `prepared` inputs (groups, count, columns)."""
    if left.dtype in _HALVES:
        return torch.bmm(left.transpose(1, 2), right, out_dtype=torch.float32)
    return left.transpose(1, 2) @ right


def layer_outputs(weight: Tensor, inputs: Tensor) -> Tensor:
    """The outputs of a layer without its bias, (groups, count, rows of a group), in float32 or wider.

    Args:
        weight: (rows, columns).
        inputs: (groups, count, columns).
    """
    inputs, matrices = prepared(inputs, weight.reshape(len(inputs), -1, weight.shape[1]))
    return inner(inputs.transpose(1, 2), matrices.transpose(1, 2))


def terms(value: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Terms of a tensor for products with another: two of 16 bits where `inner` multiplies these, else the tensor."""
    if not sums_in_float32(other.device, other.dtype):
        return (value,)
    first = value.to(other.dtype)
    return first, (value - first).to(other.dtype)


@cache
def sums_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a device multiplies matrices of a 16-bit dtype with sums and results in float32."""
    if dtype not in _HALVES or device.type != "cuda":
        return False
    ones = torch.ones(1, _PROBED, _PROBED, device=device, dtype=dtype)
    try:
        return bool((torch.bmm(ones, ones, out_dtype=torch.float32) == _PROBED).all())
    except Exception:  # an older torch, or a device without such products: each refuses in its own way
        return False


@dataclass(frozen=True)
class Origin:
    """Values that are subtracted from inputs before their products, (groups, columns) float32, zero in most columns.

    Args:
        own: of the layer's inputs.
        dense: of its dense inputs, or None.
        moves: True if `own`, and if `dense`, is not zero; kept, since reading a tensor waits for the device.
    """

    own: Tensor
    dense: Tensor | None
    moves: tuple[bool, bool]

    @classmethod
    def of(cls, rows: Tensor, dense: Tensor | None) -> Origin:
        """The origin of inputs that begin with these, (groups, count, columns)."""
        means, dense_means = _far_means(rows), None if dense is None else _far_means(dense)
        return cls(means, dense_means, (bool(means.any()), dense_means is not None and bool(dense_means.any())))


@dataclass
class Means:
    """Mean inputs, (groups, columns), float64 sums until `divide`; needed to refit a bias.

    Args:
        own: of the layer's inputs X.
        dense: of its dense inputs D, or of its target outputs, (groups, rows of a group); None without either.
        origin: of the sums so far; None before the first inputs and after `restore`.
    """

    own: Tensor
    dense: Tensor | None = None
    origin: Origin | None = None

    @classmethod
    def empty(cls, gram: Tensor, cross: Tensor | None) -> Means:
        """Means of no samples, for a Gram (groups, columns, columns) and products with dense inputs or outputs."""
        return cls(torch.zeros_like(gram[..., 0]), None if cross is None else torch.zeros_like(cross[..., 0]))

    def add(self, rows: Tensor, dense: Tensor | None) -> None:
        """Add samples, (groups, count, columns)."""
        self.own += rows.sum(1, dtype=torch.float64)
        if self.dense is not None and dense is not None:
            self.dense += dense.sum(1, dtype=torch.float64)

    def shifted(self, rows: Tensor, dense: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Inputs without the origin, which the first of them determine; unchanged where it is zero."""
        if self.origin is None:
            self.origin = Origin.of(rows, dense)
        moves, dense_moves = self.origin.moves
        rows = _without(rows, self.origin.own) if moves else rows
        return rows, _without(dense, self.origin.dense) if dense_moves and dense is not None else dense

    def restore(self, own: Tensor, cross: Tensor | None, dense: Tensor | None, count: int) -> None:
        """Add the origin to float64 sums of products over `count` inputs, in place; names as in `Gram`."""
        origin, self.origin = self.origin, None
        if origin is None:
            return
        x = origin.own.double()
        _complete(own, x, x, self.own, self.own, count)
        if origin.dense is None or self.dense is None or cross is None:
            return
        d = origin.dense.double()
        _complete(cross, d, x, self.dense, self.own, count)
        if dense is not None:
            _complete(dense, d, d, self.dense, self.dense, count)

    def sum_over(self, ranks: Ranks) -> None:
        """Add up the samples of all ranks, in place."""
        for total in (self.own, self.dense):
            if total is not None:
                ranks.sum(total)

    def divide(self, count: int) -> None:
        """Turn sums over `count` samples into means."""
        self.own = self.own / count
        self.dense = None if self.dense is None else self.dense / count

    @property
    def target(self) -> Tensor:
        """Mean input of the target: D with dense inputs, otherwise X; or the mean target output."""
        return self.own if self.dense is None else self.dense


def _far_means(rows: Tensor) -> Tensor:
    """Means of the first inputs (groups, count, columns) in columns of far smaller variance, zero elsewhere."""
    variance, mean = torch.var_mean(rows[:, :_ROWS].float(), 1, correction=0)
    return mean.masked_fill(mean.square() <= _FAR * variance, 0.0)


def _without(rows: Tensor, origin: Tensor | None) -> Tensor:
    """Inputs (groups, count, columns) minus an origin, at least float32."""
    assert origin is not None
    return rows.to(torch.promote_types(rows.dtype, torch.float32)) - origin[:, None]


def _complete(total: Tensor, left: Tensor, right: Tensor, left_sum: Tensor, right_sum: Tensor, count: int) -> None:
    """Turn the sum of (a - left)(b - right)^T over `count` vectors into that of a b^T, in place, from their sums."""
    if bool(left.any()) or bool(right.any()):
        for group, matrix in enumerate(total):  # without a second matrix of this size
            matrix.addr_(left[group], right_sum[group] - count * right[group]).addr_(left_sum[group], right[group])
