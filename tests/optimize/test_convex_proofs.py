"""Certificates and near-optimal sets of generalised linear models, Cox regression and bounded problems: enumeration."""

from __future__ import annotations

import itertools
import re
import time

import numpy as np
import pytest

import iobs
from iobs.errors import ProblemError
from iobs.optimize.bounds import reach
from iobs.optimize.bounds.branch_and_bound import CertificateTree
from iobs.optimize.bounds.certificate import ProofLimits
from iobs.optimize.bounds.choices import Choices
from iobs.optimize.bounds.convex import CertificateSearch, FeatureProblem
from iobs.optimize.bounds.perspective import SparseConvex
from iobs.optimize.objectives import Cox, Gamma, LeastSquares, Logistic, NegativeBinomial, Poisson, Tweedie, from_torch
from iobs.optimize.objectives.tabled import Multinomial
from iobs.optimize.problem import Problem
from iobs.optimize.refit.newton import refit
from iobs.optimize.refit.within import Bounds

_FAMILIES = ("logistic", "poisson", "negative binomial", "gamma", "tweedie", "cox", "multinomial", "least squares")


def _objective(family, X, margin, rng, options):
    """A random objective of a family, with finite minimisers."""
    n, mean = margin.size, np.exp(margin)
    first = np.arange(n) == 0
    if family == "logistic":
        labels = (rng.random(n) < mean / (1 + mean)).astype(float)
        labels[:2] = 0, 1
        return Logistic(X, labels, **options)
    if family == "poisson":
        return Poisson(X, rng.poisson(mean) + first, **options)
    if family == "negative binomial":
        return NegativeBinomial(X, rng.poisson(mean) + first, **options)
    if family == "gamma":
        return Gamma(X, mean * rng.gamma(2, 0.5, n) + 1e-3, **options)
    if family == "tweedie":
        return Tweedie(X, mean * rng.gamma(2, 0.5, n) * (rng.random(n) < 0.8) + first, **options)
    if family == "cox":
        options = {name: value for name, value in options.items() if name != "intercept"}
        return Cox(X, rng.exponential(1 / mean), np.append(1, rng.random(n - 1) < 0.7), **options)
    if family == "multinomial":
        labels = np.where(rng.random(n) < 0.5, rng.integers(0, 3, n), np.digitize(margin, [-0.5, 0.5]))
        labels[:3] = 0, 1, 2
        return Multinomial(X, labels, 3, ridge=max(options["ridge"], 0.1))
    return LeastSquares(X, margin + rng.standard_normal(n), **options)


def _random_problem(seed):
    """(objective, k, limit of the coefficients or None) of any family, design and ridge."""
    rng = np.random.default_rng(seed)
    family, p = _FAMILIES[seed % len(_FAMILIES)], int(rng.integers(3, 9))
    n = int(p * rng.choice([2, 4, 10])) + 2
    X = (rng.standard_normal((n, p)) + rng.choice([0, 1.0]) * rng.standard_normal((n, 1))) * 10 ** rng.uniform(
        -0.5, 0.5, p
    )
    margin = np.clip(X @ (rng.standard_normal(p) * (rng.random(p) < 0.5)) / X.std(), -3, 3)
    ridge = float(rng.choice([0.1, 1.0, 10.0]) if seed % 3 else rng.choice([0.0, 1e-6, 1e-3]))
    options = {"ridge": ridge, "intercept": bool(rng.random() < 0.5), "forced": [0] if rng.random() < 0.3 else []}
    limit = float(rng.choice([0.5, 0.2])) if rng.random() < 0.5 and family != "multinomial" else None
    return _objective(family, X, margin, rng, options), int(rng.integers(1, p - 1)), limit


def _bounds(objective, limit):
    if limit is None:
        return None
    features = objective.split(np.zeros(objective.dimension))[0].size
    return Bounds.of(-limit, limit, features).extended(objective.dimension)


def _best(objective, k, limit):
    """The least value over all supports of k features."""
    several = getattr(objective, "outputs", 1)
    free = np.setdiff1d(np.arange(objective.dimension), objective.forced).reshape(-1, several)
    supports = (
        np.union1d(free[list(chosen)], objective.forced) for chosen in itertools.combinations(range(len(free)), k)
    )
    return min(
        refit(objective, support.astype(np.int64), bounds=_bounds(objective, limit)).value for support in supports
    )


