"""Published one-shot pruners of a whole network, as values; `iobs.pruning.baselines` has their mathematics."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from iobs.errors import ProblemError, is_a


@dataclass(frozen=True)
class NetworkSolver:
    """A solver of one quadratic over the weights of all layers, under one global count.

    Args:
        stages: number of prunings on the way to the requested sparsity. Each takes new gradients; the density falls by
            equal factors from 0.9.
        damping: added to the diagonal of the empirical Fisher matrix.
        block: least number of weights in a diagonal block of the Fisher matrix; every layer is cut evenly.

    Raises:
        ProblemError: a setting is not positive.
    """

    stages: int = 1
    damping: float = 1e-4
    block: int = 500

    def __post_init__(self) -> None:
        counts = is_a(Integral, self.stages, self.block) and self.stages >= 1 and self.block >= 1
        if not counts or not is_a(Real, self.damping) or self.damping <= 0:
            raise ProblemError(
                f"stages, damping and block must be positive, got {self.stages}, {self.damping} and {self.block}."
            )


class GlobalMagnitude(NetworkSolver):
    """Keep the largest weights of the whole network, unchanged."""


class WoodFisher(NetworkSolver):
    """Rank weights one by one by w^2 / (2 [F^-1]_ii) and add up their updates (Singh and Alistarh, 2020)."""


class CBS(NetworkSolver):
    """Search the mask by swaps, interactions included, then update jointly (Yu et al., 2022)."""


@dataclass(frozen=True)
class CHITA(NetworkSolver):
    """Sparse least squares in the gradients; `stages=15` is CHITA++ (Benbaki et al., 2023).

    Args:
        searches: limit of searches for a better mask in every stage. Each takes a projected gradient step with a line
            search from the exact solution on the mask, and solves again. Without a search the mask is often that of
            magnitude, as in the best one-shot runs of the authors' code on ResNet-20. A search lowers the quadratic
            loss, and may lower the accuracy.

    Raises:
        ProblemError: as `NetworkSolver`, or `searches` is negative.
    """

    searches: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_a(Integral, self.searches) or self.searches < 0:
            raise ProblemError(f"searches must be a whole number, not negative; got {self.searches!r}.")


NETWORK_SOLVERS: dict[str, type[NetworkSolver]] = {
    "global-magnitude": GlobalMagnitude,
    "woodfisher": WoodFisher,
    "cbs": CBS,
    "chita": CHITA,
}
