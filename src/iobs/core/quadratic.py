"""Quadratics whose rows share a Hessian, and the solutions of solvers.

    q(v) = 1/2 v H v^T - b v^T     for every row v of V

The linear term b is stored instead of the centre c, where c H = b. The term b needs no inverse of H, and exists for
singular H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from iobs.core.linalg import double_cholesky
from iobs.errors import NonFiniteError, ProblemError

# ---- Cache of the factorisations of one Hessian
# Problems with one Hessian share it: the q, k and v layers of attention, or one layer at several sparsities.

Value = TypeVar("Value")


class Factors:
    """Cache of values computed from one Hessian, by name.

    Args:
        keep: store computed values. False for a single problem: it needs each value once, and storing costs memory.
    """

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self._values: dict[Hashable, object] = {}

    def get(self, name: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the stored value of `name`, or compute it. The caller must not change the value in place."""
        if name in self._values:
            return cast(Value, self._values[name])
        value = compute()
        if self.keep:
            self._values[name] = value
        return value


_LARGE = 2048  # columns from which memory decides how a centre is computed
_ROWS = 512  # rows of one part of it


class Quadratic:
    """Quadratic q(v) = 1/2 v H v^T - b v^T for every row v of a (rows, d) matrix. Immutable; all rows share H.

    Args:
        hessian: (d, d) symmetric positive semi-definite tensor.
        linear: (rows, d), the rows b. None for a centred problem, whose linear term anchor H is computed on demand.
        anchor: (rows, d), the weights that damping pulls towards: the current weights of a layer, or the current
            iterate. Not part of q. Default: the centre H^-1 b.
        centred: the anchor is the centre, which then needs no solve.

    Raises:
        ProblemError: shapes or dtypes do not fit together.
        NonFiniteError: an input holds NaN or infinity.
    """

    def __init__(
        self,
        hessian: Tensor,
        linear: Tensor | None,
        anchor: Tensor | None = None,
        centred: bool = False,
    ) -> None:
        _require_tensors(hessian, linear=linear, anchor=anchor)
        # Weights of a layer are parameters that require gradients; nothing here is differentiated. A Hessian without
        # gradients stays the same object, because problems that share it are recognised by its identity.
        self.hessian = hessian.detach() if hessian.requires_grad else hessian
        self.anchor = None if anchor is None else anchor.detach()
        self.centred = centred
        self._linear = None if linear is None else linear.detach()
        self.factors = Factors()
        self._check()

    def _check(self) -> None:
        if self._linear is None and not (self.centred and self.anchor is not None):
            raise ProblemError("A quadratic needs its linear term, unless it is centred at a given anchor.")
        rows = self._defining_rows
        if rows.ndim != 2 or self.hessian.shape != (rows.shape[1], rows.shape[1]):
            raise ProblemError(
                f"A quadratic needs a (d, d) Hessian and a (rows, d) linear term, got {tuple(self.hessian.shape)} "
                f"and {tuple(rows.shape)}; one vector is one row: b[None]."
            )
        if self.anchor is not None and self.anchor.shape != rows.shape:
            raise ProblemError(f"The anchor has shape {tuple(self.anchor.shape)}, not {tuple(rows.shape)}.")
        for name, tensor in (("Hessian", self.hessian), ("linear term", self._linear), ("anchor", self.anchor)):
            if isinstance(tensor, Tensor):
                if not tensor.is_floating_point():
                    raise ProblemError(f"The {name} must be floating point, got {tensor.dtype}; call .float() first.")
                if not _is_finite(tensor):
                    raise NonFiniteError(f"The {name} of a quadratic holds NaN or infinity.")
                if tensor.dtype != rows.dtype:
                    raise ProblemError(
                        f"The {name} is {tensor.dtype} and the rows of the quadratic are {rows.dtype}: use one dtype "
                        "for all, H.to(b.dtype)."
                    )

    @property
    def _defining_rows(self) -> Tensor:
        """Tensor (rows, d) that the problem was made from: the linear term or the centre."""
        rows = self.anchor if self._linear is None else self._linear
        assert rows is not None
        return rows

    def _with(self, hessian: Tensor, linear: Tensor | None, anchor: Tensor | None) -> Quadratic:
        """Make a problem from changed tensors without checking them; a changed Hessian gets a new cache of factors."""
        changed = object.__new__(Quadratic)
        changed.hessian, changed._linear, changed.anchor, changed.centred = hessian, linear, anchor, self.centred
        changed.factors = self.factors if hessian is self.hessian else Factors(self.factors.keep)
        return changed

    def sharing(self) -> Quadratic:
        """The same problem with factorisations that are stored and shared with problems made by `rows` or `damped`."""
        shared = self._with(self.hessian, self._linear, self.anchor)
        shared.factors = Factors(keep=True)
        return shared

    @classmethod
    def at(cls, centre: Tensor, hessian: Tensor) -> Quadratic:
        """Quadratic with a given centre: 1/2 (v - c) H (v - c)^T up to a constant.

        The layer problem min ||W X - V X||^2 is `at(W, X X^T)`.
        """
        _require_tensors(hessian, centre=centre)
        return cls(hessian, None, centre.to(hessian.dtype), centred=True)

    @classmethod
    def stack(cls, problems: Sequence[Quadratic]) -> Quadratic:
        """Concatenate the rows of several problems with one Hessian.

        Raises:
            ProblemError: the Hessians are not the same object.
        """
        first = problems[0]
        if any(problem.hessian is not first.hessian for problem in problems):
            raise ProblemError("Problems that are solved together share one Hessian: make them with the same tensor.")
        if all(problem.centred for problem in problems):
            return cls(first.hessian, None, torch.cat([problem.centre() for problem in problems]), centred=True)
        linear = torch.cat([problem.linear for problem in problems])
        if all(problem.anchor is None for problem in problems):
            return cls(first.hessian, linear)
        anchors = [problem.centre() if problem.anchor is None else problem.anchor for problem in problems]
        return cls(first.hessian, linear, torch.cat(anchors))

    @property
    def linear(self) -> Tensor:
        """Linear term b of every row, (rows, d)."""
        if self._linear is None:
            assert self.anchor is not None
            self._linear = self.anchor @ self.hessian
        return self._linear

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._defining_rows.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._defining_rows.device

    @classmethod
    def newton(cls, point: Tensor, gradient: Tensor, hessian: Tensor) -> Quadratic:
        """Second-order model of a smooth f at `point` (paper, eq. WT-iter). Its centre is the Newton point."""
        _require_tensors(hessian, point=point, gradient=gradient)
        return cls(hessian, point @ hessian - gradient, point)

    @property
    def matrix(self) -> Tensor:
        """The Hessian, (d, d)."""
        return self.hessian

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight matrix, (rows, d)."""
        return self._defining_rows.shape[0], self._defining_rows.shape[1]

    def loss(self, weight: Tensor) -> Tensor:
        """q of every row, (rows,) in float64 for a problem of any dtype."""
        weight = weight.double()
        product = weight @ self.hessian.double()
        if self.centred:  # (v / 2 - c) H v^T needs one product with H, not two
            assert self.anchor is not None
            return ((0.5 * weight - self.anchor.double()) * product).sum(1)
        return ((0.5 * product - self.linear.double()) * weight).sum(1)

    def gradient(self, weight: Tensor) -> Tensor:
        """Gradient V H - B of q at every row, (rows, d)."""
        return weight @ self.hessian - self.linear

    def damped(self, amount: float) -> Quadratic:
        """Add the proximal term 1/2 amount ||v - anchor||^2: H becomes H + amount I and b becomes b + amount anchor."""
        if amount == 0:
            return self
        anchor = self.centre() if self.anchor is None else self.anchor
        matrix = self.matrix.clone()
        matrix.diagonal().add_(amount)
        linear = None if self.centred else self.linear + amount * anchor
        return self._with(matrix, linear, anchor)

    def centre(self) -> Tensor:
        """Unconstrained minimiser B H^-1, (rows, d).

        If H is singular up to rounding, the minimiser with the least sum of H_ii v_i^2 is returned. This choice does
        not depend on the units of the variables.
        """
        if self.centred:
            assert self.anchor is not None
            return self.anchor
        solve = self.factors.get("centre", lambda: _solver(self.matrix))
        parts = torch.split(self.linear, _ROWS) if self.shape[1] >= _LARGE else (self.linear,)
        return torch.cat([solve(part.double()).to(part.dtype) for part in parts])

    def to(self, dtype: torch.dtype) -> Quadratic:
        """The same problem in another dtype; unchanged if the dtype is already right."""
        if dtype == self.dtype == self.matrix.dtype:
            return self
        anchor = None if self.anchor is None else self.anchor.to(dtype)
        linear = None if self.centred else self.linear.to(dtype)
        changed = Quadratic(self.matrix.to(dtype), linear, anchor, self.centred)
        changed.factors = Factors(self.factors.keep)
        return changed

    def divided(self, amount: float) -> Quadratic:
        """The problem q / amount, which has the same minimisers."""
        linear = None if self.centred else self.linear / amount
        return self._with(self.matrix / amount, linear, self.anchor)

    def in_units(self, unit: float) -> Quadratic:
        """The problem of v / unit, divided by unit^2: b and the anchor are divided by `unit`, H is unchanged."""
        linear = None if self.centred else self.linear / unit
        return self._with(self.hessian, linear, None if self.anchor is None else self.anchor / unit)

    def scaled(self, scale: Tensor) -> Quadratic:
        """The problem of V * scale, with a positive factor for every row, (rows, 1): row i counts scale_i^2 times."""
        linear = None if self.centred else self.linear * scale
        return self._with(self.hessian, linear, None if self.anchor is None else self.anchor * scale)

    def without(self, columns: Tensor) -> Quadratic:
        """Decouple columns (boolean, (d,)): mean curvature of the other columns, zero linear term and anchor."""
        matrix = self.matrix.clone()
        matrix[columns] = 0
        matrix[:, columns] = 0
        matrix.diagonal()[columns] = matrix.diagonal()[~columns].mean()
        linear = None if self.centred else self.linear.masked_fill(columns, 0)
        anchor = None if self.anchor is None else self.anchor.masked_fill(columns, 0)
        return self._with(matrix, linear, anchor)

    def reordered(self, order: Tensor) -> Quadratic:
        """The problem with its columns in another order, (d,): column i is the old column `order[i]`."""
        linear = None if self._linear is None else self._linear[:, order]
        anchor = None if self.anchor is None else self.anchor[:, order]
        return self._with(self.matrix[order][:, order], linear, anchor)

    def rows(self, index: Tensor | slice) -> Quadratic:
        """The problem of the selected rows; the Hessian is shared, not copied."""
        linear = None if self._linear is None else self._linear[index]
        return self._with(self.hessian, linear, None if self.anchor is None else self.anchor[index])


@dataclass(frozen=True)
class Solution:
    """Sparse weights found by a solver.

    Attributes:
        weight: (rows, d), exactly zero outside the mask.
        mask: boolean (rows, d), True where an entry is kept.
        problem: the undamped quadratic that `loss` reports.
        stats: statistics of the solver by name, for example the damping used and the number of swaps.
    """

    weight: Tensor
    mask: Tensor
    problem: Quadratic = field(repr=False)
    stats: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def loss(self) -> Tensor:
        """q of each row, (rows,) in float64, without the constant that makes q a squared error.

        Computed on first access, because it costs a float64 product with H.
        """
        return self.problem.loss(self.weight)

    @classmethod
    def of(cls, problem: Quadratic, weight: Tensor, mask: Tensor, **stats: Any) -> Solution:
        """Solution with the weights outside the mask set to zero."""
        weight = weight.masked_fill(~mask, 0)
        return cls(weight, mask, problem, stats)


def _solver(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Function from rows B to centres B H^-1 in float64; the pseudo-inverse of H if H is singular up to rounding."""
    # Rounding can turn a zero pivot into a small positive pivot. H is definite if every pivot is larger than that.
    rounding = torch.finfo(matrix.dtype).eps
    factor, info = double_cholesky(matrix)
    if int(info) == 0 and bool((factor.diagonal().square() > 4 * rounding * matrix.diagonal()).all()):
        if len(matrix) >= _LARGE:
            return lambda rows: _substituted(rows, factor)
        return lambda rows: torch.cholesky_solve(rows.T, factor).T
    scale = matrix.diagonal().double().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    # Scale to unit curvatures, so that one threshold fits all variables: variables of large scale hide the others.
    unit = matrix.double() / scale / scale[:, None]
    pseudo_inverse: Tensor = torch.linalg.pinv(unit, hermitian=True, atol=len(unit) * rounding, rtol=0.0)
    return lambda rows: rows / scale @ pseudo_inverse / scale