def _limits(limit):
    return {} if limit is None else {"lower": -limit, "upper": limit}


def _check(seed):
    """Compare a certificate with enumeration; return False where the problem is refused."""
    objective, k, limit = _random_problem(seed)
    try:
        found = iobs.certify(objective, k, seconds=100, **_limits(limit))
    except ProblemError:  # without ridge: separable classes, or as many columns as samples
        return False
    best = _best(objective, k, limit)
    rounding = 1e-8 * abs(best)  # of the reference
    assert found.lower - found.margin <= best + rounding, seed
    assert best - rounding <= found.upper <= best + 1.001e-4 * abs(best) + rounding, seed
    # A margin above the gap proves nothing: coefficients of hardly any ridge, with wide bounds.
    assert found.closed or found.margin > 1e-4 * abs(best), (seed, found.message)
    return True


_BATCHES = [pytest.param(range(start, start + 100), marks=pytest.mark.slow) for start in range(0, 2000, 100)]


@pytest.mark.filterwarnings("ignore::iobs.errors.SeparationWarning")
@pytest.mark.parametrize(
    "seeds",
    [*(range(start, start + 8) for start in range(3000, 3096, 8)), *_BATCHES],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop}",
)
def test_certificates_of_all_families_agree_with_enumeration(seeds):
    assert np.mean([_check(seed) for seed in seeds]) > 0.8


def test_every_tangent_bounds_every_node(rng):
    for seed in range(8):
        objective, k, limit = _random_problem(seed)
        if not objective.ridge.all() and limit is None:
            continue
        features = FeatureProblem.of(Problem(objective, k), _bounds(objective, limit))
        fit = features.first_fit()
        convex = features.relaxable(fit, fit.value)
        best = _best(objective, k, limit)
        nothing = np.zeros(convex.features, dtype=np.bool_)
        for _ in range(20):
            theta = fit.theta + rng.standard_normal(fit.theta.size) * 10.0 ** rng.uniform(-3, 0)
            tangent = convex.tangent(theta, *convex.objective.value_and_gradient(theta))
            assert tangent.bound(Choices.of(nothing, ~nothing, k)) <= best * (1 + 1e-9), seed


def _near(seed, most):
    """Compare a near-optimal set with enumeration; return its size."""
    rng = np.random.default_rng(seed)
    p = int(rng.integers(5, most + 1))
    k, n = int(rng.integers(1, 5 if p <= 12 else 4)), int(p * rng.choice([2, 5, 20]))
    X = rng.standard_normal((n, p)) + rng.choice([0, 1.0]) * rng.standard_normal((n, 1))
    ridge = float(rng.choice([0.0, 0.1, 1.0]))
    if ridge and seed % 5 == 0:
        X[:, 0] = X[:, 1]
    margin = np.clip(0.5 * X @ (rng.choice([-1.0, 1.0], p) * (rng.random(p) < 0.3)), -3, 2)
    forced = [1] if rng.random() < 0.2 else []
    options = {"ridge": ridge, "intercept": bool(rng.random() < 0.5), "forced": forced}
    objective = _objective("poisson" if seed % 2 else "logistic", X, margin, rng, options)
    gap, at_most = float(rng.choice([0.0, 0.02, 0.2, 0.5])), bool(rng.random() < 0.4)
    try:
        found = iobs.rashomon_set(objective, k, gap=gap, at_most=at_most, max_members=10**6, seconds=300)
    except ProblemError:
        return 0
    losses = {}
    for size in range(0 if at_most else k, k + 1):
        for chosen in itertools.combinations(np.setdiff1d(range(p), forced), size):
            support = np.union1d(chosen, objective.forced).astype(np.int64)
            losses[tuple(support[support < p].tolist())] = refit(objective, support).value
    best = min(losses.values())
    ceiling, rounding = best * (1 + gap) + 1e-9 * abs(best), 1e-9 * abs(best)
    supports = [tuple(member.support.tolist()) for member in found]
    assert found.complete, (seed, found.message)
    assert len(set(supports)) == len(supports), seed
    assert {support for support, loss in losses.items() if loss <= ceiling - rounding} <= set(supports), seed
    assert set(supports) <= {support for support, loss in losses.items() if loss <= ceiling + rounding}, seed
    for member in found.members[:3]:
        assert member.loss == pytest.approx(losses[tuple(member.support)], rel=1e-9), seed
        for j, rise in zip(member.support, member.increases, strict=True):
            rest = np.union1d(np.setdiff1d(member.support, j), objective.forced[objective.forced >= p])
            assert rise == pytest.approx(refit(objective, rest.astype(np.int64)).value - member.loss, abs=1e-7), seed
    return len(found)


