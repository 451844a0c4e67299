"""Solvers of whole groups of columns, against brute force and a slow dense reference."""

from itertools import combinations

import numpy as np
import pytest
import torch
from solver_problems import GROUPS as PATTERNS
from solver_problems import options_of, random_problem

import iobs
from iobs.errors import DampingWarning, NotPositiveDefiniteError, PatternError, ProblemError
from iobs.solvers import solve_many
from iobs.solvers.families import GROUP_SOLVERS
from iobs.solvers.grouped.proof import lower_bounds, prove
from iobs.solvers.grouped.removal import removal_path
from iobs.solvers.grouped.system import GroupSystem, refitted

BASELINES = ["flap", "magnitude", "random", "scores", "wanda"]
EVERY_SOLVER = sorted(GROUP_SOLVERS)


def best_weight(problem, support):
    """Exact weights on a support of columns, by one dense solve."""
    weight = torch.zeros(problem.shape, dtype=torch.float64)
    index = support.nonzero().flatten()
    weight[:, index] = torch.linalg.solve(
        problem.matrix.double()[index][:, index], problem.linear.double()[:, index].T
    ).T
    return weight


def loss_of(problem, labels, kept):
    support = torch.isin(labels, torch.tensor(sorted(kept), dtype=torch.int64))
    return float(problem.loss(best_weight(problem, support)).sum())


def enumerated(problem, pattern):
    labels = pattern.labels(problem.shape[1])
    sets = combinations(range(int(labels.max()) + 1), pattern.kept(problem.shape[1]))
    return min(loss_of(problem, labels, kept) for kept in sets)


def slow_greedy(problem, pattern):
    """Greedy removal that solves every candidate set from scratch: the removed groups in order."""
    labels = pattern.labels(problem.shape[1])
    kept = set(range(int(labels.max()) + 1))
    order = []
    while len(kept) > pattern.kept(problem.shape[1]):
        order.append(min(sorted(kept), key=lambda group: loss_of(problem, labels, kept - {group})))
        kept -= {order[-1]}
    return order


