"""What every solver, with every refinement, on every pattern must do."""

import pytest
import torch
from solver_problems import PATTERNS, random_problem

import iobs
from iobs.core.patterns import top_mask
from iobs.core.quadratic import DenseHessian
from iobs.errors import (
    DampingWarning,
    NonFiniteError,
    NotPositiveDefiniteError,
    PatternError,
    ProblemError,
)
from iobs.solvers import REFINEMENTS, SOLVERS, solve_many

EVERY_SOLVER = sorted(SOLVERS)
EVERY_REFINEMENT = [None, *sorted(REFINEMENTS)]
SMALL = {"exact": (3, 8)}  # the exact solver proves optima, which takes longer the larger the problem


def problem_for(solver, **options):
    rows, columns = SMALL.get(solver, (6, 16))
    return random_problem(rows, columns, **options)


def pattern_for(solver, pattern):
    return iobs.Unstructured(keep=10) if solver == "exact" and pattern == iobs.Unstructured(keep=37) else pattern


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("refine", EVERY_REFINEMENT)
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_counts_are_exact_and_zeros_are_zero(solver, refine, pattern):
    problem, pattern = problem_for(solver), pattern_for(solver, pattern)
    before = [tensor.clone() for tensor in (problem.hessian, problem.linear, problem.anchor)]
    solution = iobs.solve(problem, pattern, solver, refine=refine)
    groups = pattern.groups(problem.shape)
    assert (solution.mask.reshape(groups.count, groups.size).sum(1) == groups.keep).all()
    assert (solution.weight[~solution.mask] == 0).all()
    assert torch.allclose(solution.loss, problem.loss(solution.weight))
    for tensor, copy in zip((problem.hessian, problem.linear, problem.anchor), before, strict=True):
        assert torch.equal(tensor, copy)
    again = iobs.solve(problem, pattern, solver, refine=refine)
    assert torch.equal(again.weight, solution.weight)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_refit_is_no_worse_and_swap_no_worse_than_refit(solver, pattern):
    problem, pattern = problem_for(solver), pattern_for(solver, pattern)
    plain, refit, swap = (
        float(iobs.solve(problem, pattern, solver, refine=refine).loss.sum()) for refine in (None, "refit", "swap")
    )
    slack = 1e-9 * abs(float(problem.loss(problem.centre()).sum()))
    assert refit <= plain + slack
    assert swap <= refit + slack


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(
    ("solver", "budget"),
    [(name, "default") for name in EVERY_SOLVER if name != "exact"] + [("admm", "fast"), ("admm", "best")],
)
def test_nothing_beats_the_exact_solver(solver, pattern, budget):
    problem, pattern = problem_for("exact"), pattern_for("exact", pattern)
    exact = float(iobs.solve(problem, pattern, "exact").loss.sum())
    other = float(iobs.solve(problem, pattern, solver, refine="swap", budget=budget).loss.sum())
    assert exact <= other + 1e-9 * abs(exact)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_with_an_identity_hessian_every_solver_is_magnitude(solver, pattern):
    if solver == "sparsegpt" and pattern.groups((6, 16)).size >= 16:
        pattern = iobs.Unstructured(0.5)  # its blocks share out the count: one block here, so the same answer
    problem, pattern = problem_for(solver), pattern_for(solver, pattern)
    centre = problem.centre()
    problem = iobs.Quadratic.at(centre, 3 * torch.eye(problem.shape[1], dtype=centre.dtype))
    expected = centre * top_mask(centre.abs(), pattern)
    torch.testing.assert_close(iobs.solve(problem, pattern, solver).weight, expected)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_rows_may_come_in_any_order(solver, pattern):
    problem, pattern = problem_for(solver), pattern_for(solver, pattern)
    order = torch.randperm(problem.shape[0])
    straight = iobs.solve(problem, pattern, solver)
    shuffled = iobs.solve(problem.rows(order), pattern, solver)
    assert torch.equal(shuffled.mask, straight.mask[order])
    torch.testing.assert_close(shuffled.weight, straight.weight[order])


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_float32_problems_give_float32_answers(solver):
    problem = problem_for(solver, dtype=torch.float32)
    single = iobs.solve(problem, iobs.NM(2, 4), solver)
    double = iobs.solve(problem.to(torch.float64), iobs.NM(2, 4), solver)
    assert single.weight.dtype == torch.float32
    # Condition 50: the losses agree to a few thousand units of float32 rounding unless a mask differs.
    torch.testing.assert_close(single.loss.sum(), double.loss.sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_dead_columns_are_zero_and_their_budget_goes_to_live_ones(solver):
    problem = problem_for(solver)
    columns = problem.shape[1]
    dead = torch.zeros(columns, dtype=torch.bool)
    dead[[1, 5, 6]] = True
    hessian = problem.matrix.clone()
    hessian[dead] = 0
    hessian[:, dead] = 0
    problem = iobs.Quadratic.at(problem.centre(), hessian)
    for pattern in (iobs.Unstructured(0.5), iobs.Unstructured(0.5, per="row"), iobs.NM(2, 4)):
        solution = iobs.solve(problem, pattern, solver, damping=0.01)
        assert solution.stats["dead_columns"] == 3
        assert not solution.mask[:, dead].any()
        groups = pattern.groups(problem.shape)
        live = (~dead).expand(problem.shape).reshape(groups.count, groups.size).sum(1)
        kept = solution.mask.reshape(groups.count, groups.size).sum(1)
        assert torch.equal(kept, live.clamp_max(groups.keep))


def test_a_linear_term_on_a_dead_column_has_no_minimiser_beyond_rounding():
    hessian, linear = torch.diag(torch.tensor([1.0, 0, 2])), torch.tensor([[1.0, 5, 1]])
    with pytest.raises(NotPositiveDefiniteError, match="falls for ever along column 1"):
        iobs.solve(iobs.Quadratic(hessian, linear), iobs.Unstructured(keep=3), damping=0.01)
    linear[0, 1] = 1e-12
    found = iobs.solve(iobs.Quadratic(hessian, linear), iobs.Unstructured(keep=3))
    torch.testing.assert_close(found.weight, torch.tensor([[1, 0, 0.5]]))


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_a_singular_gram_is_damped_with_a_warning(solver):
    rows, columns = SMALL.get(solver, (6, 16))
    samples = torch.randn(columns // 2, columns, dtype=torch.float64)
    problem = iobs.Quadratic.at(torch.randn(rows, columns, dtype=torch.float64), samples.T @ samples)
    pattern = iobs.Unstructured(0.7)
    if solver in ("magnitude", "wanda"):  # need no factor
        assert iobs.solve(problem, pattern, solver).stats["damping"] == 0
    else:
        with pytest.warns(DampingWarning, match="layer 3"):
            solution = iobs.solve(problem, pattern, solver, name="layer 3")
        assert 0 < solution.stats["damping"] < 1e-3
    solution = iobs.solve(problem, pattern, solver, damping=0.01)
    assert torch.isfinite(solution.weight).all()
    assert solution.stats["damping"] == 0.01


def test_damping_is_raised_tenfold_until_there_is_a_factor():
    hessian = torch.diag(torch.tensor([1.0, 1, 1, -2e-4], dtype=torch.float64))  # definite from 1e-3 on
    with pytest.warns(DampingWarning) as told:
        found = iobs.solve(iobs.Quadratic(hessian, torch.ones(2, 4).double()), iobs.Unstructured(0.5), "obc")
    assert [str(one.message).split("trying ")[1] for one in told] == ["1e-06.", "1e-05.", "0.0001.", "0.001."]
    assert found.stats["damping"] == pytest.approx(1e-3)


def test_an_indefinite_hessian_is_an_error_that_names_the_problem():
    hessian = torch.diag(torch.tensor([1.0, 1.0, -100.0, 1.0]))
    with pytest.warns(DampingWarning), pytest.raises(NotPositiveDefiniteError, match="layer 3"):
        iobs.solve(iobs.Quadratic(hessian, torch.ones(2, 4)), iobs.Unstructured(0.5), "obc", name="layer 3")


def test_malformed_problems_are_refused():
    problem = random_problem()
    with pytest.raises(NonFiniteError):
        iobs.Quadratic.at(torch.full((2, 3), torch.nan), torch.eye(3))
    with pytest.raises(NonFiniteError):
        iobs.Quadratic.at(torch.ones(2, 3), torch.full((3, 3), torch.inf))
    with pytest.raises(ProblemError, match="Hessian"):
        iobs.Quadratic(torch.eye(3), torch.ones(2, 4))
    with pytest.raises(ProblemError, match="zero"):
        iobs.solve(iobs.Quadratic.at(torch.ones(2, 4), torch.zeros(4, 4)), iobs.Unstructured(0.5))
    with pytest.raises(ProblemError, match="no solver"):
        iobs.solve(problem, iobs.Unstructured(0.5), "gurobi")
    with pytest.raises(ProblemError, match="no refinement"):
        iobs.solve(problem, iobs.Unstructured(0.5), refine="anneal")
    with pytest.raises(ProblemError, match="options"):
        iobs.solve(problem, iobs.Unstructured(0.5), "sparsegpt", blok=3)
    with pytest.raises(ProblemError, match="budget"):
        iobs.solve(problem, iobs.Unstructured(0.5), budget="huge")
    with pytest.raises(ProblemError, match="damping"):
        iobs.solve(problem, iobs.Unstructured(0.5), damping=-1.0)
    for pattern in ("2:4", 0.5):
        with pytest.raises(PatternError, match="is no pattern"):
            iobs.solve(iobs.Quadratic.at(torch.ones(2, 4), torch.eye(4)), pattern)
    with pytest.raises(PatternError, match="divisible"):
        iobs.solve(random_problem(2, 7), iobs.NM(2, 4))


@pytest.mark.parametrize("solver", EVERY_SOLVER)
@pytest.mark.parametrize("keep", [0, 1, 24])
def test_nothing_one_or_everything_kept(solver, keep):
    problem = random_problem(3, 8)
    solution = iobs.solve(problem, iobs.Unstructured(keep=keep), solver, refine="swap")
    assert int(solution.mask.sum()) == keep
    if keep == 24:
        torch.testing.assert_close(solution.weight, problem.centre())


@pytest.mark.parametrize("solver", ["sparsegpt", "obc", "admm"])
def test_one_and_two_threads_give_the_same_bits(solver):
    problem = random_problem(64, 48, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        weights = []
        for count in (1, 2):
            torch.set_num_threads(count)
            weights.append(iobs.solve(problem, iobs.Unstructured(0.6), solver, refine="swap").mask)
    finally:
        torch.set_num_threads(threads)
    # The kernels give the same bits; a matrix product of another library need only agree but for near-ties.
    assert (weights[0] == weights[1]).double().mean() >= 0.9999


@pytest.mark.parametrize("pattern", [iobs.Unstructured(0.5), iobs.NM(2, 4)], ids=str)
@pytest.mark.parametrize("solver", sorted(set(SOLVERS) - {"exact"}))
def test_the_units_of_the_inputs_do_not_matter(solver, pattern):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 64, generator=generator, dtype=torch.float64)
    centre = torch.randn(130, 64, generator=generator, dtype=torch.float64)  # too large to be polished by swaps
    units = 2.0 ** torch.tensor([0, 40, -40], dtype=torch.float64)
    plain, *others = (iobs.solve(iobs.Quadratic.at(centre, inputs.T @ inputs * u**2), pattern, solver) for u in units)
    for found, unit in zip(others, units[1:], strict=True):
        assert found.mask.sum() == plain.mask.sum()
        # The search of "admm" is in float32, where another rounding may end in another support as good.
        assert found.loss.sum() / unit**2 == pytest.approx(float(plain.loss.sum()), rel=1e-3)


@pytest.mark.parametrize("unit", [2.0**80, 2.0**-80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_the_units_of_the_weights_do_not_matter(solver, dtype, unit):
    shapes = [SMALL[solver]] if solver in SMALL else [(6, 16), (130, 64)]  # the second is not polished by swaps
    for shape in shapes:
        problem = random_problem(*shape, dtype=dtype)
        for centred in (True, False):
            plain, scaled = (
                iobs.Quadratic.at(problem.anchor * u, problem.hessian)
                if centred
                else iobs.Quadratic(problem.hessian, problem.linear * u)
                for u in (1.0, unit)
            )
            patterns = [iobs.NM(2, 4)] * 2
            found, ordinary = solve_many([scaled, plain], patterns, solver, refine="swap", damping=0.01)
            assert torch.equal(found.mask, ordinary.mask)
            assert torch.equal(found.weight, ordinary.weight * unit)


def test_inputs_of_very_different_units():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 64, generator=generator, dtype=torch.float64)
    centre = torch.randn(130, 64, generator=generator, dtype=torch.float64)
    units = torch.ones(64, dtype=torch.float64)
    units[:4] = 2.0**40
    scaled = inputs * units
    found = iobs.solve(iobs.Quadratic.at(centre / units, scaled.T @ scaled), iobs.NM(2, 4))
    plain = iobs.solve(iobs.Quadratic.at(centre, inputs.T @ inputs), iobs.NM(2, 4))
    assert found.loss.sum() == pytest.approx(float(plain.loss.sum()), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_half_precision_is_computed_in_single(solver, dtype):
    problem = problem_for(solver).to(torch.float32)
    half = iobs.Quadratic((problem.matrix / 16).to(dtype), (problem.linear / 16).to(dtype))
    found = iobs.solve(half, iobs.NM(2, 4), solver)
    wide = iobs.solve(half.to(torch.float32), iobs.NM(2, 4), solver)
    assert found.weight.dtype == dtype
    assert torch.equal(found.weight, wide.weight.to(dtype))


def test_an_operator_in_single_precision_has_a_loss():
    problem = random_problem(6, 16).to(torch.float32)
    operator = iobs.Quadratic(DenseHessian(problem.matrix), problem.linear)
    found = iobs.solve(operator, iobs.NM(2, 4))
    torch.testing.assert_close(found.loss, problem.loss(found.weight), rtol=1e-5, atol=1e-5)


def test_no_rows_are_an_error():
    with pytest.raises(ProblemError, match="no rows"):
        iobs.solve(iobs.Quadratic(torch.eye(4), torch.zeros(0, 4)), iobs.NM(2, 4))


def test_exact_solves_for_no_count_that_cannot_be():
    problem = random_problem(2, 30)
    assert iobs.solve(problem, iobs.Unstructured(keep=57), "exact", limit=5000).mask.sum() == 57