_NEAR_BATCHES = [pytest.param(range(start, start + 30), 22, marks=pytest.mark.slow) for start in range(0, 300, 30)]


@pytest.mark.filterwarnings("ignore::iobs.errors.SeparationWarning")
@pytest.mark.parametrize(
    ("seeds", "most"), [*((range(start, start + 4), 9) for start in range(400, 424, 4)), *_NEAR_BATCHES]
)
def test_near_optimal_sets_of_counts_and_classes_equal_enumeration(seeds, most):
    assert sum(_near(seed, most) for seed in seeds) > 0


def test_near_optimal_sets_of_classes_within_bounds_and_of_several_classes(rng):
    X = rng.standard_normal((80, 6))
    margin = X[:, :2].sum(axis=1)
    within = iobs.rashomon_set(_objective("least squares", X, margin, rng, {}), 2, gap=0.3, lower=-0.5, upper=0.5)
    assert within.complete
    assert all(np.abs(member.coefficients).max() <= 0.5 for member in within)
    several = iobs.rashomon_set(_objective("multinomial", X, margin, rng, {"ridge": 1.0}), 2, gap=0.2)
    assert several.complete
    assert several.dimension == 6
    assert several.members[0].coefficients.shape == (3, 2)
    assert "of 6 variables" in several.table()


@pytest.mark.parametrize("limit", [None, 0.4])
def test_the_exact_method_finds_and_proves_the_best_support(limit, rng):
    X = rng.standard_normal((60, 7))
    objective = _objective("logistic", X, X[:, 0] - X[:, 3], rng, {"ridge": 0.5, "intercept": True})
    result = iobs.minimize(objective, 3, method="exact", **_limits(limit))
    assert result.loss == pytest.approx(_best(objective, 3, limit), rel=1e-9)
    assert "a global minimiser" in result.message


@pytest.mark.parametrize("family", ["least squares", "logistic", "poisson"])
def test_two_equal_columns_within_bounds_reach_twice_as_far(family, rng):
    X = rng.standard_normal((40, 4))
    X[:, 1] = X[:, 0]
    objective = _objective(family, X, 2 * X[:, 0], rng, {"ridge": 0.0})
    found = iobs.certify(objective, 2, gap=0.0, lower=-0.3, upper=0.3)
    assert found.upper == pytest.approx(_best(objective, 2, 0.3), rel=1e-9)
    assert found.fit.support.tolist() == [0, 1]
    assert found.closed


@pytest.mark.parametrize("family", ["least squares", "logistic", "cox"])
def test_of_equal_columns_one_without_ridge_stays(family, rng):
    X = rng.standard_normal((40, 4))
    X[:, 1] = X[:, 0]
    objective = _objective(family, X, X[:, 0], rng, {"ridge": np.array([20.0, 0.0, 0.0, 0.0])})
    for k in (1, 2):
        found = iobs.certify(objective, k, gap=0.0)
        assert found.closed
        assert found.upper == pytest.approx(_best(objective, k, None), rel=1e-9)


@pytest.mark.parametrize("family", ["logistic", "poisson", "cox", "gamma"])
def test_equal_columns_without_ridge_are_proved_by_one_of_them(family, rng):
    X = rng.standard_normal((80, 4))
    X[:, 3] = -2 * X[:, 1]
    objective = _objective(family, X, X[:, 0] - X[:, 1], rng, {"ridge": 0.0, "intercept": True})
    found = iobs.certify(objective, 2, gap=0.0)
    assert found.closed
    assert found.upper == pytest.approx(_best(objective, 2, None), rel=1e-9)
    known = refit(objective, np.union1d([0, 3], objective.forced).astype(np.int64))
    assert iobs.certify(objective, 2, fit=known).closed
    with pytest.raises(ProblemError, match="coefficient 3 is a multiple of another one"):
        iobs.rashomon_set(objective, 2)