def correlated_problem(rows, columns, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    mixed = mixed @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    centre = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return iobs.Quadratic.at(centre.to(dtype), (mixed.T @ mixed / len(mixed)).to(dtype))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("solver", ["search", "greedy", "exact", "osscar"])
def test_weights_on_the_kept_groups_are_exact(solver, pattern):
    problem = correlated_problem(5, 12)
    solution = iobs.solve(problem, pattern, solver)
    torch.testing.assert_close(solution.weight, best_weight(problem, solution.mask[0]))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("solver", ["search", "exact"])
def test_proved_groups_equal_enumeration(solver, seed, pattern):
    problem = correlated_problem(4, 12, seed=seed)
    solution = iobs.solve(problem, pattern, solver)
    assert solution.stats["proved"]
    assert float(solution.loss.sum()) == pytest.approx(enumerated(problem, pattern), rel=1e-9)


def costs_of(system, sets):
    """Twice the loss that removing each set of groups adds, one dense solve a set."""
    size = system.shape[1]
    found = []
    for one in sets:
        slots = [group * size + slot for group in one for slot in range(size)]
        inverse, energy = system.inverse[slots][:, slots], system.energy[slots][:, slots]
        found.append(float(torch.linalg.solve(inverse, energy).trace()))
    return found


@pytest.mark.parametrize("removed", [3, 5, 8])
@pytest.mark.parametrize("coupling", [0.1, 2.0])
def test_wide_groups_are_proved_by_bounds_of_sets(removed, coupling):
    """Eleven groups of eight columns that cost nearly the same: no bound is above a cost, and the best set is found."""
    generator = torch.Generator().manual_seed(removed)
    inputs = torch.randn(400, 88, generator=generator, dtype=torch.float64)
    inputs += coupling * torch.randn(400, 1, generator=generator, dtype=torch.float64)
    problem = iobs.Quadratic.at(
        torch.randn(20, 88, generator=generator, dtype=torch.float64), inputs.T @ inputs / len(inputs)
    )
    pattern = iobs.Groups(8, 11 - removed)
    system = GroupSystem.of(problem, pattern.labels(88))
    sets = [*combinations(range(11), removed)]
    costs = torch.tensor(costs_of(system, sets), dtype=torch.float64)
    bounds = torch.from_numpy(lower_bounds(system.inverse.numpy(), system.energy.numpy(), 8, np.array(sets)))
    assert bool((bounds <= costs * (1 + 1e-9)).all())
    assert float((bounds / costs).min()) > 0.6
    found = iobs.solve(problem, pattern, "exact")
    lost = float((problem.loss(found.weight) - problem.loss(problem.centre())).sum())
    assert found.stats["proved"]
    assert lost == pytest.approx(float(costs.min()) / 2, rel=1e-8)
    worst = torch.ones(11, dtype=torch.bool)
    worst[list(sets[int(costs.argmax())])] = False  # from here most sets are computed
    proof = prove(system, worst, 100_000)
    assert proof.proved
    assert tuple((~proof.kept).nonzero().flatten().tolist()) == sets[int(costs.argmin())]


def test_bound_of_groups_of_dead_inputs_is_zero():
    """The bound of groups that cost nothing; if it were no number, the proof would drop the set."""
    inverse, energy = np.eye(12), np.diag([0.0] * 9 + [1.0] * 3)
    bounds = lower_bounds(inverse, energy, 3, np.array([[0, 1, 2], [0, 1, 3]]))
    assert bounds == pytest.approx([0.0, 3.0])


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_greedy_removal_equals_the_slow_reference(pattern):
    problem = correlated_problem(4, 12)
    labels = pattern.labels(12)
    path = removal_path(GroupSystem.of(problem, labels), pattern.kept(12))
    assert path.order == slow_greedy(problem, pattern)
    dense = float(problem.loss(problem.centre()).sum())
    kept = set(range(int(labels.max()) + 1))
    for group, loss in zip(path.order, path.losses, strict=True):
        kept -= {group}
        assert loss == pytest.approx(loss_of(problem, labels, kept) - dense, rel=1e-8)


def test_batched_removal_records_the_true_losses():
    problem, pattern = correlated_problem(4, 12), iobs.Groups(1, 4)
    path = removal_path(GroupSystem.of(problem, pattern.labels(12)), 4, batch=5)
    left = set(range(12)) - set(path.order)
    dense = float(problem.loss(problem.centre()).sum())
    assert path.losses[-1] == pytest.approx(loss_of(problem, pattern.labels(12), left) - dense, rel=1e-8)
    one_by_one = iobs.solve(problem, pattern, "greedy")
    assert torch.equal(iobs.solve(problem, pattern, "osscar", rounds=8).mask, one_by_one.mask)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_certified_groups_have_no_better_exchange(pattern):
    problem, labels = correlated_problem(5, 12, seed=3), pattern.labels(12)
    found = iobs.solve(problem, pattern, "random", seed=1, refine="swap")
    kept = set(labels[found.mask[0]].tolist())
    others = set(range(pattern.count(12))) - kept
    least = min(loss_of(problem, labels, kept - {i} | {j}) for i in kept for j in others)
    assert float(found.loss.sum()) <= least + 1e-8 * abs(least)


def test_many_groups_are_not_called_proved():
    problem = correlated_problem(4, 20)
    assert not iobs.solve(problem, iobs.Groups(1, 10)).stats["proved"]
    assert not iobs.solve(problem, iobs.Groups(1, 10), "exact", limit=3).stats["proved"]
    assert iobs.solve(problem, iobs.Groups(1, 10), "exact").stats["proved"]


def test_identity_hessian_keeps_the_groups_of_largest_norm():
    centre = torch.randn(5, 12, dtype=torch.float64)
    problem = iobs.Quadratic.at(centre, 2 * torch.eye(12, dtype=torch.float64))
    expected = iobs.solve(problem, iobs.Groups(3, 2), "magnitude").weight
    for solver in ("search", "greedy", "exact", "osscar", "flap"):
        torch.testing.assert_close(iobs.solve(problem, iobs.Groups(3, 2), solver).weight, expected)


SINGULAR = {
    "three samples": lambda samples: samples[:3],
    "dead columns": lambda samples: samples * (torch.arange(12) % 5 != 0),
    "columns twice": lambda samples: torch.cat([samples[:, :6], samples[:, :6]], 1),
    "all of these": lambda samples: torch.cat([samples[:4, :6], samples[:4, :6]], 1) * (torch.arange(12) > 1),
    "twelve scales": lambda samples: samples[:5] * 10.0 ** torch.arange(-6.0, 6.0),
    "constant": lambda samples: samples * 1e-4 + 1,
}


@pytest.mark.filterwarnings("ignore::iobs.errors.DampingWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SINGULAR)
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_singular_hessians_are_solved(solver, kind, dtype):
    samples = SINGULAR[kind](torch.randn(40, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    hessian, centre = (samples.T @ samples / len(samples)).to(dtype), torch.linspace(-1, 1, 36, dtype=dtype).view(3, 12)
    for problem in (iobs.Quadratic.at(centre, hessian), iobs.Quadratic(hessian, centre @ hessian, centre)):
        for pattern in (iobs.Groups(1, 9), PATTERNS[2]):
            for refine in (None, "refit", "swap"):
                found = iobs.solve(problem, pattern, solver, refine=refine, **options_of(solver, pattern, 12))
                assert torch.isfinite(found.weight).all()
                assert len(pattern.labels(12)[found.mask[0]].unique()) == pattern.kept(12)
                if refine is not None or solver not in BASELINES:  # exact weights are at least as good as none
                    assert float(found.loss.sum()) <= 1e-3 * abs(float(problem.loss(centre).sum()))


def test_proof_of_an_indefinite_system_is_an_error_that_damping_answers():
    problem = correlated_problem(3, 24)
    system = GroupSystem.of(problem, iobs.Groups(8, 2).labels(24))
    system.inverse.diagonal()[8:16] -= 2 * system.inverse.diagonal().max()  # as rounding leaves it
    with pytest.raises(NotPositiveDefiniteError, match="raise the damping"):
        prove(system, torch.tensor([True, False, True]), 1000)


def test_of_duplicate_groups_one_is_removed_at_no_cost():
    samples = torch.randn(80, 6, dtype=torch.float64)
    samples = torch.cat([samples, samples[:, :3]], 1)  # group 2 repeats group 0
    problem = iobs.Quadratic.at(torch.randn(4, 9, dtype=torch.float64), samples.T @ samples / 80)
    with pytest.warns(DampingWarning):
        found = iobs.solve(problem, iobs.Groups(3, 2))
    assert found.mask[0, 3]
    dense = float(problem.loss(problem.centre()).sum())
    assert float(found.loss.sum()) == pytest.approx(dense, rel=1e-4)


def test_dead_columns_of_kept_groups_stay_in_the_mask():
    problem = random_problem(3, 8)
    hessian = problem.matrix.clone()
    dead = [0, 2, 3]
    hessian[dead] = 0
    hessian[:, dead] = 0
    found = iobs.solve(iobs.Quadratic.at(problem.centre(), hessian), iobs.Groups(2, 3))
    assert found.mask[0].tolist() == [True, True, False, False, True, True, True, True]
    assert not found.weight[:, dead].any()
    assert found.stats["dead_columns"] == 3


def test_groups_that_permute_give_the_same_weights():
    problem, order = correlated_problem(5, 12), torch.randperm(12)
    labels = iobs.Groups(3, 2).labels(12)
    shuffled = iobs.Quadratic.at(problem.centre()[:, order], problem.matrix[order][:, order])
    plain = iobs.solve(problem, iobs.Groups(3, 2))
    found = iobs.solve(shuffled, iobs.Groups(labels[order], 2))
    torch.testing.assert_close(found.weight, plain.weight[:, order])


def test_layers_of_one_hessian_are_solved_together():
    first = random_problem(3, 12)
    second = iobs.Quadratic.at(torch.randn(5, 12, dtype=torch.float64), first.hessian)
    patterns = [iobs.Groups(3, 2), iobs.Groups(1, 5)]
    for found, problem, pattern in zip(solve_many([first, second], patterns), [first, second], patterns, strict=True):
        torch.testing.assert_close(found.weight, iobs.solve(problem, pattern).weight)
    with pytest.raises(ProblemError, match="one kind"):
        solve_many([first, second], [iobs.Groups(3, 2), iobs.Unstructured(0.5)])


def test_published_scores_rank_as_their_formulas_say():
    problem = random_problem(4, 6)
    weight, curvature = problem.centre(), problem.matrix.diagonal()
    scores = {
        "magnitude": weight.square().sum(0),
        "wanda": (weight.abs() * curvature.sqrt()).sum(0),
        "flap": weight.square().sum(0) * curvature,
    }
    for solver, score in scores.items():
        found = iobs.solve(problem, iobs.Groups(2, 1), solver)
        assert found.mask[0, 2 * int(score.reshape(3, 2).sum(1).argmax())]
        torch.testing.assert_close(found.weight, weight * found.mask)


def test_random_groups_depend_on_the_seed_alone():
    problem = random_problem(2, 40)
    masks = [iobs.solve(problem, iobs.Groups(1, 20), "random", seed=seed).mask for seed in (0, 0, 1)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_bad_requests_are_refused():
    problem = random_problem(3, 8)
    with pytest.raises(ProblemError, match="choose one of exact"):
        iobs.solve(problem, iobs.Groups(2, 2), "sparsegpt")
    with pytest.raises(ProblemError, match="no refinement"):
        iobs.solve(problem, iobs.Groups(2, 2), refine="anneal")
    with pytest.raises(ProblemError, match="one finite number"):
        iobs.solve(problem, iobs.Groups(2, 2), "scores")
    with pytest.raises(ProblemError, match="4 groups and 3 scores"):
        iobs.solve(problem, iobs.Groups(2, 2), "scores", scores=torch.ones(3))
    with pytest.raises(PatternError, match="do not divide"):
        iobs.solve(problem, iobs.Groups(3, 2))
    with pytest.raises(ProblemError, match="for other patterns"):
        iobs.solve(problem, iobs.Groups(2, 2), iobs.ADMM())
    with pytest.raises(ProblemError, match="for other patterns"):
        iobs.solve(problem, iobs.Unstructured(0.5), GROUP_SOLVERS["greedy"]())
    with pytest.raises(PatternError, match="removes whole columns"):
        iobs.ADMM()(problem, iobs.Groups(2, 2))
    with pytest.raises(PatternError, match="take the pattern"):
        GROUP_SOLVERS["greedy"]()(problem, iobs.Unstructured(0.5))


def test_refit_of_a_singular_support_is_an_error():
    problem = iobs.Quadratic(torch.ones(2, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64))
    with pytest.raises(NotPositiveDefiniteError):
        refitted(problem, torch.arange(2), torch.ones(2, dtype=torch.bool))
