"""Settings for single layers, by name."""

from __future__ import annotations

import fnmatch
import re
from copy import copy
from dataclasses import dataclass

from iobs.core.grids import Budget
from iobs.core.patterns import Pattern, as_pattern
from iobs.errors import PatternError, ProblemError
from iobs.solvers import Solver, require_known_solver


@dataclass(frozen=True)
class Rule:
    """Settings for the layers whose name matches; of several matching rules the last one wins, field by field.

    Layers with a pattern of their own take no part in the allocation of the other layers' sparsity.

    Args:
        match: shell pattern ("*.mlp.*"), or "re:" and a regular expression for the whole name.
        pattern: replaces the pattern of the run: a Pattern, a sparsity such as 0.3, or "2:4".
        solver: replaces the recipe's solver; a name or a solver of one layer.
        dense: leave these layers dense.

    Raises:
        ProblemError: the rule sets nothing, contradicts itself, or its expression or solver does not exist.
        PatternError: the pattern does not exist, or is a budget of bits.
    """

    match: str
    pattern: Pattern | float | str | None = None
    solver: str | Solver | None = None
    dense: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise ProblemError(f"match of a rule must be a name pattern, got {self.match!r}.")
        if not isinstance(self.dense, bool):
            raise ProblemError(f"dense of the rule {self.match!r} must be true or false, got {self.dense!r}.")
        if self.dense and (self.pattern is not None or self.solver is not None):
            raise ProblemError(f"The rule {self.match!r} says dense=True and a pattern or solver; give one of them.")
        if not self.dense and self.pattern is None and self.solver is None:
            raise ProblemError(f"The rule {self.match!r} changes nothing; give pattern=, solver= or dense=True.")
        if isinstance(self.pattern, Budget):
            raise PatternError(
                f"The rule {self.match!r} has a budget of bits, which is divided among layers; a rule gives each "
                'of its layers one pattern, such as "int4". Give the budget as the pattern of the run.'
            )
        if self.pattern is not None:
            object.__setattr__(self, "pattern", copy(as_pattern(self.pattern)))  # known from the run's by identity
        if self.solver is not None:
            require_known_solver(self.solver)
        try:
            re.compile(self.expression)
        except re.error as error:
            raise ProblemError(f"{self.match!r} is not a regular expression: {error}.") from None

    @property
    def expression(self) -> str:
        """The regular expression that a layer's whole name must match."""
        return self.match[3:] if self.match.startswith("re:") else fnmatch.translate(self.match)

    def matches(self, name: str) -> bool:
        """Check a layer's name."""
        return re.fullmatch(self.expression, name) is not None
