"""Layers that read units, as quadratics on the inputs of the dense model, and their joint quadratic.

Rows are weighted by the nats that their errors cost, so that all layers count in one currency. Removing a unit that
several layers read costs the sum of their losses: one quadratic on the columns of all layers side by side. Its Hessian
has one block for each layer, and each unit is one group of columns. Columns that belong to no unit of the site are
always kept, and are eliminated beforehand. This leaves H_UU - H_UF H_FF^-1 H_FU for the columns U of units and F of
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iobs.core.linalg import cholesky
from iobs.core.quadratic import Quadratic
from iobs.errors import NotPositiveDefiniteError
from iobs.pruning.calibration.gram import Statistics
from iobs.pruning.calibration.losses import divergence, mean_loss
from iobs.pruning.calibration.row_fisher import RowFisher
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import LossFunction
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch, Samples
from iobs.pruning.samples.outputs import class_axis, logits
from iobs.pruning.structure.units import Index
from iobs.solvers.grouped.system import definite_factor, refitted

_LEAST_DAMPING = 1e-6
_RAISES = 5  # a failed factorisation raises the damping tenfold, at most this many times
DAMAGE_LIMIT = 100.0  # nats; a divergence above it, or NaN, says no more than that the network is destroyed
_ENTROPY = 1.0  # nats that softened outputs have on average, or half of the most if there are few classes
_TEMPERATURES = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class ReaderProblem:
    """A layer that reads units, on its dense inputs.

    Attributes:
        layer: the layer.
        problem: damped, with the dense weights as centre, float64; its loss is in nats for one output of the model.
        scale: (rows, 1) square roots of the weights of the rows.
        mean: (columns,) mean inputs, if the bias is refitted; otherwise None.
    """

    layer: Layer
    problem: Quadratic
    scale: Tensor
    mean: Tensor | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layer: Layer,
        statistics: Statistics,
        *,
        damping: float,
        bias: bool,
        fisher: RowFisher,
    ) -> ReaderProblem:
        """The problem of a layer.

        Args:
            model: the dense model.
            layer: the layer.
            statistics: of its inputs.
            damping: relative to the mean of the Hessian's diagonal; raised tenfold while the Hessian is indefinite.
            bias: the bias is refitted.
            fisher: prices of rows; a layer without a price costs one nat if it gives no output.
        """
        weight = layer.read(model).double()
        free = bias and statistics.calibration.means is not None
        gram = (statistics.centred if free else statistics).calibration
        hessian = _definite(gram.own[0].double(), max(damping, _LEAST_DAMPING))
        prices = fisher.price(layer, gram)
        if prices is None:
            energy = float(((weight @ hessian) * weight).sum())
            prices = torch.full((len(weight),), 1 / max(energy, 1e-30), dtype=torch.float64)
        scale = (2 * prices.to(weight.device)).sqrt()[:, None]  # the loss of a quadratic has a factor 1/2
        mean = gram.means.own[0] if free and gram.means is not None else None
        return cls(layer, Quadratic.at(weight * scale, hessian), scale, mean)

    @property
    def energy(self) -> float:
        """Nats that the layer costs if it gives no output."""
        centre = self.problem.centre().double()
        return 0.5 * float(((centre @ self.problem.matrix) * centre).sum())

    def change(self, kept: Tensor) -> tuple[Tensor, Tensor | None]:
        """Changes of weight (rows, columns) and bias (rows,) if only some columns, bool (columns,), are kept."""
        weight = refitted(self.problem, torch.arange(len(kept)), kept).weight.double()
        change = (weight - self.problem.centre().double()) / self.scale
        return change, None if self.mean is None else -change @ self.mean


@dataclass(frozen=True)
class ReaderShare:
    """The share of one reader in a joint quadratic.

    Attributes:
        reader: the reader.
        columns: of every unit.
        present: columns that are left by units of other sites, bool (columns,).
    """

    reader: ReaderProblem
    columns: Index
    present: Tensor


@dataclass(frozen=True)
class SiteCurve:
    """Damage to the model at every width of a site.

    Attributes:
        layer: the first reader.
        damages: (units + 1,), nats for one output of the model after 0, 1, ... removals, with the readers refitted.
        energy: damage if the readers give no output at all.
    """

    layer: Layer
    damages: list[float]
    energy: float

    def damage(self, width: int) -> float:
        """The damage with `width` units left."""
        return self.damages[len(self.damages) - 1 - width]


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


def joint_quadratic(parts: Sequence[ReaderShare]) -> tuple[Quadratic, Tensor]:
    """The joint quadratic of all readers of a site, and the unit of each of its columns, int64.

    Raises:
        NotPositiveDefiniteError: the other columns of a reader have a singular Hessian.
    """
    hessians, linears, labels = [], [], []
    for part in parts:
        hessian, linear = _of_units(part)
        hessians.append(hessian)
        linears.append(linear)
        labels += [unit for unit, columns in enumerate(part.columns) for _ in columns]
    return Quadratic(_diagonal(hessians), _diagonal(linears)), torch.tensor(labels)


def _diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """A matrix with these blocks on its diagonal, zero elsewhere."""
    matrix: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return matrix


def _of_units(part: ReaderShare) -> tuple[Tensor, Tensor]:
    """H and B of the columns of units, after the elimination of the other columns that are present."""
    problem = part.reader.problem
    units = torch.tensor([column for columns in part.columns for column in columns])
    fixed = part.present.clone()
    fixed[units] = False
    others = fixed.nonzero().flatten()
    matrix, linear = problem.matrix, problem.linear.double()
    hessian, linear_of_units = matrix[units][:, units], linear[:, units]
    if not len(others):
        return hessian, linear_of_units
    crossed = matrix[others][:, units]
    solved = torch.cholesky_solve(crossed, cholesky(matrix[others][:, others]))
    return hessian - crossed.T @ solved, linear_of_units - linear[:, others] @ solved


# ---- KL divergence of softened outputs: the damage of a width, also for networks that are sure of their training data
# A network that is certain of its calibration samples shows damage only on the few samples near a border, which makes
# its KL divergence noisy. Outputs divided by a temperature let every sample count.
def damage(model: nn.Module, answered: Samples, loss: LossFunction) -> float:
    """The mean of a softened divergence from the dense outputs, or the upper limit if it is NaN or larger."""
    value = mean_loss(model, answered, loss)
    return DAMAGE_LIMIT if math.isnan(value) else min(value, DAMAGE_LIMIT)


def softened(temperature: float) -> LossFunction:
    """The divergence for batches of `losses.answered`, from outputs that are divided by a temperature."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, (tuple, list))
        inputs, answers, *labels = batch
        outputs = logits(batches.forward(model, batch))
        return divergence(model, (inputs, *labels), answers / temperature, outputs / temperature)

    return loss


def temperature_of(answered: Samples) -> float:
    """The least temperature at which the dense outputs have enough entropy; 1 for outputs that are no classes."""
    batch = answered.batches[0]
    assert isinstance(batch, (tuple, list))
    inputs, answers, *labels = batch
    axis = class_axis(answers, (inputs, *labels))
    if axis is None:
        return _TEMPERATURES[0]
    scores = answers.movedim(axis, -1).float()
    enough = min(_ENTROPY, 0.5 * float(torch.tensor(scores.shape[-1]).log()))
    for temperature in _TEMPERATURES:
        shares = (scores / temperature).softmax(-1)
        if float(torch.special.entr(shares).sum(-1).mean()) >= enough:
            return temperature
    return _TEMPERATURES[-1]
