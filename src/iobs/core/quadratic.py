"""The one problem of iobs: quadratics whose rows share a Hessian, and what solvers of them return.

    q(v) = 1/2 v H v^T - b v^T     for every row v of V

The linear term b is stored, not the centre c with c H = b: that needs no inverse and serves singular H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from iobs.core.factors import Factors
from iobs.errors import NonFiniteError, ProblemError


class HessianOperator(Protocol):
    """A symmetric positive semi-definite matrix that is only multiplied with, never stored.

    Shapes: `matmul` takes and gives (..., d); `columns(support)` is (d, k); `submatrix(support)` is (k, k), for a
    support given as int64 indices (k,).
    """

    @property
    def shape(self) -> tuple[int, int]:
        """(d, d)."""
        ...

    def matmul(self, vectors: Tensor) -> Tensor:
        """Rows of `vectors` times the matrix."""
        ...

    def diagonal(self) -> Tensor:
        """(d,)."""
        ...

    def columns(self, support: Tensor) -> Tensor:
        """Columns of the matrix, (d, k)."""
        ...

    def submatrix(self, support: Tensor) -> Tensor:
        """Rows and columns of the support, (k, k)."""
        ...


@dataclass(frozen=True)
class DenseHessian:
    """A stored matrix as a `HessianOperator`."""

    matrix: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(d, d)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def matmul(self, vectors: Tensor) -> Tensor:
        """Rows of `vectors` times the matrix."""
        return vectors @ self.matrix

    def diagonal(self) -> Tensor:
        """(d,)."""
        return self.matrix.diagonal()

    def columns(self, support: Tensor) -> Tensor:
        """Columns of the matrix, (d, k)."""
        return self.matrix[:, support]

    def submatrix(self, support: Tensor) -> Tensor:
        """Rows and columns of the support, (k, k)."""
        return self.matrix[support][:, support]


class Quadratic:
    """q(v) = 1/2 v H v^T - b v^T for every row of a (rows, d) matrix, all rows sharing H. Never changed once made.

    Args:
        hessian: (d, d) symmetric positive semi-definite tensor, or an operator.
        linear: (rows, d), the rows b; None for a centred problem, which computes anchor H when it is asked for.
        anchor: (rows, d), the weights that damping pulls towards: the current weights of a layer, or the current
            iterate. Not part of q. Without it the centre H^-1 b takes its place.
        centred: the anchor is known to be the centre, so that nobody needs to solve for it.

    Raises:
        ProblemError: shapes or dtypes do not fit together.
        NonFiniteError: NaN or infinity anywhere.
    """

    def __init__(
        self,
        hessian: Tensor | HessianOperator,
        linear: Tensor | None,
        anchor: Tensor | None = None,
        centred: bool = False,
    ) -> None:
        _require_tensors(hessian, linear=linear, anchor=anchor)
        # A layer's own weight is a parameter that asks for gradients; the factorisations here know of none. A Hessian
        # that asks for none stays the same object: that is how problems are known to share it.
        asks = isinstance(hessian, Tensor) and hessian.requires_grad
        self.hessian = hessian.detach() if asks else hessian  # type: ignore[union-attr]
        self.anchor = None if anchor is None else anchor.detach()
        self.centred = centred
        self._linear = None if linear is None else linear.detach()
        self.factors = Factors()
        self._check()

    def _check(self) -> None:
        if self._linear is None and not (self.centred and self.anchor is not None):
            raise ProblemError("A quadratic needs its linear term, unless it is centred at a given anchor.")
        d = self.hessian.shape[0]
        rows = self._given
        if rows.ndim != 2 or self.hessian.shape != (d, d) or rows.shape[1] != d:
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
    def _given(self) -> Tensor:
        """The (rows, d) tensor that was given: linear term or centre."""
        given = self.anchor if self._linear is None else self._linear
        assert given is not None
        return given

    def _with(self, hessian: Tensor | HessianOperator, linear: Tensor | None, anchor: Tensor | None) -> Quadratic:
        """A relative of this problem, made of tensors that were checked already."""
        changed = object.__new__(Quadratic)
        changed.hessian, changed._linear, changed.anchor, changed.centred = hessian, linear, anchor, self.centred
        changed.factors = self.factors if hessian is self.hessian else Factors(self.factors.keep)
        return changed

    def sharing(self) -> Quadratic:
        """The same problem, whose factorisations are kept for every problem made of it by `rows` or `damped`."""
        shared = self._with(self.hessian, self._linear, self.anchor)
        shared.factors = Factors(keep=True)
        return shared

    @classmethod
    def at(cls, centre: Tensor, hessian: Tensor | HessianOperator) -> Quadratic:
        """1/2 (v - c) H (v - c)^T up to a constant: the layer problem min ||W X - V X||^2 with c = W, H = X X^T."""
        _require_tensors(hessian, centre=centre)
        centre = centre.to(hessian.dtype) if isinstance(hessian, Tensor) else centre
        return cls(hessian, None, centre, centred=True)

    @classmethod
    def stack(cls, problems: Sequence[Quadratic]) -> Quadratic:
        """The rows of several problems with one Hessian as one problem.

        Raises:
            ProblemError: their Hessians are not the same object.
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
        """(rows, d), the rows b."""
        if self._linear is None:
            assert self.anchor is not None
            self._linear = self.operator.matmul(self.anchor)
        return self._linear

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that are sought."""
        return self._given.dtype

    @property
    def device(self) -> torch.device:
        """Where the problem lies."""
        return self._given.device

    @classmethod
    def newton(cls, point: Tensor, gradient: Tensor, hessian: Tensor | HessianOperator) -> Quadratic:
        """The second-order model of a smooth f at `point` (paper, eq. WT-iter): its centre is the Newton point."""
        _require_tensors(hessian, point=point, gradient=gradient)
        return cls(hessian, _operator(hessian).matmul(point) - gradient, point)

    @property
    def operator(self) -> HessianOperator:
        """The Hessian as an operator, whatever it is stored as."""
        return _operator(self.hessian)

    @property
    def matrix(self) -> Tensor:
        """The Hessian as a dense (d, d) tensor; an operator is multiplied out."""
        if isinstance(self.hessian, Tensor):
            return self.hessian
        identity = torch.eye(self.hessian.shape[0], dtype=self.dtype, device=self.device)
        return self.hessian.matmul(identity)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, d) of the matrix that is sought."""
        return self._given.shape[0], self._given.shape[1]

    def loss(self, weight: Tensor) -> Tensor:
        """q of every row, (rows,) in float64, whatever dtype the problem is in."""
        weight = weight.double()
        product = _double_product(weight, self.hessian, self.dtype)
        if self.centred:  # (v / 2 - c) H v^T: the same number from one product
            assert self.anchor is not None
            return ((0.5 * weight - self.anchor.double()) * product).sum(1)
        return ((0.5 * product - self.linear.double()) * weight).sum(1)

    def gradient(self, weight: Tensor) -> Tensor:
        """V H - B, (rows, d)."""
        return self.operator.matmul(weight) - self.linear

    def damped(self, amount: float) -> Quadratic:
        """With the proximal term 1/2 amount ||v - anchor||^2: H + amount I and b + amount anchor, b never unchanged."""
        if amount == 0:
            return self
        anchor = self.centre() if self.anchor is None else self.anchor
        matrix = self.matrix.clone()
        matrix.diagonal().add_(amount)
        linear = None if self.centred else self.linear + amount * anchor
        return self._with(matrix, linear, anchor)

    def centre(self) -> Tensor:
        """The unconstrained minimiser, (rows, d): B H^-1.

        Where H is singular up to rounding, that of least sum of H_ii v_i^2: the units of the variables do not matter.
        """
        if self.centred:
            assert self.anchor is not None
            return self.anchor
        solve = self.factors.get("centre", lambda: _solver(self.matrix))
        return solve(self.linear.double()).to(self.linear.dtype)

    def to(self, dtype: torch.dtype) -> Quadratic:
        """The same problem with dense tensors in another dtype."""
        if dtype == self.dtype == self.matrix.dtype:
            return self
        anchor = None if self.anchor is None else self.anchor.to(dtype)
        linear = None if self.centred else self.linear.to(dtype)
        changed = Quadratic(self.matrix.to(dtype), linear, anchor, self.centred)
        changed.factors = Factors(self.factors.keep)
        return changed

    def divided(self, amount: float) -> Quadratic:
        """q / amount, which has the same minimisers."""
        linear = None if self.centred else self.linear / amount
        return self._with(self.matrix / amount, linear, self.anchor)

    def in_units(self, unit: float) -> Quadratic:
        """The problem of v / unit, over unit^2: b and the anchor become smaller, H stays."""
        linear = None if self.centred else self.linear / unit
        return self._with(self.hessian, linear, None if self.anchor is None else self.anchor / unit)

    def without(self, columns: Tensor) -> Quadratic:
        """Columns (boolean, (d,)) made harmless: unit curvature on the scale of the others, zero target and anchor."""
        matrix = self.matrix.clone()
        matrix[columns] = 0
        matrix[:, columns] = 0
        matrix.diagonal()[columns] = matrix.diagonal()[~columns].mean()
        linear = None if self.centred else self.linear.masked_fill(columns, 0)
        anchor = None if self.anchor is None else self.anchor.masked_fill(columns, 0)
        return self._with(matrix, linear, anchor)

    def rows(self, index: Tensor | slice) -> Quadratic:
        """The problem of some rows only; the Hessian is shared, not copied."""
        linear = None if self._linear is None else self._linear[index]
        return self._with(self.hessian, linear, None if self.anchor is None else self.anchor[index])


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        weight: (rows, d), exactly zero outside the mask.
        mask: boolean (rows, d).
        problem: whose q is reported, undamped.
        stats: whatever the solver wants to tell: iterations, damping used, swaps made, seconds.
    """

    weight: Tensor
    mask: Tensor
    problem: Quadratic = field(repr=False)
    stats: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def loss(self) -> Tensor:
        """(rows,) float64, q of each row, without the constant that would make it a squared error.

        Computed when first asked for: it costs a product in float64.
        """
        return self.problem.loss(self.weight)

    @classmethod
    def of(cls, problem: Quadratic, weight: Tensor, mask: Tensor, **stats: Any) -> Solution:
        """A solution with its zeros made exact."""
        weight = weight.masked_fill(~mask, 0)
        return cls(weight, mask, problem, stats)


def relative_error(problem: Quadratic, weight: Tensor) -> float:
    """tr((V - C) H (V - C)^T) / tr(C H C^T), under this problem's own Hessian; 0 where C H C^T is zero."""
    centre = problem.centre().double()
    difference = weight.double() - centre
    error = (_double_product(difference, problem.hessian, problem.dtype) * difference).sum()
    size = (_double_product(centre, problem.hessian, problem.dtype) * centre).sum()
    return float(error / size) if float(size) > 0 else 0.0


