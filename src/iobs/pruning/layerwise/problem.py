"""The quadratic problem of one layer: built from its Gram matrices, and solved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from iobs.core import linalg
from iobs.core.column_groups import Groups
from iobs.core.grids import by_channel
from iobs.core.integers import FACTOR_BITS, factor_bits, short, sides
from iobs.core.linalg import cholesky
from iobs.core.masks import RowsOf, top_mask
from iobs.core.patterns import NM, Budget, Pattern, Rate, Unstructured
from iobs.core.quadratic import Quadratic, Solution
from iobs.errors import NotPositiveDefiniteError
from iobs.pruning.calibration.gram import SEARCH_COLUMNS, WIDE, Gram, Statistics
from iobs.pruning.layerwise.patterns import is_rounded, patterns_of_groups, rows_compete, share_of, solver_for
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import LayerSettings, NetworkSolver, Recipe
from iobs.pruning.runtime.ranks import ALONE, Ranks
from iobs.pruning.structure.units import ChosenGroups
from iobs.solvers import ADMM, REFINEMENTS, Refinement, Solver, SparseGPT, solve, solve_many
from iobs.solvers.families import GROUP_SOLVERS, family_of
from iobs.solvers.grouped.scores import KEEPING, GivenScores
from iobs.solvers.row_metric import RowMetric, coupled_weight
from iobs.solvers.successive_rounding import SuccessiveRounding

SHOWN_SAMPLES = 16  # samples that give the errors of layers pruned by magnitude, which depends on no data
# Nonzero integers of each row and column from which factors of rows can be read back from weights, and under a mask.
_READABLE, _READABLE_MASKED = 24, 64
_LEAST_DAMPING = 1e-4  # of Grams that are singular: of few samples, or of groups whose inputs repeat
_LEAST_ROWS = 16  # of each rank, if ranks divide the rows of a layer


@dataclass(frozen=True)
class Task:
    """One layer to prune.

    Args:
        layer: address of the layer.
        pattern: of the whole layer.
        current: (rows, columns) weights that damping pulls towards.
        target: (rows, columns) weights whose output is matched, on the dense inputs of the Grams if they have any;
            None: the current weights.
        settings: solver, refinement and damping.
        zeros: (rows, columns) weights whose zeros stay zero; None: any entry may be kept.
        bias: (rows,) bias that belongs to the target weights, if the layer's bias is refitted; otherwise None.
        metric: of the rows' errors; None: all rows count equally, and each for itself.
        stored: dtype of the weights in the model or its files, which limits coded integers.
    """

    layer: Layer
    pattern: Pattern
    current: Tensor
    target: Tensor | None
    settings: LayerSettings
    zeros: Tensor | None = None
    bias: Tensor | None = None
    metric: RowMetric | None = None
    stored: torch.dtype = torch.float32

    def statistics(self, statistics: Statistics) -> Statistics:
        """The statistics of the problem: of inputs without their means if the bias is refitted."""
        return statistics if self.bias is None or statistics.calibration.means is None else statistics.centred


def solve_layer(task: Task, statistics: Statistics, ranks: Ranks = ALONE) -> list[Solution]:
    """Solve one layer: one quadratic for each group of its rows.

    Grams are float64; problems of `SEARCH_COLUMNS` columns or more are solved in float32, except for `Groups`, whose
    solvers compute in float64.

    Args:
        task: the layer.
        statistics: Grams of its inputs.
        ranks: processes that each solve their share of the rows, at the same time; the layer `can_divide`.

    Returns:
        One solution per group, with several ranks of the rows of this rank; `stats["drift_damping"]` is the damping
        that `corrected` chose, or 0.
    """
    rows = task.layer.shape[0] // task.layer.groups
    statistics = task.statistics(statistics)
    if isinstance(task.pattern, Rate) and task.layer.groups > 1:
        task, statistics, rows = *_of_one_group(task, statistics), task.layer.shape[0]
    solutions = []
    for number, pattern in enumerate(patterns_of_groups(task.layer, task.pattern)):
        part = slice(number * rows, (number + 1) * rows)
        if ranks.size > 1:
            part, pattern = ranks.part(rows), RowsOf(pattern, rows, ranks)
        problem, drift_damping = _problem(task, statistics, statistics.calibration.own[number], number, part, ranks)
        if problem.shape[1] >= SEARCH_COLUMNS and not isinstance(pattern, Groups):
            problem = problem.to(torch.float32)
        order = by_channel(task.pattern, problem.shape[1], task.layer.kernel)
        refine = task.settings.refine
        if task.zeros is not None:
            refine = keeping(task.zeros[part] if order is None else task.zeros[part][:, order], refine)
        factor = _row_factor(task, problem)
        scale = _row_scale(task, problem, part, factor)
        solver = _solver_of(task)
        if isinstance(pattern, ChosenGroups):
            solver, refine = _chosen_groups_solver(pattern, solver)
        elif factor is not None and scale is not None:
            # Of the scaled rows: the scale is the diagonal of the factor but for its few bits.
            sizes, diagonal = scale[:, 0].to(factor), factor.diagonal()
            solver = SuccessiveRounding(task.stored, (factor / diagonal * sizes / sizes[:, None]).float())
        posed = problem if scale is None else problem.scaled(scale)
        solution = solve(
            posed if order is None else posed.reordered(order),
            _besides_factors(pattern, scale, problem.shape[1]),
            solver,
            refine=refine,
            damping=task.settings.damping,
            name=task.layer.name,
        )
        if order is not None:
            back = order.argsort()
            by_column = {"steps": solution.stats["steps"][back]} if "steps" in solution.stats else {}
            stats = {**solution.stats, **by_column}
            solution = Solution(solution.weight[:, back], solution.mask[:, back], posed, stats)
        solution = _unscaled(solution, problem, scale, drift_damping)
        solutions.append(_coupled(task, solution, part, ranks))
    return solutions


def _of_one_group(task: Task, statistics: Statistics) -> tuple[Task, Statistics]:
    """The task of a convolution with groups as that of a layer without, whose columns have one step for all groups.

    Its Gram is the mean of the groups' Grams at one scale, which the importance of rows has, and its target are the
    weights that are best for each group.
    """
    grams, rows = statistics.calibration.own, task.layer.shape[0] // task.layer.groups
    centres = []
    for group, gram in enumerate(grams):
        problem, _ = _problem(task, statistics, gram, group, slice(group * rows, (group + 1) * rows))
        damping = max(task.settings.damping, _LEAST_DAMPING) * float(problem.matrix.diagonal().mean())
        centres.append(problem.damped(damping).centre())
    scales = grams.diagonal(dim1=1, dim2=2).mean(1)
    scales = scales.clamp_min(_LEAST_DAMPING * float(scales.mean()) or 1.0)
    importance = scales.repeat_interleave(rows)
    if task.metric is not None:
        importance = importance * task.metric.diagonal.to(importance)
    mean = Gram((grams / scales[:, None, None]).mean(0, keepdim=True), count=statistics.calibration.count)
    layer, centre = replace(task.layer, groups=1), torch.cat(centres)
    task = replace(task, layer=layer, current=centre, target=None, metric=RowMetric(importance / importance.mean()))
    return task, Statistics(mean, None, statistics.tokens)


def can_share(layers: Sequence[Layer], settings: Sequence[LayerSettings]) -> bool:
    """True if layers with the same input can be solved with shared factorisations of their Hessian.

    Wide layers are solved one by one: the shared factorisations would all be in memory at once.
    """
    same = all(of_layer == settings[0] for of_layer in settings)
    narrow = all(layer.groups == 1 and layer.shape[1] < WIDE for layer in layers)
    return len(layers) > 1 and same and narrow and not settings[0].keep_zeros


def solves_by_rows(settings: LayerSettings) -> bool:
    """True if the solver of a layer does most of its work row by row, so that ranks can divide the rows."""
    solver = settings.solver
    if isinstance(solver, ADMM) and solver.budget == "best":  # exchanges entries between rows at the end
        return False
    by_rows = solver in ("admm", "sparsegpt") or isinstance(solver, (ADMM, SparseGPT))
    return by_rows and settings.refine is None and not settings.keep_zeros


def can_divide(layer: Layer, settings: LayerSettings, pattern: Pattern, ranks: Ranks) -> bool:
    """True if ranks can solve a layer together, each some of its rows; a layer of few columns takes no time."""
    large = layer.shape[1] >= SEARCH_COLUMNS and layer.shape[0] >= _LEAST_ROWS * ranks.size
    return solves_by_rows(settings) and isinstance(pattern, (Unstructured, NM)) and large and layer.groups == 1


def solve_together(tasks: Sequence[Task], statistics: Statistics, ranks: Ranks = ALONE) -> list[Solution]:
    """Solve layers with the same input, such as q, k and v: every factorisation of their Hessian is computed once.

    With several ranks the solutions are those of the rows of this rank; see `solve_layer`.
    """
    used = tasks[0].statistics(statistics)
    hessian = used.calibration.own[0]  # one object: problems are known to share a Hessian by its identity
    rows = [ranks.part(task.layer.shape[0]) for task in tasks]
    pairs = (_problem(task, used, hessian, 0, part, ranks) for task, part in zip(tasks, rows, strict=True))
    problems, dampings = map(list, zip(*pairs, strict=True))
    patterns = [task.pattern for task in tasks]
    if ranks.size > 1:
        patterns = [RowsOf(task.pattern, task.layer.shape[0], ranks) for task in tasks]
    one_kind = all(family_of(task.pattern) is family_of(tasks[0].pattern) for task in tasks)
    one_kind = one_kind and not any(isinstance(task.pattern, ChosenGroups) for task in tasks)
    orders = (by_channel(task.pattern, task.layer.shape[1], task.layer.kernel) for task in tasks)
    one_kind = one_kind and all(order is None for order in orders)
    one_hessian = problems[0].hessian is hessian and all(task.statistics(statistics) is used for task in tasks)
    one_kind = one_kind and not any(_carries_errors(task) for task in tasks)
    if not (one_kind and one_hessian):
        return [solution for task in tasks for solution in solve_layer(task, statistics, ranks)]
    if problems[0].shape[1] >= SEARCH_COLUMNS and not isinstance(tasks[0].pattern, Groups):
        hessian = problems[0].matrix.to(torch.float32)  # the solver recognises the shared Hessian by its identity
        for place in range(len(problems)):  # one by one: float64 problems take twice the memory
            problems[place] = _in_float32(problems[place], hessian)
    settings = tasks[0].settings
    scales = [_row_scale(*arguments) for arguments in zip(tasks, problems, rows, strict=True)]
    solutions = solve_many(
        [problem if scale is None else problem.scaled(scale) for problem, scale in zip(problems, scales, strict=True)],
        [_besides_factors(*posed, problems[0].shape[1]) for posed in zip(patterns, scales, strict=True)],
        _solver_of(tasks[0]),
        refine=settings.refine,
        damping=settings.damping,
        name=", ".join(task.layer.name for task in tasks),
    )
    results = zip(solutions, problems, scales, dampings, strict=True)
    unscaled = [_unscaled(*result) for result in results]
    return [_coupled(*row, ranks) for row in zip(tasks, unscaled, rows, strict=True)]


def _carries_errors(task: Task) -> bool:
    """True if the errors of the rows of a layer are carried from row to row."""
    return isinstance(task.pattern, Rate) and task.metric is not None and task.metric.moment is not None


def _row_factor(task: Task, problem: Quadratic) -> Tensor | None:
    """The Cholesky factor of the metric of the rows, (rows, rows) float64, if errors are carried from row to row."""
    if task.metric is None or not _carries_errors(task):
        return None
    return task.metric.factor(problem.device)


def _row_scale(task: Task, problem: Quadratic, part: slice, factor: Tensor | None = None) -> Tensor | None:
    """Square roots of the weights of some rows, (rows, 1); None if all rows count equally.

    Weights of rows change nothing where every row has a count of its own, and nothing in the result of magnitude.

    Args:
        task: the layer.
        problem: of the rows.
        part: these rows.
        factor: of the metric of all rows, if errors are carried from row to row: its diagonal is what later rows leave.
    """
    competing = rows_compete(task.pattern) and not isinstance(task.pattern, Groups)
    if task.metric is None or not competing or task.settings.reads_weights_only:
        return None
    if isinstance(task.pattern, Rate):
        kept = 1 - share_of(task.pattern, task.layer)
        nonzero = min(kept, task.pattern.bits / 3)  # about; at low rates most of the kept integers are zero
        if nonzero * min(task.layer.shape) < (_READABLE if kept == 1 else _READABLE_MASKED):
            return None
    roots = task.metric.diagonal[part].sqrt() if factor is None else factor.diagonal()
    scale = roots[:, None].to(task.current.device, problem.dtype)
    # Of coded integers each row has a factor, which is a number of few bits.
    return 1 / short(1 / scale, factor_bits(task.stored)) if isinstance(task.pattern, Rate) else scale


def _besides_factors(pattern: Pattern, scale: Tensor | None, columns: int) -> Pattern:
    """The pattern of rows with a scale (rows, 1): of a rate, what their factors leave."""
    if scale is None or not isinstance(pattern, Rate):
        return pattern
    bits = pattern.bits - 8 * len(sides(1 / scale[:, 0])) / (len(scale) * columns)
    return replace(pattern, bits=max(bits, pattern.bits / 2))


def _unscaled(solution: Solution, problem: Quadratic, scale: Tensor | None, drift_damping: float) -> Solution:
    """The solution of a problem, from that of the problem with scaled rows, with the damping of the drift noted."""
    solution.stats["drift_damping"] = drift_damping
    if scale is None:
        return solution
    stats = solution.stats
    if "scales" in stats:  # of weights on a grid
        stats = {**stats, "scales": stats["scales"] / scale}
    if "factors" in stats:  # of coded integers: the scale is the rounded reciprocal of a number of few bits
        stats = {**stats, "factors": short(1 / scale[:, 0].double(), FACTOR_BITS)}
    return Solution(solution.weight / scale, solution.mask, problem, stats)


def weighs_rows(recipe: Recipe, pattern: Pattern) -> bool:
    """True if a metric of the rows' errors may decide anything: they compete for entries, or are solved together."""
    return recipe.may_weigh_rows and (rows_compete(pattern) or couples_rows(recipe, pattern))


