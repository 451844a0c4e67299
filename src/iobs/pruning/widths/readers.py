"""Layers that read units, as quadratics on the inputs of the dense model, and their joint quadratic.

Removing a unit that several layers read costs the sum of their losses. Each loss is divided by the squared output of
its layer, so that all layers count alike. The sum is one quadratic on the columns of all layers side by side. Its
Hessian has one block for each layer, and each unit is one group of columns. Columns that belong to no unit of the site
are always kept, and are eliminated beforehand. This leaves H_UU - H_UF H_FF^-1 H_FU for the columns U of units and F of
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.core.linalg import cholesky
from iobs.core.quadratic import Quadratic
from iobs.errors import NotPositiveDefiniteError
from iobs.pruning.calibration.gram import Statistics
from iobs.pruning.network.layers import Layer
from iobs.pruning.structure.units import Index
from iobs.solvers.grouped.system import definite_factor, refitted

_LEAST_DAMPING = 1e-6
_RAISES = 5  # a failed factorisation raises the damping tenfold, at most this many times


@dataclass(frozen=True)
class Solved:
    """Weights (rows, columns) and bias (rows,) of a reader; the bias is None if the layer has none."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class ReaderProblem:
    """A layer that reads units, on its dense inputs.

    Attributes:
        layer: the layer.
        problem: damped, with the dense weights as centre, float64.
        mean: mean inputs (columns,), if the bias is free; otherwise None.
        bias: of the dense layer, or None.
    """

    layer: Layer
    problem: Quadratic
    mean: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(
        cls, model: nn.Module, layer: Layer, statistics: Statistics, damping: float, bias: str | None
    ) -> ReaderProblem:
        """The problem of a layer.

        Args:
            model: the dense model.
            layer: the layer.
            statistics: of its inputs.
            damping: relative to the mean of the Hessian's diagonal; raised tenfold while the Hessian is indefinite.
            bias: name of the bias that is refitted, or None.
        """
        weight = layer.read(model).double()
        free = bias is not None and statistics.calibration.means is not None
        gram = (statistics.centred if free else statistics).calibration
        hessian = _definite(gram.own[0].double(), max(damping, _LEAST_DAMPING))
        mean = gram.means.own[0] if free and gram.means is not None else None
        own = None if bias is None else model.get_parameter(bias).detach().clone()
        return cls(layer, Quadratic.at(weight, hessian), mean, own)

    @property
    def energy(self) -> float:
        """Squared output per input row."""
        centre = self.problem.centre().double()
        return float(((centre @ self.problem.matrix) * centre).sum())

    def on(self, kept: Tensor) -> Solved:
        """Exact weights and bias on some columns, bool (columns,)."""
        if bool(kept.all()):
            return Solved(self.problem.centre(), self.bias)
        weight = refitted(self.problem, torch.arange(len(kept)), kept).weight
        if self.mean is None or self.bias is None:
            return Solved(weight, self.bias)
        return Solved(weight, self.bias.double() + (self.problem.centre().double() - weight.double()) @ self.mean)


@dataclass(frozen=True)
class Part:
    """The share of one reader in a joint quadratic.

    Attributes:
        reader: the reader.
        columns: of every unit.
        present: columns that are left by units of other sites, bool (columns,).
    """

    reader: ReaderProblem
    columns: Index
    present: Tensor


def _definite(gram: Tensor, damping: float) -> Tensor:
    """A Gram (columns, columns) with a damping, relative to the mean of its diagonal, that makes it definite.

    Raises:
        NotPositiveDefiniteError: no damping does.
    """
    mean = float(gram.diagonal().mean())
    for attempt in range(_RAISES + 1):
        damped = gram.clone()
        damped.diagonal().add_(damping * 10**attempt * mean + 1e-30)
        try:
            definite_factor(damped)
        except NotPositiveDefiniteError:
            if attempt == _RAISES:
                raise
        else:
            break
    return damped


def joint_quadratic(parts: Sequence[Part]) -> tuple[Quadratic, Tensor]:
    """The joint quadratic of all readers of a site, and the unit of each of its columns, int64.

    Raises:
        NotPositiveDefiniteError: the other columns of a reader have a singular Hessian.
    """
    hessians, linears, labels = [], [], []
    for part in parts:
        hessian, linear = _of_units(part)
        energy = part.reader.energy
        scale = 1 / energy if energy > 0 else 1.0  # a layer without output costs nothing at any scale
        hessians.append(hessian * scale)
        linears.append(linear * scale)
        labels += [unit for unit, columns in enumerate(part.columns) for _ in columns]
    return Quadratic(_diagonal(hessians), _diagonal(linears)), torch.tensor(labels)


def _diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """A matrix with these blocks on its diagonal, zero elsewhere."""
    found: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return found


def _of_units(part: Part) -> tuple[Tensor, Tensor]:
    """H and B of the columns of units, after the elimination of the other columns that are present."""
    problem = part.reader.problem
    units = torch.tensor([column for columns in part.columns for column in columns])
    fixed = part.present.clone()
    fixed[units] = False
    others = fixed.nonzero().flatten()
    matrix, linear = problem.matrix, problem.linear.double()
    hessian, wanted = matrix[units][:, units], linear[:, units]
    if not len(others):
        return hessian, wanted
    crossed = matrix[others][:, units]
    solved = torch.cholesky_solve(crossed, cholesky(matrix[others][:, others]))
    return hessian - crossed.T @ solved, wanted - linear[:, others] @ solved