def test_no_proof_by_an_allowance_for_rounding_that_exceeds_the_gap(rng):
    X = rng.standard_normal((60, 6)) * 10.0 ** np.array([-6, -3, 0, 2, 4, 6])
    labels = np.digitize(X[:, 0] * 1e6 + rng.standard_normal(60), [-0.5, 0.5])
    objective = Multinomial(X, labels, 3, ridge=1e-3)
    worst = refit(objective, np.union1d(np.arange(9, 18), objective.forced).astype(np.int64))
    best = _best(objective, 3, None)
    for nodes in (1, 2, 4, 8, 1000):
        found = iobs.certify(objective, 3, gap=0.0, max_nodes=nodes, fit=worst)
        assert found.lower - found.margin <= best
        assert not found.closed or found.upper <= best * (1 + 1e-6)
        assert not (found.closed and "limit" in found.reason)


@pytest.mark.parametrize("unit", [1.0, 1e10])
def test_the_unit_of_the_loss_changes_no_tree(unit, rng):
    X = rng.standard_normal((30, 4))
    labels = 2 * X[:, 0] + rng.logistic(size=30) > 0
    objective = Logistic(X, labels, ridge=unit, sample_weight=np.full(30, unit), intercept=True)
    found = iobs.rashomon_set(objective, 4, gap=0.9, at_most=True, seconds=10)
    assert found.complete
    assert found.nodes < 32


@pytest.mark.parametrize("seed", range(6))
def test_a_gap_of_zero_is_closed_once_no_node_is_left(seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((40, 4))
    found = iobs.certify(_objective("poisson", X, 0.5 * X[:, 0], rng, {"ridge": 0.0, "intercept": True}), 2, gap=0.0)
    assert found.gap == 0
    assert "a global minimiser" in found.message


def test_without_time_or_nodes_nothing_is_proved_yet(rng):
    X = rng.standard_normal((40, 6))
    objective = _objective("logistic", X, X[:, 0], rng, {"ridge": 1.0})
    found = iobs.certify(objective, 2, max_nodes=0)
    assert not found.closed
    assert "nothing is proved yet" in found.message


@pytest.mark.parametrize("family", ["logistic", "cox", "least squares"])
def test_forced_columns_alone_leave_nothing_to_choose(family, rng):
    X = rng.standard_normal((40, 2))
    objective = _objective(family, X, X[:, 0], rng, {"ridge": 0.0, "forced": [0, 1]})
    for limits in ({}, {"lower": -0.1, "upper": 0.1}):
        found = iobs.certify(objective, 0, gap=0.0, **limits)
        assert found.closed
        assert found.fit.support.tolist() == [0, 1]
        assert len(iobs.rashomon_set(objective, 0, **limits)) == 1


def test_an_interruption_gives_the_gap_so_far(rng, monkeypatch):
    X = rng.standard_normal((60, 60)) + rng.standard_normal((60, 1))
    objective = _objective("logistic", X, X[:, :8].sum(axis=1), rng, {"ridge": 0.1})
    seen = []

    def stop(progress):
        seen.append(str(progress))
        if progress.nodes > 3:
            raise KeyboardInterrupt

    class Impatient(CertificateSearch):
        def stopped(self):
            self._next = 0.0
            return super().stopped()

    monkeypatch.setattr("iobs.optimize.bounds.convex.CertificateSearch", Impatient)
    found = iobs.certify(objective, 8, on_progress=stop)
    assert not found.closed
    assert "interrupted" in found.message
    assert found.lower < found.upper
    assert "open" in seen[-1]


_STEPS = {
    "first fit": "iobs.optimize.bounds.convex.auto.stages",
    "bounds": "iobs.optimize.bounds.convex.reached",
}


@pytest.mark.parametrize("step", _STEPS)
def test_an_interruption_before_the_first_node_proves_nothing(step, rng, monkeypatch):
    X = rng.standard_normal((60, 8))
    objective = _objective("logistic", X, X[:, 0], rng, {"ridge": 0.1, "intercept": True})
    iobs.certify(objective, 2, max_nodes=1)  # compiled

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_STEPS[step], stop)
    found = iobs.certify(objective, 2)
    assert not found.closed
    assert "nothing is proved yet" in found.message
    assert found.reason == "the search was interrupted"
    assert (found.fit.support.size == 3) == (step == "bounds")
    if step == "bounds":
        near = iobs.rashomon_set(objective, 2)
        assert len(near) == 1
        assert not near.complete
        assert "nothing is proved" in near.message