def couples(layer: Layer, settings: LayerSettings | Recipe, pattern: Pattern) -> bool:
    """True if the rows of a layer are solved together, where their errors are weighed.

    Of layers with more rows than columns the metric has more numbers than the weights, and in the perceptrons of
    SmolLM2-135M it gains least.
    """
    can_be = layer.groups == 1 and layer.shape[0] <= layer.shape[1] and layer.is_called
    return can_be and couples_rows(settings, pattern)


def couples_rows(settings: LayerSettings | Recipe, pattern: Pattern) -> bool:
    """True if the rows of a layer may be solved together, if the layer can be: coded integers, and zeros of ADMM.

    Those of other solvers are left as published, and values on a grid are rounded row by row.
    """
    if isinstance(pattern, (Rate, Budget)):
        return True
    zeros = isinstance(pattern, (Unstructured, NM)) and not is_rounded([pattern])
    return zeros and (settings.solver == "admm" or isinstance(settings.solver, ADMM))


def _coupled(task: Task, solution: Solution, part: slice, ranks: Ranks) -> Solution:
    """The solution with weights that are best for all rows together, if their metric couples them."""
    metric = task.metric
    if (
        metric is None
        or metric.moment is None
        or _carries_errors(task)
        or not couples_rows(task.settings, task.pattern)
    ):
        return solution
    problem, rows = solution.problem, (solution.problem.linear, solution.weight, solution.mask)
    if ranks.size > 1:  # every rank solves all rows, so that one process and several have the same bits
        linear, weight, mask = (ranks.gather(each.to(problem.dtype), task.layer.shape[0]) for each in rows)
        rows = linear, weight, mask > 0
    weight = coupled_weight(problem.matrix, *rows, metric, solution.stats["damping"])
    return Solution(weight[part], solution.mask, problem, solution.stats)


