"""Bias of every row as a free variable, eliminated from a quadratic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from iobs.core.quadratic import Quadratic
from iobs.errors import ProblemError


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
