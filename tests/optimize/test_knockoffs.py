"""The knockoff filter: its correlations, its limit on false discoveries over fixed seeds, and the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from regression_commands import refused, run, write_table
from sparse_problems import correlated_design

from iobs import SparseClassifier, SparseCox, SparseRegressor, knockoff_filter
from iobs.errors import DataError, ProblemError
from iobs.optimize.estimators import knockoffs


def _autoregressive(d, rho):
    return rho ** np.abs(np.subtract.outer(np.arange(d), np.arange(d)))


def _standardised(rng, n, d, rho):
    X = correlated_design(rng, n, d, rho)
    X = X - X.mean(axis=0)
    return X / np.sqrt((X**2).mean(axis=0))


def test_fixed_knockoffs_have_the_inner_products_of_their_features(rng):
    X = _standardised(rng, 60, 12, 0.7)
    copies = knockoffs.fixed_knockoffs(X, rng)
    gram, cross, own = X.T @ X / 60, X.T @ copies / 60, copies.T @ copies / 60
    np.testing.assert_allclose(own, gram, atol=1e-9)
    np.testing.assert_allclose(copies.sum(axis=0), 0, atol=1e-9)
    s = 1 - cross.diagonal()
    np.testing.assert_allclose(cross, gram - np.diag(s), atol=1e-9)
    assert (s > 0).all()


def test_gaussian_knockoffs_have_the_joint_covariance(rng):
    covariance = _autoregressive(6, 0.5) * 4
    X = rng.multivariate_normal(np.zeros(6), covariance, 40_000)
    joint = np.cov(np.hstack([X, knockoffs.gaussian_knockoffs(X, covariance, rng)]).T)
    s = 4 * knockoffs.reconstructability(covariance / 4)[0]
    expected = np.block([[covariance, covariance - np.diag(s)], [covariance - np.diag(s), covariance]])
    np.testing.assert_allclose(joint, expected, atol=0.12)


def test_s_is_the_minimiser_within_its_limits(rng):
    correlation = _autoregressive(7, 0.6)
    s = knockoffs.reconstructability(correlation)[0]

    def loss(s):
        return (1 / s).sum() + np.trace(np.linalg.inv(2 * correlation - np.diag(s)))

    assert (s > 0).all()
    assert np.linalg.eigvalsh(2 * correlation - np.diag(s))[0] > 0
    for _ in range(50):
        assert loss(s) <= loss(s * np.exp(0.01 * rng.standard_normal(7))) * (1 + 1e-6)
    assert loss(s) < loss(np.full(7, min(1.0, np.linalg.eigvalsh(correlation)[0])))  # the equicorrelated s


def test_exchanging_a_feature_and_its_knockoff_flips_its_sign(rng):
    X = _standardised(rng, 120, 10, 0.3)
    copies = knockoffs.fixed_knockoffs(X, rng)
    y = X[:, :4].sum(axis=1) + rng.standard_normal(120)
    first = rng.random(10) < 0.5
    before = knockoffs.difference(SparseRegressor(max_k=8), X, copies, y, first)
    swapped = np.isin(np.arange(10), [1, 7])
    left, right = np.where(swapped, copies, X), np.where(swapped, X, copies)
    after = knockoffs.difference(SparseRegressor(max_k=8), left, right, y, first ^ swapped)
    np.testing.assert_allclose(after, np.where(swapped, -before, before), atol=1e-12)
    assert before[:4].min() > 0


def test_cut_takes_the_least_threshold_within_the_limit():
    statistics = np.array([5.0, 4, 3, 2, 1, 0.5, -0.7, 0, 0])
    threshold, share = knockoffs.cut(statistics, 0.25)
    assert (threshold, share) == (1.0, 0.2)  # at .5 two of six
    assert knockoffs.cut(statistics, 0.1) == (np.inf, pytest.approx(np.nan, nan_ok=True))


def _drawn(model, n, d, rng):
    """(estimator, X, y, columns with an effect, options) of a data set."""
    X = rng.multivariate_normal(np.zeros(d), _autoregressive(d, 0.0 if model in ("classes", "times") else 0.3), n)
    true = rng.choice(d, 12, replace=False)
    margin = X[:, true] @ rng.choice([-1, 1], 12) * (0.9 if model in ("classes", "times") else 0.6)
    if model == "classes":
        y = np.where(rng.random(n) < 1 / (1 + np.exp(-margin)), "yes", "no")
        return SparseClassifier(max_k=24), X, y, true, {}
    if model == "times":
        y = np.column_stack([rng.exponential(np.exp(-margin)), np.ones(n)])
        return SparseCox(max_k=24), X, y, true, {}
    covariance = _autoregressive(d, 0.3) if model == "gaussian" else None
    options = {"kind": model, "covariance": covariance}
    return SparseRegressor(), X, margin + rng.standard_normal(n), true, options


@pytest.mark.parametrize(
    ("model", "n", "d", "sets", "power"),
    [
        ("fixed", 150, 40, 40, 0.6),
        ("gaussian", 150, 40, 40, 0.6),
        pytest.param("gaussian", 120, 160, 40, 0.6, marks=pytest.mark.slow),
        ("classes", 400, 20, 12, 0.8),
        ("times", 400, 20, 12, 0.8),
    ],
)
def test_share_of_false_features_keeps_the_limit_over_many_data_sets(model, n, d, sets, power):
    shares, found = [], []
    for seed in range(sets):
        estimator, X, y, true, options = _drawn(model, n, d, np.random.default_rng(seed))
        result = knockoff_filter(estimator, X, y, fdr=0.2, seed=seed, **options)
        false = np.setdiff1d(result.support, true).size
        shares.append(false / max(1, result.support.size))
        found.append((result.support.size - false) / 12)
        assert result.kind == ("fixed" if model == "fixed" else "gaussian")
    assert np.mean(shares) <= 0.2 + 3 * np.std(shares) / np.sqrt(sets)
    assert np.mean(found) > power


def test_noise_alone_gives_few_discoveries():
    any_found = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        X = rng.standard_normal((80, 20))
        any_found += knockoff_filter(SparseRegressor(), X, rng.standard_normal(80), fdr=0.2, seed=seed).support.size > 0
    assert any_found <= 40 * 0.2 + 3 * np.sqrt(40 * 0.2 * 0.8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fdr": 0.0}, "between 0 and 1"),
        ({"kind": "other"}, "kind must be"),
        ({"kind": "fixed", "rows": 15}, "at least 17 samples"),
        ({"kind": "fixed", "covariance": np.eye(8)}, "fixed knockoffs need none"),
        ({"covariance": np.eye(3)}, "shape"),
        ({"covariance": np.zeros((8, 8)) + 1.0}, "linearly dependent"),
        ({"estimator": SparseRegressor(groups=[0] * 8)}, "no groups"),
        ({"estimator": SparseRegressor(forced=[1])}, "no forced"),
        ({"estimator": SparseRegressor(lower=0)}, "no bounds"),
        ({"estimator": SparseRegressor(loss="poisson"), "kind": "fixed"}, "squared loss"),
        ({"constant": True}, "is constant"),
        ({"double": True}, "linearly dependent"),
    ],
)
def test_impossible_filters_are_refused_with_the_reason(settings, message, rng):
    X = rng.standard_normal((settings.pop("rows", 40), 8))
    if settings.pop("constant", False):
        X[:, 3] = 7.0
    if settings.pop("double", False):
        X[:, 3] = X[:, 2]
    with pytest.raises(ProblemError, match=message):
        knockoff_filter(settings.pop("estimator", SparseRegressor()), X, np.abs(X[:, 0]) + 1, **settings)


@pytest.fixture
def table(rng, tmp_path):
    X = rng.standard_normal((300, 20))
    y = X[:, :12] @ np.full(12, 0.6) + rng.standard_normal(300)
    return write_table(tmp_path / "table.csv", [*(f"c{j}" for j in range(20)), "y"], X, y), X, y


def test_command_fits_the_columns_that_the_filter_chooses(table, tmp_path):
    file, X, y = table
    output = tmp_path / "model.json"
    assert "knockoff filter (fixed)" in run("solve", file, "--select", "knockoff", "--fdr", 0.2, "-o", output)
    model = json.loads(output.read_text())
    expected = knockoff_filter(SparseRegressor(), X, y, fdr=0.2)
    assert {row["name"] for row in model["features"]} == {f"c{j}" for j in expected.support}
    assert model["k"] == expected.support.size == len(model["path"]) - 1
    assert model["knockoffs"]["statistics"]["c0"] == pytest.approx(expected.statistics[0])
    design = np.column_stack([X[:, expected.support], np.ones(300)])
    exact = np.linalg.lstsq(design, y, rcond=None)[0]
    assert model["intercept"] == pytest.approx(exact[-1], abs=1e-8)
    assert "no column stands out" in run("solve", file, "--select", "knockoff", "--fdr", 0.01)


def test_command_names_all_options_that_do_not_go_with_the_filter(table):
    file, _, _ = table
    text = refused("solve", file, "--select", "knockoff", "-k", 3, "--lower", 0, "--near", 0.1)
    for name in ("-k", "bounds", "--near"):
        assert name in text
    refused("solve", file, "--fdr", 0.2)
    refused("solve", file, "--select", "lasso")


def test_bounds_of_the_command_are_refused_together(table):
    file, _, _ = table
    with pytest.raises(DataError) as raised:
        run("solve", file, "--lower", 1, "--upper", -1, "--upper", "z=2", "--lower", "c0=x")
    for part in ("4 problems", "--lower 1", "--upper -1", "'z'", "'c0=x'"):
        assert part in str(raised.value)


def test_the_constant_feature_is_named_whatever_the_units_of_others(rng):
    X = rng.standard_normal((60, 3)) * [1.0, 1.0, 1e-20]
    X[:, 1] = 1e6 + 1e-9 * X[:, 1]
    with pytest.raises(ProblemError, match="Feature 1 is constant"):
        knockoff_filter(SparseRegressor(), X, rng.standard_normal(60))