def _solver_of(task: Task) -> str | Solver | None:
    """The solver of a task."""
    if isinstance(task.pattern, Groups):
        return solver_of_groups(task.settings.solver)
    assert not isinstance(task.settings.solver, NetworkSolver)
    return solver_for(task.settings.solver, task.pattern, task.stored)


def solver_of_groups(solver: str | Solver | NetworkSolver) -> str | Solver | None:
    """The solver for groups of columns; None, the best solver of the kind, for "admm", which has no form for groups."""
    assert not isinstance(solver, NetworkSolver)
    return None if solver == "admm" else solver


def _chosen_groups_solver(pattern: ChosenGroups, solver: str | Solver | None) -> tuple[GivenScores, str | None]:
    """The solver and the refinement for groups that are chosen already: weights change unless a baseline is asked."""
    scores = torch.zeros(int(torch.tensor(pattern.index).max()) + 1)
    scores[list(pattern.chosen)] = 1
    keeps_weights = isinstance(solver, KEEPING) or (isinstance(solver, str) and GROUP_SOLVERS[solver] in KEEPING)
    return GivenScores(scores), None if keeps_weights else "refit"


def _in_float32(problem: Quadratic, hessian: Tensor) -> Quadratic:
    """The problem in float32, with a Hessian that is float32 already."""
    anchor = None if problem.anchor is None else problem.anchor.to(torch.float32)
    return Quadratic(hessian, None if problem.centred else problem.linear.to(torch.float32), anchor, problem.centred)


