"""Contract of all solvers: product of solvers, refinements and patterns."""

import pytest
import torch
from solver_problems import GRIDS, GROUPS, PATTERNS, options_of, random_problem, require_pattern_of, solvers_of

import iobs
from iobs.core.masks import top_mask
from iobs.errors import (
    DampingWarning,
    NonFiniteError,
    NotPositiveDefiniteError,
    PatternError,
    ProblemError,
)
from iobs.solvers import SOLVERS, solve_many
from iobs.solvers.families import family_of

EVERY_SOLVER = sorted(SOLVERS)
SMALL = {"exact": (3, 8)}  # the time of the exact solver grows exponentially with the size


def problem_for(solver, **options):
    rows, columns = SMALL.get(solver, (6, 16))
    return random_problem(rows, columns, **options)


def pattern_for(solver, pattern):
    return iobs.Unstructured(keep=10) if solver == "exact" and pattern == iobs.Unstructured(keep=37) else pattern


FREE = {"magnitude", "wanda", "random", "scores", "flap"}  # solvers that factorise nothing
CASES = [
    pytest.param(solver, pattern, id=f"{solver}-{pattern}")
    for pattern in [*PATTERNS, *GROUPS, *GRIDS]
    for solver in solvers_of(pattern)
]
ONE_OF_EACH = [
    pytest.param(solver, pattern, id=f"{solver}-{pattern}")
    for pattern in (iobs.NM(2, 4), iobs.Groups(3, 2), iobs.Grid(4, 6), iobs.Unstructured(0.5) & iobs.Grid(4))
    for solver in solvers_of(pattern)
]


def any_problem(solver, pattern, **options):
    """A problem that fits the pattern, small where the solver is exact."""
    if isinstance(pattern, iobs.Groups):
        return random_problem(5, 12, **options)
    return problem_for(solver, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("solver", "pattern"), CASES)
