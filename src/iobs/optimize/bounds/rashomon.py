"""The Rashomon set: every support of k coordinates whose loss is near the best, proved complete by branch and bound.

The name is Breiman's (2001). The search tree and its bounds are those of `branch_and_bound`. Here a node is dropped
only if its bound exceeds the ceiling (1 + gap) f*. So the tree ends with every support below the ceiling. A better
support lowers the ceiling on the way. Nodes are visited by ascending bound. So a search that is stopped has still found
every support whose loss lies below the bound of the next node.

Of equal columns the tree holds one; supports with the others are added afterwards (`_expanded`). The last coordinate of
a support is not branched on: all its choices are computed at once.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.linalg import eigh

from iobs.errors import ProblemError, is_a, shown
from iobs.optimize.bounds.certificate import require_limits
from iobs.optimize.bounds.convex import INTERRUPTED, FeatureProblem, NearOptimalSearch, compile_proofs
from iobs.optimize.bounds.convex_tree import OUT_OF_TIME
from iobs.optimize.bounds.reach import OutOfTimeError
from iobs.optimize.bounds.tree import Node, QuadraticArrays, SupportTree
from iobs.optimize.curvature import as_objective
from iobs.optimize.objectives.base import Objective
from iobs.optimize.objectives.design import Array, Indices, VectorLike
from iobs.optimize.objectives.tabled import Tabled
from iobs.optimize.problem import Problem, generator_of, require_storable
from iobs.optimize.refit.newton import Fit, inverse_block, refit
from iobs.optimize.refit.within import Bounds
from iobs.optimize.search import auto

if TYPE_CHECKING:
    from iobs.core.quadratic import Quadratic

_MOST_OPEN = 2_000_000  # most open nodes
_EQUAL = 1e-9  # losses that differ by less, relative to the best, count as equal
_EQUAL_START = 1e-12  # the same relative to f(0), for fits without residual
_NULL = 1e-12  # relative eigenvalues below this count as zero


@dataclass(frozen=True)
class Member:
    """A model of a Rashomon set.

    Attributes:
        support: sorted variables (k,), forced ones included.
        coefficients: of the support (k,), or (C, k) where a variable has C of them.
        intercept: the constant, or C constants (C,); 0 if the objective has none.
        loss: f of the fit on the support.
        increases: rise of f if one variable of the support is left out and the others are fitted again (k,).
    """

    support: Indices
    coefficients: Array
    intercept: float | Array
    loss: float
    increases: Array


@dataclass(frozen=True)
class Importance:
    """The importance of one variable over a Rashomon set; all rises are relative to the best loss.

    Attributes:
        feature: index of the variable.
        presence: whether "all", "some" or "none" of the members use the variable.
        share: share of the members that use it.
        least: smallest rise of a member's loss if the variable is left out and the others are fitted again. It is 0 if
            a member does without the variable.
        most: largest such rise; 0 if no member uses it.
        without: rise from the best loss to the best member without the variable. It is infinite if there is no such
            member. In a complete set the rise is then above the gap.
    """

    feature: int
    presence: Literal["all", "some", "none"]
    share: float
    least: float
    most: float
    without: float


@dataclass(frozen=True)
class RashomonSet:
    """The result of `iobs.rashomon_set`; iterates over its members, and prints as a table.

    Attributes:
        members: the models, best first; equal losses by ascending indices.
        dimension: number of variables to choose from.
        best: the lowest loss f*; proved to be the lowest possible if the set is complete.
        gap: the relative gap that was asked for.
        complete: whether every support within the gap is a member, by proof.
        complete_below: every support with a loss below this value is a member, whether the set is complete or not.
        nodes: number of nodes of the search tree that were visited.
        seconds: wall time.
        reason: why the set may be incomplete, in words; empty if it is complete.
    """

    members: tuple[Member, ...] = field(repr=False)
    dimension: int
    best: float
    gap: float
    complete: bool
    complete_below: float
    nodes: int
    seconds: float
    reason: str

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    @property
    def message(self) -> str:
        """The result in one sentence."""
        count = f"{len(self):,} model{'' if len(self) == 1 else 's'} within {self.gap:.4g} of the best loss"
        if self.complete:
            return f"{count}; proved complete ({self.nodes:,} nodes, {self.seconds:.2f} s)"
        proved = self._relative(self.complete_below)
        extent = f"complete up to {proved:.3g} of the best known loss" if proved > 0 else "nothing is proved"
        return f"{count} found; NOT complete, {self.reason}: {extent} ({self.nodes:,} nodes, {self.seconds:.2f} s)"

    def importance(self) -> list[Importance]:
        """The importance of every variable, those that most members use first."""
        count = len(self)
        uses, most = np.zeros(self.dimension, np.int64), np.zeros(self.dimension)
        least, without = np.full(self.dimension, np.inf), np.full(self.dimension, np.inf)
        for member in self.members:
            used, rises = member.support, member.increases / self._scale
            uses[used] += 1
            most[used] = np.maximum(most[used], rises)
            least[used] = np.minimum(least[used], rises)
            absent = np.ones(self.dimension, dtype=np.bool_)
            absent[used] = False
            without[absent] = np.minimum(without[absent], max(0.0, self._relative(member.loss)))
        least[uses < count] = 0.0
        order = np.lexsort((np.arange(self.dimension), -most, -uses))
        return [
            Importance(
                int(j),
                "all" if uses[j] == count else "some" if uses[j] else "none",
                float(uses[j] / max(count, 1)),
                float(least[j]),
                float(most[j]),
                float(without[j]),
            )
            for j in order
        ]

    def table(self, names: Sequence[str] | None = None) -> str:
        """The members' variables and their importance, as text.

        Args:
            names: of the variables (dimension,); x0, x1, ... if not given.

        Raises:
            ProblemError: the number of names is not the number of variables.
        """
        names = [f"x{j}" for j in range(self.dimension)] if names is None else list(names)
        if len(names) != self.dimension:
            raise ProblemError(f"Give {self.dimension} names, one per variable, got {len(names)}.")
        shown = [row for row in self.importance() if row.presence != "none"]
        width = max([len(names[row.feature]) for row in shown] + [8])
        lines = [self.message, f"{'variable':<{width}}  {'models':>7}  {'loss if left out':>19}  {'best without':>12}"]
        for row in shown:
            interval = f"+{row.least:.2%} to +{row.most:.2%}"
            other = f"+{row.without:.2%}" if math.isfinite(row.without) else f"> {self.gap:.2%}"
            other = other if self.complete or math.isfinite(row.without) else "not found"
            lines.append(f"{names[row.feature]:<{width}}  {row.share:>7.1%}  {interval:>19}  {other:>12}")
        unused = self.dimension - len(shown)
        return "\n".join([*lines, f"{unused} of {self.dimension} variables are in no model"])

    def __str__(self) -> str:
        return self.table()

    @property
    def _scale(self) -> float:
        return max(abs(self.best), 1e-300)

    def _relative(self, loss: float) -> float:
        return (loss - self.best) / self._scale


def rashomon_set(
    objective: Objective | Quadratic,
    k: int,
    *,
    gap: float = 0.05,
    at_most: bool = False,
    seconds: float = 60.0,
    max_members: int = 20_000,
    lower: float | VectorLike | None = None,
    upper: float | VectorLike | None = None,
    seed: int = 0,
) -> RashomonSet:
    """Find every support of k coordinates whose loss is within a relative gap of the best loss.

    Supports whose losses equal the ceiling up to rounding belong to the set, so `gap=0` returns all best supports.
    Coordinates that f does not depend on are in no support. With more samples than columns the search is quick for some
    hundred columns. Where columns depend on each other it is little better than trying every support.

    An interruption (Ctrl+C) of a search that is not of plain least squares returns the members found so far, once there
    is a first one.

    Args:
        objective: a convex objective of `iobs.objectives`, or an `iobs.Quadratic` of one row.
        k: size of a support, forced coordinates not counted; of an objective with several coefficients per feature the
            number of features.
        gap: largest (f - f*) / |f*| of a member, f* being the best loss.
        at_most: whether supports of fewer than k coordinates are members too.
        seconds: time limit, compilation not counted; the result says whether the set is complete.
        max_members: the search stops, and the set is not complete, at more members.
        lower: least value of every coefficient, at most 0; as `iobs.minimize`.
        upper: largest value of every coefficient, at least 0.
        seed: random seed of the search for a first support.

    Raises:
        ProblemError: f is not known to be convex, is unbounded below, has a coefficient that nothing bounds, or is a
            quadratic too large to store H; gap, seconds or max_members are out of range.
        NotPositiveDefiniteError: the Hessian has a negative eigenvalue.
    """
    objective = as_objective(objective)
    require_limits(gap=gap, seconds=seconds)
    if not np.isfinite(gap):
        raise ProblemError(f"gap must be finite, got {gap}.")
    if not is_a(Integral, max_members) or max_members < 1:
        raise ProblemError(f"max_members must be an integer and at least 1, got {shown(max_members)}.")
    bounds = Bounds.on_objective(lower, upper, objective)
    problem = Problem(objective, k, rng=generator_of(seed))
    auto.compile_stages(objective)
    if not objective.quadratic or isinstance(objective, Tabled) or bounds is not None:
        _require_distinct(problem, bounded=bounds is not None)
        features_problem = FeatureProblem.of(problem, bounds)
        compile_proofs()
        begun = time.perf_counter()
        first = features_problem.first_fit()
        try:
            search = NearOptimalSearch(
                features_problem, first, gap, _EQUAL, at_most=at_most, max_members=max_members, deadline=begun + seconds
            )
        except (KeyboardInterrupt, OutOfTimeError) as error:
            reason = INTERRUPTED if isinstance(error, KeyboardInterrupt) else OUT_OF_TIME
            members, elapsed = (_convex_member(features_problem, first),), time.perf_counter() - begun
            return RashomonSet(members, _variables(objective), first.value, gap, False, -np.inf, 0, elapsed, reason)
        return _of_convex(features_problem, search, begun, seconds)
    require_storable("Branch and bound stores H", objective.dimension)
    begun = time.perf_counter()
    first = list(auto.stages(problem))[-1].fit
    tree = RashomonTree(QuadraticArrays(problem), first.value, gap, at_most)
    reason = tree.run(begun + seconds, max_members)
    return _result(tree, reason, begun, max_members)


def _require_distinct(problem: Problem, *, bounded: bool) -> None:
    """Refuse equal columns, of which nothing bounds the coefficients together."""
    copies = np.zeros(0, np.int64) if bounded else problem.objective.copied_coordinates(penalised=False)
    copies = copies[problem.candidates[copies]]
    if copies.size:
        raise ProblemError(
            f"The column of coefficient {copies[0]} is a multiple of another one, and nothing bounds the coefficients "
            f"of both together ({copies.size} such columns). Give a ridge, or bounds, or leave these columns out."
        )


class RashomonTree(SupportTree):
    """Best-first branch and bound that keeps every support below the ceiling.

    Attributes:
        best: the lowest loss known.
        gap: relative gap of the ceiling.
        at_most: whether smaller supports count.
        least: size of the smallest support, forced coordinates included.
        fits: the fits of supports below the ceiling at the time.
    """

    def __init__(self, quadratic: QuadraticArrays, best: float, gap: float, at_most: bool) -> None:
        super().__init__(quadratic, min(quadratic.count, quadratic.usable.size))
        self.best, self.gap, self.at_most = best, gap, at_most
        forced = int(np.isin(quadratic.usable, quadratic.problem.forced).sum())
        spare = sum(len(columns) - 1 for columns in quadratic.represented.values())
        self.least = forced if at_most else max(forced, quadratic.count - spare)
        self.fits: list[Fit] = []

    @property
    def tolerance(self) -> float:
        """The difference below which two losses count as equal."""
        return _EQUAL * abs(self.best) + _EQUAL_START * abs(self.quadratic.start)

    @property
    def ceiling(self) -> float:
        """The largest loss of a member."""
        return self.best + self.gap * abs(self.best) + self.tolerance

    @property
    def limit(self) -> float:
        """The bound above which a node holds no member: the ceiling and the allowance for rounding."""
        return self.ceiling + self.margin

    def run(self, deadline: float, max_members: int) -> str:
        """Search until no node is left below the ceiling, or a limit is reached; return which one, or ""."""
        self._begin()
        while self.open and self.open[0][0] <= self.limit:
            if time.perf_counter() > deadline:
                return OUT_OF_TIME
            if len(self.fits) > max_members:
                self._drop()
                if len(self.fits) > max_members:
                    return f"there are more than {max_members:,} members"
            if len(self.open) > _MOST_OPEN:
                return f"there are more than {_MOST_OPEN:,} open nodes"
            node = self._pop()
            self.nodes += 1
            if node.tied:
                self._branch_tied(node)
            else:
                self._branch(node)
        self.open.clear()
        self._drop()
        return ""

    def _begin(self) -> None:
        active = self.quadratic.usable
        if active.size == 0 or self.most == 0:
            self._keep(active[:0])
            return
        root = self._root()
        if root is None:
            raise ProblemError("f may be unbounded below where the Hessian is singular; add a ridge.")
        self._push(root.value, root)

    def _branch(self, node: Node) -> None:
        """Include what must be included, then split on the free coordinate that costs most to exclude."""
        inverse = self._inverse(node)
        bound = self._split(node, inverse)
        if bound is not None:
            node.inverse = inverse
            self._push(bound, node)

    def _branch_tied(self, node: Node) -> None:
        """Split where the Hessian is singular; go on as usual once it is definite on the active coordinates."""
        root = self.quadratic.root(node.active, node.inside)
        if root is None:
            self._split_tied(node)
        else:
            self.margin = max(self.margin, root[1])
            self._push(max(node.value, root[0].value), root[0])

    def _push(self, bound: float, node: Node) -> None:
        if node.active.size >= self.least:
            super()._push(bound, node)

    def _ended(self, node: Node) -> bool:
        """Keep the supports of a node that needs no further split; return whether it was such a node."""
        inside, free = node.active[node.inside], node.active[~node.inside]
        room = self.most - inside.size
        if room < 0 or node.active.size < self.least:
            return True
        if node.active.size == self.least:
            self._keep(node.active)
            return True
        if room > 1 and free.size:
            return False
        value, gains = self._last(inside, free)
        if inside.size >= self.least and value <= self.limit:
            self._keep(inside)
        if room and inside.size + 1 >= self.least:
            for j in free[value - gains <= self.limit]:
                self._keep(np.append(inside, j))
        return True

    def _last(self, inside: Indices, free: Indices) -> tuple[float, Array]:
        """f fitted on the included coordinates, and how much each free coordinate would lower it (free.size,)."""
        hessian, linear = self.quadratic.hessian, self.quadratic.linear
        if not inside.size:
            return self.quadratic.start, 0.5 * linear[free] ** 2 / hessian[free, free]
        units = 1.0 / np.sqrt(hessian[inside, inside])
        values, vectors = eigh(hessian[np.ix_(inside, inside)] * units * units[:, None])
        good = values > _NULL * values[-1]
        half = (vectors[:, good] / np.sqrt(values[good])).T * units  # half^T half = H_QQ^-1
        explained = half @ linear[inside]
        cross = half @ hessian[np.ix_(inside, free)]
        diagonal = hessian[free, free]
        unexplained = diagonal - (cross**2).sum(axis=0)
        slope = linear[free] - cross.T @ explained
        usable = unexplained > _NULL * diagonal
        gains = np.where(usable, 0.5 * slope**2 / np.where(usable, unexplained, 1.0), 0.0)
        return self.quadratic.start - 0.5 * float(explained @ explained), gains

    def _keep(self, support: Indices) -> None:
        """Fit a support on the data, and keep it if its loss is below the ceiling."""
        fit = refit(self.quadratic.problem.objective, np.union1d(support, self.quadratic.problem.forced))
        if fit.value <= self.ceiling:
            self.best = min(self.best, fit.value)
            self.fits.append(fit)

    def _drop(self) -> None:
        """Drop the fits that a better support has put above the ceiling."""
        self.fits = [fit for fit in self.fits if fit.value <= self.ceiling]


def _result(tree: RashomonTree, reason: str, begun: float, max_members: int) -> RashomonSet:
    objective = tree.quadratic.problem.objective
    # Sorted by loss; ties by the indices, so that the order does not depend on the search.
    ordered = sorted((fit for fit in tree.fits if fit.value <= tree.ceiling), key=_by_loss)
    every = ((fit, support) for fit in ordered for support in _expanded(tree, fit.support))
    members: list[Member] = []
    complete_below = tree.ceiling if not reason else tree.open[0][0] if tree.open else tree.best
    for fit, support in every:
        if len(members) == max_members:
            reason, complete_below = (
                reason or f"there are more than {max_members:,} members",
                min(complete_below, fit.value),
            )
            break
        same = np.array_equal(support, fit.support)
        members.append(_member(objective, fit if same else refit(objective, support), fit.value))
    below = min(complete_below - tree.margin, tree.ceiling) if reason else tree.ceiling
    variables, seconds = _variables(objective), time.perf_counter() - begun
    return RashomonSet(tuple(members), variables, tree.best, tree.gap, not reason, below, tree.nodes, seconds, reason)


def _by_loss(fit: Fit) -> tuple[float, list[int]]:
    return fit.value, fit.support.tolist()


def _member(objective: Objective, fit: Fit, loss: float) -> Member:
    inverse = inverse_block(objective.hessian_block(fit.theta, fit.support))
    values = fit.theta[fit.support]
    increases = 0.5 * values**2 / np.maximum(inverse.diagonal(), 1e-300)
    coefficients, intercept = objective.split(fit.theta)
    return Member(fit.support, coefficients[fit.support], intercept, loss, increases)


def _of_convex(features: FeatureProblem, search: NearOptimalSearch, begun: float, seconds: float) -> RashomonSet:
    try:
        reason = search.run(begun + seconds, max_nodes=sys.maxsize)
    except KeyboardInterrupt:
        reason = INTERRUPTED
    fits = sorted((fit for fit in search.fits.values() if fit.value <= search.limit), key=_by_loss)
    below = min(search.lower, search.limit) if reason else search.limit
    if len(fits) > search.max_members:
        reason, below = (
            f"there are more than {search.max_members:,} members",
            min(below, fits[search.max_members].value),
        )
    members = tuple(_convex_member(features, fit) for fit in fits[: search.max_members])
    elapsed = time.perf_counter() - begun
    variables = _variables(features.problem.objective)
    return RashomonSet(
        members, variables, search.best.value, search.gap, not reason, below, search.nodes, elapsed, reason
    )


def _variables(objective: Objective) -> int:
    """The number of variables to choose from."""
    coordinates = objective.coefficient_count
    return (coordinates - objective.forced.size) // objective.outputs if isinstance(objective, Tabled) else coordinates


def _convex_member(features: FeatureProblem, fit: Fit) -> Member:
    """The member of a fit; the rises are those of refits."""
    objective, count = features.problem.objective, _variables(features.problem.objective)
    used = np.unique(fit.support // objective.outputs)
    used = used[used < count]
    increases = np.zeros(used.size)
    for place, variable in enumerate(used):
        rest = fit.support[fit.support // objective.outputs != variable]
        increases[place] = max(0.0, refit(objective, rest, fit.theta, bounds=features.bounds).value - fit.value)
    if isinstance(objective, Tabled):
        table, constants = objective.table(fit.theta)
        return Member(used, table[:, used], constants, fit.value, increases)
    coefficients, intercept = objective.split(fit.theta)
    return Member(used, coefficients[used], intercept, fit.value, increases)


def _expanded(tree: RashomonTree, support: Indices) -> Iterator[Indices]:
    """Every support with the span of `support`, by exchange for equal columns or addition of them."""
    quadratic, forced = tree.quadratic, tree.quadratic.problem.forced
    k = quadratic.problem.size
    chosen = np.setdiff1d(support, forced)
    classes = [quadratic.represented[int(j)] for j in chosen]
    # Columns equal to a forced one change nothing, and may fill a support.
    fillers = [np.setdiff1d(quadratic.represented[int(j)], forced) for j in forced if int(j) in quadratic.represented]
    optional = np.concatenate([np.zeros(0, np.int64), *fillers])
    for required in _one_of_each(classes, k):
        room = k - len(required)
        for count in range(0 if tree.at_most else room, min(room, optional.size) + 1):
            for extra in itertools.combinations(optional.tolist(), count):
                yield np.sort(np.concatenate([forced, required, extra])).astype(np.int64)


def _one_of_each(classes: list[Indices], room: int) -> Iterator[list[int]]:
    """Every choice of at least one coordinate of each class, at most `room` in all."""
    if not classes:
        yield []
        return
    first, *rest = classes
    for count in range(1, min(first.size, room - len(rest)) + 1):
        for chosen in itertools.combinations(first.tolist(), count):
            for others in _one_of_each(rest, room - count):
                yield [*chosen, *others]