def _problem(
    task: Task, statistics: Statistics, hessian: Tensor, group: int, part: slice, ranks: Ranks = ALONE
) -> tuple[Quadratic, float]:
    """The problem min 1/2 ||V X - T D||^2 / count for the rows of one group, and the damping of the drift.

    Args:
        task: the layer to prune.
        statistics: Grams of its inputs.
        hessian: the Gram of the group, (columns, columns).
        group: number of the group.
        part: rows of the group, or those of this rank.
        ranks: processes that divide the rows.
    """
    if ranks.size > 1:
        statistics = _of_rows(statistics, part)
    gram = statistics.calibration
    current = task.current[part].to(hessian.dtype)
    # The scales of a grid depend on the inputs even if magnitude chooses the mask.
    reads_no_data = task.settings.reads_weights_only and not is_rounded([task.pattern])
    if reads_no_data or not bool(hessian.diagonal().any()):
        # Magnitude is asked for, or all inputs are zero, so every mask has the same error: keep the largest weights.
        return Quadratic.at(current, torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)), 0.0
    if gram.cross is None and task.target is None:
        return Quadratic.at(current, hessian), 0.0
    target = current if task.target is None else task.target[part].to(hessian.dtype)
    correction = corrected(statistics, group, target, current, task.settings.damping, ranks)
    return Quadratic(hessian, correction.linear, current), correction.damping