def _substituted(rows: Tensor, factor: Tensor) -> Tensor:
    """Rows B (L L^T)^-1 for a factor L; `cholesky_solve` would copy the factor."""
    forward: Tensor = torch.linalg.solve_triangular(factor, rows.T, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.T, forward, upper=True)
    return solved.T


def _require_tensors(hessian: object, **rows: object) -> None:
    for name, value in {"Hessian": hessian, **rows}.items():
        if isinstance(value, Tensor) or (value is None and name != "Hessian"):
            continue
        raise ProblemError(f"The {name} must be a torch tensor, got {type(value).__name__}; torch.as_tensor makes one.")


def _is_finite(tensor: Tensor) -> bool:
    """True if all entries are finite; a finite sum proves it without a second pass."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


# ---- Bias of every row as a free variable, eliminated from a quadratic


@dataclass(frozen=True)
class FreeBias:
    """Bias that is chosen together with the weights, at no cost for its size: one more column that is always kept.

    For fixed weights V the best bias is `output - V mean`. Inserting it gives a quadratic in V alone, with the Hessian
    H - samples mean mean^T and the linear term B - samples output mean^T.

    Attributes:
        mean: (d,), mean of the inputs.
        output: (rows,), mean of the outputs that the linear term was computed from. For a layer that matches itself
            it is W mean, plus the layer's own bias if the new bias is to replace it.
        samples: factor of the Hessian relative to the mean of x x^T: 1 for a mean, n for a sum over n samples.
    """

    mean: Tensor
    output: Tensor
    samples: float = 1.0

    def eliminated(self, problem: Quadratic) -> Quadratic:
        """The quadratic in the weights alone; its loss differs from the loss with the best bias by a constant.

        Raises:
            ProblemError: the shapes do not fit the problem.
        """
        rows, columns = problem.shape
        if self.mean.shape != (columns,) or self.output.shape != (rows,):
            raise ProblemError(
                f"A free bias of a {rows} x {columns} problem needs means of shape ({columns},) and ({rows},), "
                f"got {tuple(self.mean.shape)} and {tuple(self.output.shape)}."
            )
        mean, output = self.mean.to(problem.dtype), self.output.to(problem.dtype)
        hessian = problem.matrix - self.samples * mean.outer(mean)
        diagonal = hessian.diagonal()
        # A constant input varies only by rounding: its column is dead, the bias takes its part.
        constant = diagonal <= 16 * problem.matrix.diagonal() * torch.finfo(problem.dtype).eps
        hessian[constant] = 0
        hessian[:, constant] = 0
        if problem.centred:
            return Quadratic.at(problem.centre(), hessian)
        linear = problem.linear - self.samples * output.outer(mean)
        return Quadratic(hessian, linear.masked_fill(constant, 0), problem.anchor)

    def best(self, weight: Tensor) -> Tensor:
        """The best bias of each row for the given weights (rows, d), (rows,) in their dtype."""
        return self.output.to(weight.dtype) - weight @ self.mean.to(weight.dtype)