def _solver(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Rows B to their centres B H^-1, in float64; H^-1 is the pseudo-inverse where H is singular up to rounding."""
    # Rounded entries can make a small positive pivot of a zero; where there is none as small, all are real.
    rounding = torch.finfo(matrix.dtype).eps
    factor, info = torch.linalg.cholesky_ex(matrix.double())
    if int(info) == 0 and bool((factor.diagonal().square() > 4 * rounding * matrix.diagonal()).all()):
        return lambda rows: torch.cholesky_solve(rows.T, factor).T
    scale = matrix.diagonal().double().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    # With unit curvatures one threshold serves all variables; a large one would bury the others.
    unit = matrix.double() / scale / scale[:, None]
    pseudo_inverse: Tensor = torch.linalg.pinv(unit, hermitian=True, atol=len(unit) * rounding, rtol=0.0)
    return lambda rows: rows / scale @ pseudo_inverse / scale


def _require_tensors(hessian: object, **rows: object) -> None:
    found = {"Hessian": hessian} if not hasattr(hessian, "matmul") else {}
    found |= {name: value for name, value in rows.items() if not (value is None or isinstance(value, Tensor))}
    for name, value in found.items():
        raise ProblemError(f"The {name} must be a torch tensor, got {type(value).__name__}; torch.as_tensor makes one.")


def _is_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms, and a sum is the cheaper thing to compute."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _operator(hessian: Tensor | HessianOperator) -> HessianOperator:
    return DenseHessian(hessian) if isinstance(hessian, Tensor) else hessian


def _double_product(rows: Tensor, hessian: Tensor | HessianOperator, dtype: torch.dtype) -> Tensor:
    """Rows times the Hessian in float64; an operator computes in the dtype of its problem."""
    if isinstance(hessian, Tensor):
        return rows @ hessian.double()
    return hessian.matmul(rows.to(dtype)).double()