def _of_rows(statistics: Statistics, part: slice) -> Statistics:
    """The statistics of some rows of a layer without groups: only target outputs have rows."""
    heldout = None if statistics.heldout is None else statistics.heldout.rows(part)
    return replace(statistics, calibration=statistics.calibration.rows(part), heldout=heldout)


def refitted_bias(task: Task, weight: Tensor, gram: Gram) -> Tensor | None:
    """The bias with which the mean output of the layer equals the mean of its target.

    Args:
        task: the layer; its bias b belongs to its target weights T.
        weight: (rows, columns) new weights V.
        gram: of the inputs, with their means.

    Returns:
        b + T mean(D) - V mean(X), or b + mean(Y) - V mean(X), (rows,); None if the bias is not refitted.
    """
    if task.bias is None or gram.means is None:
        return None
    target = task.current if task.target is None else task.target

    def mean_output(matrix: Tensor, means: Tensor) -> Tensor:
        parts = matrix.to(means.dtype).reshape(len(means), -1, matrix.shape[1])
        return (parts @ means[:, :, None]).flatten()

    of_target = mean_output(target, gram.means.target) if gram.outputs is None else gram.means.target.flatten()
    return task.bias.double() + of_target - mean_output(weight, gram.means.own)


@dataclass(frozen=True)
class WithinSupport:
    """A refinement that moves the mask into the support of a weight, then refits every row.

    Args:
        weight: (rows, columns) weights with the existing zeros.
        first: a refinement to run before, or None.
    """

    weight: Tensor
    first: Refinement | None = None

    def __call__(self, problem: Quadratic, pattern: Pattern, solution: Solution) -> Solution:
        """The solution itself if its mask lies in the support, otherwise the best refit on a mask that does."""
        if self.first is not None:
            solution = self.first(problem, pattern, solution)
        support = self.weight != 0
        if not bool((solution.mask & ~support).any()):
            return solution
        # Entries that the solver kept come first, by magnitude; then other entries of the support, by old magnitude.
        old, new = self.weight.double().abs(), solution.weight.double().abs()
        scores = torch.where(solution.mask, 1 + new, old / (1 + old)).masked_fill(~support, -1.0)
        mask = top_mask(scores, pattern) & support
        weight = linalg.solve_on_support(problem.matrix, problem.linear, mask)
        return Solution.of(problem, weight.to(problem.dtype), mask, **solution.stats)


