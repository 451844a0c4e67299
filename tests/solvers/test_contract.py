"""Contract of all solvers: product of solvers, refinements and patterns."""

import pytest
import torch
from solver_problems import PATTERNS, random_problem

import iobs
from iobs.core.patterns import top_mask
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
SMALL = {"exact": (3, 8)}  # the time of the exact solver grows exponentially with the size


def problem_for(solver, **options):
    rows, columns = SMALL.get(solver, (6, 16))
    return random_problem(rows, columns, **options)


def pattern_for(solver, pattern):
    return iobs.Unstructured(keep=10) if solver == "exact" and pattern == iobs.Unstructured(keep=37) else pattern


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("refine", EVERY_REFINEMENT)
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_solve_gives_exact_counts_and_zeros(solver, refine, pattern):
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
def test_refit_and_swap_never_raise_the_loss(solver, pattern):
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
def test_exact_is_never_beaten(solver, pattern, budget):
    problem, pattern = problem_for("exact"), pattern_for("exact", pattern)
    exact = float(iobs.solve(problem, pattern, "exact").loss.sum())
    other = float(iobs.solve(problem, pattern, solver, refine="swap", budget=budget).loss.sum())
    assert exact <= other + 1e-9 * abs(exact)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_solver_equals_magnitude_if_hessian_is_identity(solver, pattern):
    if solver == "sparsegpt" and pattern.groups((6, 16)).size >= 16:
        pattern = iobs.Unstructured(0.5)  # SparseGPT gives each block its own count; here there is one block
    problem, pattern = problem_for(solver), pattern_for(solver, pattern)
    centre = problem.centre()
    problem = iobs.Quadratic.at(centre, 3 * torch.eye(problem.shape[1], dtype=centre.dtype))
    expected = centre * top_mask(centre.abs(), pattern)
    torch.testing.assert_close(iobs.solve(problem, pattern, solver).weight, expected)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_solver_permutes_with_the_rows(solver, pattern):
    problem, pattern = problem_for(solver), pattern_for(solver, pattern)
    order = torch.randperm(problem.shape[0])
    straight = iobs.solve(problem, pattern, solver)
    shuffled = iobs.solve(problem.rows(order), pattern, solver)
    assert torch.equal(shuffled.mask, straight.mask[order])
    torch.testing.assert_close(shuffled.weight, straight.weight[order])


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_solver_keeps_float32(solver):
    problem = problem_for(solver, dtype=torch.float32)
    single = iobs.solve(problem, iobs.NM(2, 4), solver)
    double = iobs.solve(problem.to(torch.float64), iobs.NM(2, 4), solver)
    assert single.weight.dtype == torch.float32
    # Condition 50: the losses agree to a few thousand units of float32 rounding unless a mask differs.
    torch.testing.assert_close(single.loss.sum(), double.loss.sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_solve_gives_the_count_of_dead_columns_to_live_ones(solver):
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


def test_solve_raises_if_q_falls_along_a_dead_column():
    hessian, linear = torch.diag(torch.tensor([1.0, 0, 2])), torch.tensor([[1.0, 5, 1]])
    with pytest.raises(NotPositiveDefiniteError, match="falls for ever along column 1"):
        iobs.solve(iobs.Quadratic(hessian, linear), iobs.Unstructured(keep=3), damping=0.01)
    linear[0, 1] = 1e-12
    found = iobs.solve(iobs.Quadratic(hessian, linear), iobs.Unstructured(keep=3))
    torch.testing.assert_close(found.weight, torch.tensor([[1, 0, 0.5]]))


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_solve_damps_with_a_warning_if_gram_is_singular(solver):
    rows, columns = SMALL.get(solver, (6, 16))
    samples = torch.randn(columns // 2, columns, dtype=torch.float64)
    problem = iobs.Quadratic.at(torch.randn(rows, columns, dtype=torch.float64), samples.T @ samples)
    pattern = iobs.Unstructured(0.7)
    if solver in ("magnitude", "wanda"):  # neither needs a factorisation
        assert iobs.solve(problem, pattern, solver).stats["damping"] == 0
    else:
        with pytest.warns(DampingWarning, match="layer 3"):
            solution = iobs.solve(problem, pattern, solver, name="layer 3")
        assert 0 < solution.stats["damping"] < 1e-3
    solution = iobs.solve(problem, pattern, solver, damping=0.01)
    assert torch.isfinite(solution.weight).all()
    assert solution.stats["damping"] == 0.01


def test_solve_raises_damping_tenfold_until_cholesky_succeeds():
    hessian = torch.diag(
        torch.tensor([1.0, 1, 1, -2e-4], dtype=torch.float64)
    )  # positive definite with damping of at least 1e-3
    with pytest.warns(DampingWarning) as caught:
        found = iobs.solve(iobs.Quadratic(hessian, torch.ones(2, 4).double()), iobs.Unstructured(0.5), "obc")
    assert [str(warning.message).split("trying ")[1] for warning in caught] == ["1e-06.", "1e-05.", "0.0001.", "0.001."]
    assert found.stats["damping"] == pytest.approx(1e-3)


def test_solve_error_names_the_problem_if_hessian_is_indefinite():
    hessian = torch.diag(torch.tensor([1.0, 1.0, -100.0, 1.0]))
    with pytest.warns(DampingWarning), pytest.raises(NotPositiveDefiniteError, match="layer 3"):
        iobs.solve(iobs.Quadratic(hessian, torch.ones(2, 4)), iobs.Unstructured(0.5), "obc", name="layer 3")


def test_solve_raises_if_arguments_are_malformed():
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
def test_solve_keeps_zero_one_or_all_entries(solver, keep):
    problem = random_problem(3, 8)
    solution = iobs.solve(problem, iobs.Unstructured(keep=keep), solver, refine="swap")
    assert int(solution.mask.sum()) == keep
    if keep == 24:
        torch.testing.assert_close(solution.weight, problem.centre())


@pytest.mark.parametrize("solver", ["sparsegpt", "obc", "admm"])
def test_solver_gives_equal_masks_on_1_and_2_threads(solver):
    problem = random_problem(64, 48, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        weights = []
        for count in (1, 2):
            torch.set_num_threads(count)
            weights.append(iobs.solve(problem, iobs.Unstructured(0.6), solver, refine="swap").mask)
    finally:
        torch.set_num_threads(threads)
    # The kernels give equal bits. Matrix products of torch may differ by rounding, which decides near-ties.
    assert (weights[0] == weights[1]).double().mean() >= 0.9999


@pytest.mark.parametrize("pattern", [iobs.Unstructured(0.5), iobs.NM(2, 4)], ids=str)
@pytest.mark.parametrize("solver", sorted(set(SOLVERS) - {"exact"}))
def test_solver_does_not_depend_on_units_of_inputs(solver, pattern):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 64, generator=generator, dtype=torch.float64)
    centre = torch.randn(130, 64, generator=generator, dtype=torch.float64)  # too large for exact swaps
    units = 2.0 ** torch.tensor([0, 40, -40], dtype=torch.float64)
    plain, *others = (iobs.solve(iobs.Quadratic.at(centre, inputs.T @ inputs * u**2), pattern, solver) for u in units)
    for found, unit in zip(others, units[1:], strict=True):
        assert found.mask.sum() == plain.mask.sum()
        # "admm" searches in float32, where other rounding may give another support of similar loss.
        assert found.loss.sum() / unit**2 == pytest.approx(float(plain.loss.sum()), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_solver_does_not_depend_on_units_of_weights(solver, dtype):
    units = (1.0, 2.0**80, 2.0**-80)
    # The second is too large for exact swaps. The bits of a product of matrices depend on the place of a row in blocks
    # of rows, of which 96 rows are a whole number: the problems are solved together.
    shapes = [SMALL[solver]] if solver in SMALL else [(6, 16), (96, 64)]
    for shape in shapes:
        problem = random_problem(*shape, dtype=dtype)
        for centred in (True, False):
            problems = [
                iobs.Quadratic.at(problem.anchor * unit, problem.hessian)
                if centred
                else iobs.Quadratic(problem.hessian, problem.linear * unit)
                for unit in units
            ]
            patterns = [iobs.NM(2, 4)] * 3
            plain, *others = solve_many(problems, patterns, solver, refine="swap", damping=0.01)
            for found, unit in zip(others, units[1:], strict=True):
                assert torch.equal(found.mask, plain.mask)
                assert torch.equal(found.weight, plain.weight * unit)


def test_admm_is_as_good_if_inputs_differ_in_units():
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
def test_solver_computes_half_precision_in_float32(solver, dtype):
    problem = problem_for(solver).to(torch.float32)
    half = iobs.Quadratic((problem.matrix / 16).to(dtype), (problem.linear / 16).to(dtype))
    found = iobs.solve(half, iobs.NM(2, 4), solver)
    wide = iobs.solve(half.to(torch.float32), iobs.NM(2, 4), solver)
    assert found.weight.dtype == dtype
    assert torch.equal(found.weight, wide.weight.to(dtype))


def test_solve_raises_if_there_are_no_rows_or_columns():
    with pytest.raises(ProblemError, match="no rows"):
        iobs.solve(iobs.Quadratic(torch.eye(4), torch.zeros(0, 4)), iobs.NM(2, 4))
    for pattern in (iobs.NM(2, 4), iobs.Unstructured(0.5), iobs.Groups(2, keep=0)):
        with pytest.raises(ProblemError, match="no columns"):
            iobs.solve(iobs.Quadratic.at(torch.zeros(3, 0), torch.zeros(0, 0)), pattern)


def test_exact_skips_impossible_row_counts():
    problem = random_problem(2, 30)
    assert iobs.solve(problem, iobs.Unstructured(keep=57), "exact", limit=5000).mask.sum() == 57