def test_every_solver_obeys_its_pattern(solver, pattern, dtype):
    problem, pattern = any_problem(solver, pattern, dtype=dtype), pattern_for(solver, pattern)
    before = [tensor.clone() for tensor in (problem.hessian, problem.linear, problem.anchor)]
    for refine in (None, *family_of(pattern).refinements):
        first, again = (
            iobs.solve(problem, pattern, solver, refine=refine, **options_of(solver, pattern)) for _ in range(2)
        )
        require_pattern_of(first, pattern)
        assert first.weight.dtype == dtype
        assert torch.allclose(first.loss, problem.loss(first.weight))
        assert torch.equal(again.weight, first.weight)
    for tensor, copy in zip((problem.hessian, problem.linear, problem.anchor), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("solver", EVERY_SOLVER)
def test_losses_in_float32_are_those_in_float64(solver):
    problem = problem_for(solver, dtype=torch.float32)
    single, double = (iobs.solve(each, iobs.NM(2, 4), solver) for each in (problem, problem.to(torch.float64)))
    # Condition 50: the losses agree to a few thousand units of float32 rounding unless a mask differs.
    torch.testing.assert_close(single.loss.sum(), double.loss.sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("share", ["none", "one", "all"])
@pytest.mark.parametrize("kind", ["entries", "groups", "grid"])
def test_solve_keeps_nothing_one_thing_or_everything(kind, share):
    count = {"none": 0, "one": 1, "all": 4 if kind == "groups" else 24}[share]
    entries = iobs.Unstructured(keep=count)
    pattern = {"entries": entries, "groups": iobs.Groups(2, count), "grid": entries & iobs.Grid(4)}[kind]
    problem = random_problem(3, 8)
    for solver in solvers_of(pattern):
        refine = None if kind == "grid" else "swap"
        found = iobs.solve(problem, pattern, solver, refine=refine, **options_of(solver, pattern, 8))
        require_pattern_of(found, pattern)
        if share == "all" and kind != "grid":
            torch.testing.assert_close(found.weight, problem.centre())


@pytest.mark.parametrize(("solver", "pattern"), ONE_OF_EACH)
def test_solve_damps_with_a_warning_if_gram_is_singular(solver, pattern):
    rows, columns = any_problem(solver, pattern).shape
    samples = torch.randn(columns // 2, columns, dtype=torch.float64)
    problem = iobs.Quadratic.at(torch.randn(rows, columns, dtype=torch.float64), samples.T @ samples)
    options = options_of(solver, pattern)
    if solver in FREE:
        assert iobs.solve(problem, pattern, solver, **options).stats["damping"] == 0
    else:
        with pytest.warns(DampingWarning, match="layer 3"):
            solution = iobs.solve(problem, pattern, solver, name="layer 3", **options)
        assert 0 < solution.stats["damping"] < 1e-3
        require_pattern_of(solution, pattern)
    solution = iobs.solve(problem, pattern, solver, damping=0.01, **options)
    assert torch.isfinite(solution.weight).all()
    assert solution.stats["damping"] == 0.01


@pytest.mark.parametrize("unit", [2.0**60, 2.0**-60])
@pytest.mark.parametrize(("solver", "pattern"), ONE_OF_EACH)
def test_weights_have_the_units_of_the_problem(solver, pattern, unit):
    problem, options = any_problem(solver, pattern, dtype=torch.float32), options_of(solver, pattern)
    plain = iobs.solve(problem, pattern, solver, **options)
    scaled = iobs.solve(iobs.Quadratic.at(problem.anchor * unit, problem.hessian), pattern, solver, **options)
    assert torch.equal(scaled.weight, plain.weight * unit)
    require_pattern_of(scaled, pattern)


@pytest.mark.parametrize("pattern", [iobs.Unstructured(0.5), iobs.Groups(2, 1), iobs.Grid(4)], ids=str)
def test_solve_error_names_the_problem_if_hessian_is_indefinite(pattern):
    hessian = torch.diag(torch.tensor([1.0, 1.0, -100.0, 1.0]))
    solver = {"Unstructured": "obc", "Groups": "search", "Grid": "gptq"}[type(pattern).__name__]
    with pytest.warns(DampingWarning), pytest.raises(NotPositiveDefiniteError, match="layer 3"):
        iobs.solve(iobs.Quadratic(hessian, torch.ones(2, 4)), pattern, solver, name="layer 3")


@pytest.mark.parametrize("pattern", [*PATTERNS, *GROUPS], ids=str)
def test_refit_and_swap_never_raise_the_loss(pattern):
    for solver in solvers_of(pattern):
        problem, fitting = any_problem(solver, pattern), pattern_for(solver, pattern)
        plain, refit, swap = (
            iobs.solve(problem, fitting, solver, refine=refine, **options_of(solver, pattern))
            for refine in (None, "refit", "swap")
        )
        slack = 1e-9 * abs(float(problem.loss(problem.centre()).sum()))
        assert torch.equal(refit.mask, plain.mask)
        assert float(refit.loss.sum()) <= float(plain.loss.sum()) + slack
        assert float(swap.loss.sum()) <= float(refit.loss.sum()) + slack
        assert swap.stats["certified"]


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


@pytest.mark.parametrize(
    "pattern", [iobs.Unstructured(0.5), iobs.Unstructured(0.5, per="row"), iobs.NM(2, 4), iobs.NM(2, 4) & iobs.Grid(4)],
    ids=str,
)  # fmt: skip
def test_solve_gives_the_count_of_dead_columns_to_live_ones(pattern):
    for solver in solvers_of(pattern):
        problem = any_problem(solver, pattern)
        dead = torch.isin(torch.arange(problem.shape[1]), torch.tensor([1, 5, 6]))
        hessian = problem.matrix * ~dead * ~dead[:, None]
        solution = iobs.solve(iobs.Quadratic.at(problem.centre(), hessian), pattern, solver, damping=0.01)
        assert solution.stats["dead_columns"] == 3
        assert not solution.mask[:, dead].any()
        assert not solution.weight[:, dead].any()
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


def test_solve_raises_damping_tenfold_until_cholesky_succeeds():
    hessian = torch.diag(
        torch.tensor([1.0, 1, 1, -2e-4], dtype=torch.float64)
    )  # positive definite with damping of at least 1e-3
    with pytest.warns(DampingWarning) as caught:
        found = iobs.solve(iobs.Quadratic(hessian, torch.ones(2, 4).double()), iobs.Unstructured(0.5), "obc")
    assert [str(warning.message).split("trying ")[1] for warning in caught] == ["1e-06.", "1e-05.", "0.0001.", "0.001."]
    assert found.stats["damping"] == pytest.approx(1e-3)


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