@pytest.mark.parametrize("nodes", [0, 3])
def test_an_interrupted_tree_of_a_quadratic_keeps_its_bound(nodes, rng, monkeypatch):
    X = rng.standard_normal((60, 20)) + rng.standard_normal((60, 1))
    objective = _objective("least squares", X, 0.1 * X[:, :6].sum(axis=1), rng, {})
    split = CertificateTree._split

    def interrupted(tree, *node):
        if tree.nodes > nodes:
            raise KeyboardInterrupt
        return split(tree, *node)

    monkeypatch.setattr(CertificateTree, "_split", interrupted)
    found = iobs.certify(objective, 5, gap=0.0)
    assert found.reason == "the search was interrupted"
    assert not found.closed
    assert found.lower <= found.upper
    assert np.isfinite(found.lower)


def test_a_weak_ridge_gets_no_bounds_where_they_take_longer_than_the_limit(rng, monkeypatch):
    X = rng.standard_normal((400, 40))
    objective = _objective("logistic", X, X[:, 0], rng, {"ridge": 0.1, "intercept": True})
    from_data, bounded_sides = reach._one_side, []

    def slow(*arguments):
        bounded_sides.append(arguments[3])
        time.sleep(0.02)
        return from_data(*arguments)

    monkeypatch.setattr(reach, "_one_side", slow)
    found = iobs.certify(objective, 4, seconds=0.4, gap=0.0)
    assert np.isfinite(found.lower)
    assert len(bounded_sides) < 20  # of 2 x 41 for all
    unpenalised = _objective("logistic", X, X[:, 0], rng, {"ridge": 0.0})
    found = iobs.certify(unpenalised, 4, seconds=0.4, gap=0.0)
    assert found.reason == "the time limit was reached"
    assert "nothing is proved yet" in found.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gap": "small"}, "gap must be a number"),
        ({"seconds": None}, "seconds must be a number"),
        ({"lower": "a"}, "lower bounds must be numbers"),
        ({"max_members": 2.5}, "max_members must be an integer"),
        ({"gap": np.inf}, "gap must be finite"),
    ],
)
def test_settings_of_another_type_are_refused(arguments, message, rng):
    X = rng.standard_normal((20, 3))
    objective = Logistic(X, X[:, 0] > 0, ridge=1.0)
    with pytest.raises(ProblemError, match=message):
        iobs.rashomon_set(objective, 2, **arguments)
    if "max_members" not in arguments and arguments.get("gap") != np.inf:
        with pytest.raises(ProblemError, match=message):
            iobs.certify(objective, 2, **arguments)
    for function in (iobs.certify, iobs.rashomon_set, iobs.minimize):
        with pytest.raises(ProblemError, match="An objective is needed"):
            function(X, 2)


def test_no_certificate_for_the_false_of_numpy(rng):
    X = rng.standard_normal((30, 3))
    estimator = iobs.SparseClassifier(2, certify=np.False_).fit(X, X[:, 0] > rng.standard_normal(30))
    assert not hasattr(estimator, "certificate_")


def test_a_search_goes_on_where_it_stopped_and_depth_first_without_memory(rng, monkeypatch):
    X = rng.standard_normal((60, 20)) + rng.standard_normal((60, 1))
    objective = _objective("poisson", X, 0.2 * X[:, :4].sum(axis=1), rng, {"ridge": 1.0})
    features = FeatureProblem.of(Problem(objective, 4), None)
    limits = ProofLimits(1e-4, time.perf_counter(), 100.0, 10**6)
    bounds = []
    for memory in (1 << 30, 0):
        monkeypatch.setattr("iobs.optimize.bounds.convex_tree._STORED_BYTES", memory)
        search = CertificateSearch(features, refit(objective, np.arange(4)), limits)
        while search.run(np.inf, search.nodes + 5):
            bounds.append(search.lower)
            assert search.lower <= search.best.value
        assert search.best.value - search.lower <= 1.01e-4 * search.best.value
    assert len(bounds) > 4


def test_what_no_bound_covers_is_refused(rng):
    X = rng.standard_normal((20, 30))
    with pytest.raises(ProblemError, match="Give a ridge, or"):
        iobs.certify(Logistic(X, rng.random(20) < 0.5), 3)
    with pytest.raises(ProblemError, match="convex objective"):
        iobs.certify(from_torch(lambda theta: (theta**4).sum(), 5), 2)
    objective = _objective("multinomial", X, X[:, 0], rng, {"ridge": 1.0})
    with pytest.raises(ProblemError, match="one coefficient for each feature"):
        iobs.certify(objective, 2, lower=-1.0)
    with pytest.raises(ProblemError, match="more than k = 1"):
        iobs.certify(objective, 1, fit=refit(objective, np.arange(9)))