def keeping(weight: Tensor, refine: str | Refinement | None) -> WithinSupport:
    """The refinement that keeps the zeros of a weight, after another refinement or None."""
    return WithinSupport(weight, REFINEMENTS[refine]() if isinstance(refine, str) else refine)


# ---- correction of drift: a layer compensates the errors of its inputs, as far as held-out samples confirm it
# Pruned layers before a layer change its inputs (drift). To match the output of another model on inputs without
# drift, the layer is fitted by regression, which from few samples also fits noise. The correction is therefore a
# separate ridge regression, centred at the output of the layer's current weights. Its damping is raised while the
# held-out error falls.
DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_LEAST_SHARE = 0.05  # held-out samples per calibration sample, below which their error is too noisy
_SEARCH_ROWS = 128  # rows whose errors choose the damping of all
_SAFE_DAMPING = 1e-3  # from which regressions of wide layers are computed in float32


@dataclass(frozen=True)
class Correction:
    """The linear term of a layer's problem, and the damping of its drift.

    Args:
        linear: (rows, columns).
        damping: relative to the mean of the Gram's diagonal; 0 for no damping besides that of the solver.
    """

    linear: Tensor
    damping: float = 0.0


def corrected(
    statistics: Statistics, group: int, target: Tensor, current: Tensor, damping: float, ranks: Ranks = ALONE
) -> Correction:
    """The linear term B H of min ||V X - T D||^2 over V, with B from the ridge regression that held-out samples select.

    Target outputs Y in the statistics take the place of T D. A mu below the rounding of H is left out.

    B = S + C with C = (T D X^T - S H) (H + mu I)^-1 and H = X X^T, so that B H = T D X^T - mu C. If the smallest mu is
    best, the damping is left to the solver, and the linear term is T D X^T.

    Args:
        statistics: Grams of the layer's inputs; without enough held-out samples nothing is damped.
        group: number of the group.
        target: (rows of the group, columns) weight T of the layer whose output on the inputs D is matched.
        current: (rows of the group, columns) current weight S of the layer.
        damping: of the solver, relative to the mean of the diagonal.
        ranks: processes that each have some rows of the layer, and select one damping together.
    """
    gram, heldout = statistics.calibration, statistics.heldout
    hessian = gram.own[group]
    plain = gram.linear(target, group)
    if gram.cross is None or heldout is None or heldout.cross is None or heldout.count < _LEAST_SHARE * gram.count:
        return Correction(plain)
    # Damping bounds the condition, so that float32 chooses as well as float64 in half of the time.
    single = len(hessian) >= SEARCH_COLUMNS and damping >= _SAFE_DAMPING
    dtype = torch.float32 if single else hessian.dtype
    base, drift, start = hessian.to(dtype), (plain - current @ hessian).to(dtype), current.to(dtype)
    mean = float(base.diagonal().mean())
    some = slice(None, None, max(1, len(target) * ranks.size // _SEARCH_ROWS))
    metric, goal = heldout.own[group].to(dtype), heldout.rows(some).linear(target[some], group).to(dtype)

    def factor(mu: float) -> Tensor | None:
        """The Cholesky factor of H + mu I; None if rounding makes the Gram indefinite even with this damping."""
        shifted = base.clone()
        shifted.diagonal().add_(mu * mean)
        try:
            return cholesky(shifted)
        except NotPositiveDefiniteError:
            return None

    def error(lower: Tensor | None) -> float:
        """||B X - T D||^2 / count of some rows on the held-out samples, without the constant ||T D||^2 / count."""
        if lower is None:
            return ranks.total(math.inf)
        weight = start[some] + torch.cholesky_solve(drift[some].T, lower).T
        return ranks.total(float((weight @ metric).sub_(goal, alpha=2).mul_(weight).sum(dtype=torch.float64)))

    chosen: Tensor | None = None
    strength = 0.0
    least = error(factor(max(damping, _LEAST_DAMPING)))
    for stronger in DAMPINGS:
        if stronger <= damping:
            continue
        lower = factor(stronger)
        heldout_error = error(lower)
        if least <= heldout_error < math.inf:
            break
        if heldout_error < least:
            chosen, strength, least = lower, stronger, heldout_error
    if chosen is None:
        return Correction(plain)
    change = torch.cholesky_solve(drift.T, chosen).T
    return Correction(plain.sub(change.to(plain.dtype), alpha=strength * mean), strength)
