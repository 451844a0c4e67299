"""Objectives with a table of coefficients: a feature has one per output, which form a group of coordinates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import Self

import numpy as np

from iobs.optimize.objectives import design as designs
from iobs.optimize.objectives.design import Array, Design, Indices


class Tabled(ABC):
    """Base class of f(Theta) with Theta (d, C) stored row by row, features first, then forced coordinates.

    Attributes:
        design: X as the objective uses it.
        outputs: C, the number of classes or responses.
        dimension: number of entries of theta.
        forced: coordinates that are always in the support.
        ridge: of every coordinate.
        squares: weighted sums of squares of the columns of the design.
    """

    design: Design
    outputs: int
    dimension: int
    forced: Indices
    ridge: Array
    squares: Array

    @property
    def groups(self) -> list[Indices]:
        """The coordinates of every feature."""
        features = (self.dimension - self.forced.size) // self.outputs
        return [np.arange(j * self.outputs, (j + 1) * self.outputs) for j in range(features)]

    @abstractmethod
    def table(self, theta: Array) -> tuple[Array, Array]:
        """The coefficients of every output (C, d) and their constants (C,)."""

    def constant_coordinates(self) -> Indices:
        """The coordinates of zero columns."""
        return np.flatnonzero(np.repeat(self.squares == 0, self.outputs)).astype(np.int64)

    def restricted(self, support: Indices) -> Self:
        """f on some features; the support must hold all coordinates of each, and the forced ones."""
        features = support[:: self.outputs] // self.outputs
        assert (support.reshape(-1, self.outputs)[:, 0] == features * self.outputs).all(), "whole features only"
        part = copy(self)
        part.design = designs.DenseDesign(np.asfortranarray(self.design.columns(features)))
        part.dimension = support.size
        part.forced = np.flatnonzero(np.isin(support, self.forced)).astype(np.int64)
        part.ridge, part.squares = self.ridge[support], self.squares[features]
        return part

    def split(self, theta: Array) -> tuple[Array, float]:
        """theta and 0; use `table` for coefficients and constants."""
        return theta, 0.0