@pytest.mark.parametrize("family", ["squared", "poisson", "logistic", "multinomial", "cox"])
def test_estimators_have_the_certificate_of_the_k_that_is_used(family, rng):
    X = rng.standard_normal((90, 6))
    margin = X[:, 0] - X[:, 2]
    if family in ("squared", "poisson"):
        y = rng.poisson(np.exp(margin))
        estimator = iobs.SparseRegressor("bic", loss=family, max_k=4, certify=True)
    elif family == "cox":
        y = np.column_stack([rng.exponential(np.exp(-margin)), rng.random(90) < 0.8])
        estimator = iobs.SparseCox(2, certify=30, gap=0.0)
    else:
        edges = [0.0] if family == "logistic" else [-0.5, 0.5]
        y = np.digitize(margin + rng.standard_normal(90), edges)
        estimator = iobs.SparseClassifier(2, ridge=0.01, certify=True)
    found = estimator.fit(X, y)
    assert found.certificate_.closed
    assert {0, 2} <= set(found.support_.tolist())
    assert found.certificate_.gap <= found.gap
    assert found.path_[[entry["k"] for entry in found.path_].index(found.k_)]["loss"] == found.certificate_.upper
    assert not hasattr(found.set_params(certify=False).fit(X, y), "certificate_")


def test_estimators_refuse_proofs_about_groups(rng):
    with pytest.raises(ProblemError, match="groups"):
        iobs.SparseRegressor(1, groups=[0, 0, 1], certify=True).fit(rng.standard_normal((9, 3)), rng.random(9))


@pytest.mark.parametrize("limits", [{}, {"lower": -0.1, "upper": 0.1}])
def test_a_fit_of_another_problem_proves_nothing_wrong(limits, rng):
    X = rng.standard_normal((40, 8))
    margin = X[:, :2].sum(axis=1) + rng.standard_normal(40)
    for objective, other in (
        (Logistic(X, margin > 0, ridge=5.0), Logistic(X, margin > 0, ridge=0.1)),
        (LeastSquares(X, margin, ridge=5.0), LeastSquares(X, X[:, 0])),
    ):
        best = iobs.certify(objective, 2, **limits)
        found = iobs.certify(objective, 2, fit=refit(other, np.array([4, 5])), **limits)
        assert found.closed
        assert found.upper == pytest.approx(best.upper)
    with pytest.raises(ProblemError, match="8 coefficients and f has 9"):
        iobs.certify(Logistic(X, margin > 0, ridge=5.0, intercept=True), 2, fit=found.fit)


def test_counts_with_equal_correlations_take_few_steps_for_a_node(monkeypatch, rng):
    X = rng.standard_normal((200, 150)) + rng.standard_normal((200, 1))
    margin = X[:, :4].sum(axis=1)
    objective = Poisson(X, rng.poisson(np.exp(margin / margin.std())), ridge=0.3)
    steps, tangent = [], SparseConvex.tangent
    monkeypatch.setattr(SparseConvex, "tangent", lambda *arguments: steps.append(1) or tangent(*arguments))
    found = iobs.certify(objective, 4, max_nodes=12)
    assert len(steps) < 15 * found.nodes


def test_every_bound_says_how_it_was_obtained(rng):
    X = rng.standard_normal((60, 12))
    margin = X[:, :3].sum(axis=1) + rng.standard_normal(60)
    wide = LeastSquares(X[:8], margin[:8])
    bases = {
        "perspective relaxation": iobs.certify(Logistic(X, margin > 0, ridge=1.0), 3),
        "perspective relaxation, within bounds .* that the data prove": iobs.certify(
            Poisson(X, np.round(margin**2)), 3
        ),
        "minimisers of the quadratic": iobs.certify(LeastSquares(X, margin), 3),
        "every support": iobs.certify(wide, 3),
        "the only fit": iobs.certify(LeastSquares(np.zeros((5, 2)), margin[:5]), 0),
        "nothing yet": iobs.certify(Poisson(X, np.round(margin**2)), 3, seconds=0.0),
    }
    for basis, certificate in bases.items():
        assert re.search(basis, certificate.basis)
