"""Settings of the problem of one layer: solver, refinement and damping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from types import NoneType

from iobs.errors import ProblemError, is_a
from iobs.pruning.recipe.network_solvers import NETWORK_SOLVERS, NetworkSolver
from iobs.solvers import REFINEMENTS, SOLVERS, Refinement, Solver, require_known_refinement, require_known_solver
from iobs.solvers.families import UNIT_SOLVERS


@dataclass(frozen=True)
class LayerSettings:
    """The first fields of a recipe; `Recipe` describes them."""

    solver: str | Solver | NetworkSolver = "admm"
    refine: str | Refinement | None = None
    damping: float = 0.01

    @property
    def network_solver(self) -> NetworkSolver | None:
        """The solver, if it prunes all layers together; None if it prunes single layers."""
        if isinstance(self.solver, str) and self.solver in NETWORK_SOLVERS:
            return NETWORK_SOLVERS[self.solver]()
        return self.solver if isinstance(self.solver, NetworkSolver) else None

    def _require_numbers(self) -> None:
        """Check the damping.

        Raises:
            ProblemError: it is no number, or outside its range.
        """
        if not is_a(Real, self.damping):
            raise ProblemError(f"damping must be a number, got {self.damping!r}.")
        if not 0 <= self.damping < math.inf:
            raise ProblemError(f"damping must not be negative or infinite, got {self.damping}; 0.01 is usual.")

    def _require_solvers(self) -> None:
        """Check solver and refinement.

        Raises:
            ProblemError: one of them is of another kind, or unknown.
        """
        for name, kinds in (("solver", (*REFINEMENTS.values(),)), ("refine", (*SOLVERS.values(),))):
            value = getattr(self, name)
            if isinstance(value, kinds) or not (callable(value) or isinstance(value, (str, NetworkSolver, NoneType))):  # type: ignore[arg-type]
                raise ProblemError(f"{name} must be a name or an object with its options, got {value!r}.")
        if self.solver is None or isinstance(self.refine, NetworkSolver):
            raise ProblemError("solver must be a name or a solver, and refine a name, a refinement or None.")

    def _require_known_names(self) -> None:
        """Check the names of a solver of single layers and of a refinement.

        Raises:
            ProblemError: a name is unknown.
        """
        assert not isinstance(self.solver, NetworkSolver)
        try:
            require_known_solver(self.solver)
        except ProblemError as error:
            others = ", ".join(sorted(NETWORK_SOLVERS))
            raise ProblemError(
                f"{str(error).rstrip('.')}; or one of the whole network: {others}; or of whole units: "
                f"{', '.join(UNIT_SOLVERS)}."
            ) from None
        require_known_refinement(self.refine)
