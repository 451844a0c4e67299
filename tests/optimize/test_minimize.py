"""The loop, every method in it, and properties that hold for all methods."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sparse_problems import correlated_design, sparse_signal

import iobs
from iobs.errors import NonFiniteError, NotPositiveDefiniteError, ProblemError
from iobs.optimize.curvature import FullHessian, ProductModel
from iobs.optimize.methods import METHODS
from iobs.optimize.minimize import minimize
from iobs.optimize.objectives.autodiff import from_torch
from iobs.optimize.objectives.families import Logistic, Poisson
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import refit
from iobs.optimize.search import auto

CASES = {
    "least squares": lambda X, m, rng: LeastSquares(X, m + 0.1 * rng.standard_normal(len(m)), intercept=True),
    "logistic": lambda X, m, rng: Logistic(X, rng.random(len(m)) < 1 / (1 + np.exp(-m)), ridge=0.5, intercept=True),
    "poisson": lambda X, m, rng: Poisson(X, np.exp(0.3 * m), ridge=0.1),
}


def _case(name, rng, n=60, d=14, k=3):
    X = correlated_design(rng, n, d, 0.5)
    return CASES[name](X, X @ sparse_signal(rng, d, k), rng)


@pytest.mark.parametrize(
    "method", ["iht", "htp", "cosamp", "grasp", "nhtp", "fnhtp", "omp", "accelerated_iht", "newton_iht"]
)
def test_baselines_recover_an_easy_signal(method, rng):
    X, truth = rng.standard_normal((200, 40)), sparse_signal(rng, 40, 4)
    found = minimize(LeastSquares(X, X @ truth), 4, method=method, max_steps=300)
    np.testing.assert_allclose(found.theta, truth, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_minimize_is_feasible_and_repeatable(method, case, rng):
    objective = _case(case, rng)
    result = minimize(objective, 3, method=method, max_steps=40)
    assert result.support.size <= 3
    np.testing.assert_array_equal(result.support, np.flatnonzero(result.theta))
    assert result.theta.shape == (14,)
    assert result.history[0].step == 0
    assert len(result.history) <= 41
    full = result.theta
    if objective.dimension > 14:  # theta's last entry is the constant at the column means
        full = np.append(full, result.intercept + objective.mean @ full)
    assert objective.value(full) == pytest.approx(result.loss, rel=1e-9)
    again = minimize(objective, 3, method=method, max_steps=40)
    np.testing.assert_array_equal(result.theta, again.theta)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_auto_finds_the_best_support_of_small_problems(case, seed):
    objective = _case(case, np.random.default_rng(seed))
    result = minimize(objective, 3)
    supports = (np.union1d(chosen, objective.forced) for chosen in itertools.combinations(range(14), 3))
    best = min(refit(objective, support.astype(np.int64)).value for support in supports)
    assert result.loss == pytest.approx(best, rel=1e-9)
    assert result.converged
    assert "1-swap optimal" in result.message


@pytest.mark.parametrize("convert", [np.asarray, sp.csr_array, torch.from_numpy, lambda X: X.astype(np.float32)])
def test_minimize_does_not_depend_on_storage(convert, rng):
    X = correlated_design(rng, 50, 80, 0.3)
    truth = sparse_signal(rng, 80, 5)
    result = minimize(LeastSquares(convert(X), X @ truth), 5)
    np.testing.assert_array_equal(result.support, np.flatnonzero(truth))
    np.testing.assert_allclose(result.theta, truth, rtol=1e-4 if convert(X).dtype == np.float32 else 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_minimize_support_does_not_depend_on_column_units(case, rng):
    X = correlated_design(rng, 60, 30, 0.6)
    margin = X @ sparse_signal(rng, 30, 4)
    factors = 10.0 ** rng.uniform(-3, 3, 30)
    noise = rng.integers(1 << 30)
    plain, scaled = (
        {"least squares": LeastSquares, "logistic": Logistic, "poisson": Poisson}[case](
            matrix, _targets(case, margin, np.random.default_rng(noise))
        )
        for matrix in (X, X * factors)
    )
    one, other = minimize(plain, 4), minimize(scaled, 4)
    np.testing.assert_array_equal(one.support, other.support)
    np.testing.assert_allclose(one.theta, other.theta * factors, rtol=1e-5)


def _targets(case, margin, rng):
    if case == "logistic":
        return (rng.random(margin.size) < 1 / (1 + np.exp(-margin))).astype(float)
    return rng.poisson(np.exp(0.5 * margin)) if case == "poisson" else margin + rng.standard_normal(margin.size)


def test_minimize_recovers_the_support_of_torch_functions(rng):
    X = correlated_design(rng, 80, 25, 0.5)
    truth = sparse_signal(rng, 25, 3)
    soft = 1 / (1 + np.exp(-X @ truth))
    tensor, y = torch.from_numpy(X), torch.from_numpy(soft)
    function = from_torch(lambda t: (torch.nn.functional.softplus(tensor @ t) - y * (tensor @ t)).sum(), 25)
    result = minimize(function, 3)
    np.testing.assert_allclose(result.theta, truth, atol=1e-10)


@pytest.mark.parametrize("method", ["auto", "topk_iobs", "iobs"])
def test_minimize_takes_constant_and_refuses_nonfinite_functions(method):
    constant = from_torch(lambda t: torch.tensor(3.0, dtype=t.dtype), 5)
    assert minimize(constant, 2, method=method).loss == 3
    one = minimize(from_torch(lambda t: (t[0] - 1) ** 2, 5), 2, method=method)
    np.testing.assert_allclose(one.theta, [1, 0, 0, 0, 0], atol=1e-8)
    for function in (torch.log, torch.sqrt):
        with pytest.raises(NonFiniteError, match="at zero"):
            minimize(from_torch(lambda t, f=function: f(t).sum(), 5), 2, method=method)


def test_auto_claims_no_optimum_if_f_is_unbounded(rng):
    X, y = torch.from_numpy(rng.standard_normal((20, 4))), torch.from_numpy(rng.poisson(2.0, 20))
    likelihood = from_torch(lambda t: (y * (X @ t) - torch.exp(X @ t)).sum(), 4)
    assert minimize(likelihood, 2).message == auto.RUNAWAY
    assert minimize(from_torch(lambda t: -likelihood.function(t), 4), 2).message == auto.LOCAL_MODEL


@pytest.mark.parametrize(("rho", "k"), [(0.0, 60), (0.0, 70), (0.9, 60)])
def test_auto_recovers_hard_under_determined_signals(rho, k):
    rng = np.random.default_rng(77)
    X = correlated_design(rng, 200, 500, rho)
    truth = sparse_signal(rng, 500, k)
    result = minimize(LeastSquares(X, X @ truth), k)
    np.testing.assert_array_equal(result.support, np.flatnonzero(truth))
    assert result.message == auto.GLOBAL


@pytest.mark.parametrize("method", ["regularised_newton", "cubic_newton", "auto"])
@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_regularised_methods_converge_from_far_starts(kind, method):
    rng = np.random.default_rng(5)
    X = rng.standard_normal((150, 30)) / (1 if kind == "logistic" else 2)
    truth = sparse_signal(rng, 30, 4)
    margin = X @ truth
    objective = Logistic(X, 1 / (1 + np.exp(-margin))) if kind == "logistic" else Poisson(X, np.exp(margin))
    start = 10 * rng.standard_normal(30)
    result = minimize(objective, 4, method=method, theta0=start, max_steps=200)
    np.testing.assert_allclose(result.theta, truth, atol=1e-7)
    losses = [record.loss for record in result.history[1:]]
    assert all(after <= before for before, after in itertools.pairwise(losses))


@pytest.mark.parametrize("method", ["regularised_newton", "cubic_newton"])
def test_regularised_methods_converge_at_an_exact_fit(method):
    for seed in range(5):  # for some seeds the gradient on the support becomes exactly zero
        rng = np.random.default_rng(seed)
        objective = LeastSquares(rng.standard_normal((3, 12)), rng.standard_normal(3))
        found = minimize(objective, 5, method=method, max_steps=50)
        assert found.converged
        assert found.loss < 1e-20


def test_minimize_keeps_forced_coordinates_uncounted(rng):
    X = correlated_design(rng, 60, 20, 0.2)
    truth = sparse_signal(rng, 20, 4)
    useless = int(np.flatnonzero(truth == 0)[0])
    for objective in (
        LeastSquares(X, X @ truth + rng.standard_normal(60), forced=[useless]),
        Logistic(X, rng.random(60) < 0.5, forced=[useless], intercept=True, ridge=0.1),
    ):
        for method in ("auto", "omp", "htp", "iobs", "obc", "iht"):
            result = minimize(objective, 4, method=method, max_steps=30)
            assert useless in result.support
            assert result.support.size <= 5


def test_minimize_takes_quadratics_of_one_row(rng):
    hessian = torch.from_numpy(np.cov(rng.standard_normal((10, 30))))
    centre = torch.from_numpy(rng.standard_normal(10))
    result = minimize(iobs.Quadratic.at(centre[None], hessian), 4, method="iobs_exact")
    swapped = minimize(iobs.Quadratic.at(centre[None], hessian), 4)
    assert swapped.loss == pytest.approx(result.loss, rel=1e-9)
    with pytest.raises(ProblemError, match="one row"):
        minimize(iobs.Quadratic.at(torch.stack([centre, centre]), hessian), 4)


@pytest.mark.parametrize("k", [0, 14])
@pytest.mark.parametrize("case", CASES)
def test_minimize_takes_k_zero_and_k_d(case, k, rng):
    objective = _case(case, rng)
    result = minimize(objective, k)
    assert result.support.size == k
    full = refit(objective, np.union1d(np.arange(14) if k else [], objective.forced).astype(np.int64))
    assert result.loss == pytest.approx(full.value, rel=1e-9)


def test_minimize_handles_duplicate_and_constant_columns(rng):
    X = correlated_design(rng, 40, 12, 0.3)
    X[:, 5], X[:, 7], X[:, 8] = X[:, 4], 0.0, 2 * X[:, 4]
    truth = np.where(np.isin(np.arange(12), [1, 4, 9]), 1.0, 0.0)
    result = minimize(LeastSquares(X, X @ truth), 3)
    assert result.loss < 1e-20
    assert set(result.support) - {4, 5, 8} == {1, 9}
    wide = minimize(LeastSquares(X, X @ truth + rng.standard_normal(40)), 11)
    assert 7 not in wide.support
    assert np.isfinite(wide.loss)
    nothing = minimize(LeastSquares(np.zeros((5, 3)), np.ones(5)), 2)
    assert nothing.support.size == 0


def test_minimize_fits_exactly_if_k_exceeds_samples(rng):
    X = rng.standard_normal((10, 40))
    result = minimize(LeastSquares(X, rng.standard_normal(10)), 20)
    assert result.loss < 1e-15
    assert result.support.size <= 20


@pytest.mark.filterwarnings("ignore::iobs.errors.SeparationWarning")
def test_minimize_is_finite_if_classes_are_separable(rng):
    X = rng.standard_normal((40, 6))
    for y in (X[:, 2] > 0, np.ones(40), np.zeros(40)):
        result = minimize(Logistic(X, y, intercept=True), 2)
        assert np.isfinite(result.theta).all()
        assert result.loss < 1e-6
    assert 2 in minimize(Logistic(X, X[:, 2] > 0), 1).support


def test_minimize_callback_sees_every_step_and_stops(rng):
    seen = []
    result = minimize(
        _case("logistic", rng), 3, method="iht", callback=lambda record, theta: seen.append(record) or record.step == 4
    )
    assert [record.step for record in seen] == [1, 2, 3, 4]
    assert not result.converged
    assert "callback" in result.message


def test_minimize_does_not_modify_inputs(rng):
    X, y, start = rng.standard_normal((30, 8)), rng.standard_normal(30), rng.standard_normal(8)
    copies = X.copy(), y.copy(), start.copy()
    for method in METHODS:
        if method != "omp":
            minimize(LeastSquares(X, y), 3, method=method, theta0=start, max_steps=5)
    for before, after in zip(copies, (X, y, start), strict=True):
        np.testing.assert_array_equal(before, after)


def test_minimize_forms_no_hessian_for_large_designs(rng):
    X = sp.random_array((400, 20_000), density=0.01, rng=rng, format="csr")
    truth = np.zeros(20_000)
    truth[rng.choice(20_000, 8, replace=False)] = 3.0
    result = minimize(LeastSquares(X, X @ truth), 8)
    assert result.loss < 1e-15
    objective, point = LeastSquares(X, X @ truth), np.zeros(20_000)
    gradient = objective.value_and_gradient(point)[1]
    model = FullHessian(0.1).model(Problem(objective, 8), point, gradient)
    assert isinstance(model, ProductModel)
    np.testing.assert_allclose(model.hessian_product(point, model.centre()), -gradient, atol=1e-8 * abs(gradient).max())


def test_iobs_exact_raises_if_there_are_too_many_supports(rng):
    with pytest.raises(ProblemError, match='use method="iobs"'):
        minimize(LeastSquares(rng.standard_normal((60, 30)), rng.standard_normal(60)), 15, method="iobs_exact")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": -1}, ProblemError, "between 0 and the 14"),
        ({"k": 15}, ProblemError, "between 0 and the 14"),
        ({"k": 2.5}, ProblemError, "integer"),
        ({"k": True}, ProblemError, "integer"),
        ({"method": "magic"}, ProblemError, "no method 'magic'"),
        ({"method": 3}, ProblemError, "name or an instance"),
        ({"method": METHODS["htp"]}, ProblemError, "name or an instance"),
        ({"objective": lambda theta: theta @ theta}, ProblemError, "from_torch"),
        ({"seed": -1}, ProblemError, "seed"),
        ({"max_steps": 0}, ProblemError, "max_steps"),
        ({"max_steps": 2.5}, ProblemError, "max_steps"),
        ({"tol": -1.0}, ProblemError, "tol"),
        ({"damping": -0.1}, ProblemError, "damping"),
        ({"theta0": np.ones(3)}, ProblemError, "14 entries"),
        ({"theta0": np.full(14, np.nan)}, NonFiniteError, "start"),
        ({"method": "omp", "theta0": np.ones(14)}, ProblemError, "only adds"),
    ],
)
def test_minimize_raises_if_arguments_are_invalid(arguments, error, message, rng):
    objective = _case("least squares", rng)
    with pytest.raises(error, match=message):
        minimize(**{"objective": objective, "k": 3, **arguments})


@pytest.mark.parametrize("method", sorted(METHODS))
def test_minimize_returns_zero_if_columns_are_zero(method):
    assert not minimize(LeastSquares(np.zeros((5, 3)), np.ones(5)), 2, method=method).theta.any()


def test_minimize_finds_small_effects_beside_large_ones(rng):
    X = rng.standard_normal((200, 30))
    assert set(minimize(LeastSquares(X, 1e9 * X[:, 0] + X[:, 1]), 2).support) == {0, 1}


def test_minimize_claims_a_minimum_only_if_there_is_one(rng):
    objective = LeastSquares(rng.standard_normal((30, 4)), rng.standard_normal(30))
    assert minimize(objective, 0).message.startswith("nothing to choose")
    without_end = from_torch(lambda theta: theta.sum() + 0 * (theta**2).sum(), 4)
    assert "global" not in minimize(without_end, 2).message
    for hessian, linear in (
        (-torch.eye(3), torch.ones(1, 3)),
        (torch.diag(torch.tensor([1.0, 0, 1])), torch.ones(1, 3)),
    ):
        with pytest.raises(NotPositiveDefiniteError, match="unbounded below along coordinate"):
            minimize(iobs.Quadratic(hessian.double(), linear.double()), 2)


@pytest.mark.parametrize("method", ["newton_iht", "woodfisher", "woodtaylor"])
def test_minimize_passes_damping_to_factorising_methods(method, rng):
    X = correlated_design(rng, 60, 8, 0.6)
    objective = LeastSquares(X, X[:, :3].sum(1) + 0.1 * rng.standard_normal(60))
    answers = [minimize(objective, 3, method=method, damping=amount, max_steps=1).loss for amount in (None, 100.0)]
    assert answers[0] != answers[1]


def test_methods_take_k_zero_and_refuse_large_dense_hessians(rng):
    objective = LeastSquares(rng.standard_normal((30, 4)), rng.standard_normal(30))
    for method in ("nhtp", "fnhtp"):
        assert not minimize(objective, 0, method=method).theta.any()
    wide = LeastSquares(rng.standard_normal((5, 4097)), rng.standard_normal(5))
    for method in ("obs", "obc", "obd", "woodfisher"):
        with pytest.raises(ProblemError, match="at most 4096 coordinates"):
            minimize(wide, 2, method=method)
