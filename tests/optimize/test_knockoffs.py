"""The knockoff filter: its correlations, its limit on false discoveries over fixed seeds, and the command."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import typer
from sparse_problems import correlated_design
from typer.testing import CliRunner

from iobs import SparseClassifier, SparseCox, SparseRegressor, knockoff_filter
from iobs.cli.solve import solve
from iobs.errors import DataError, ProblemError
from iobs.optimize.estimators import knockoffs

app = typer.Typer()
app.command()(solve)


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


@pytest.mark.parametrize(
    ("kind", "n", "d"),
    [("fixed", 150, 40), ("gaussian", 150, 40), pytest.param("gaussian", 120, 160, marks=pytest.mark.slow)],
)
def test_share_of_false_features_keeps_the_limit_over_many_data_sets(kind, n, d):
    shares, found = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        X = rng.multivariate_normal(np.zeros(d), _autoregressive(d, 0.3), n)
        true = rng.choice(d, 12, replace=False)
        y = X[:, true] @ rng.choice([-0.6, 0.6], 12) + rng.standard_normal(n)
        covariance = _autoregressive(d, 0.3) if kind == "gaussian" else None
        result = knockoff_filter(SparseRegressor(), X, y, fdr=0.2, kind=kind, covariance=covariance, seed=seed)
        false = np.setdiff1d(result.support, true).size
        shares.append(false / max(1, result.support.size))
        found.append((result.support.size - false) / 12)
        assert result.kind == kind
    assert np.mean(shares) <= 0.2 + 3 * np.std(shares) / np.sqrt(40)
    assert np.mean(found) > 0.6


@pytest.mark.parametrize("model", ["classes", "times"])
def test_other_losses_keep_the_limit(model):
    shares, found = [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        X = rng.standard_normal((400, 20))
        margin = X[:, :12] @ rng.choice([-0.9, 0.9], 12)
        if model == "classes":
            estimator = SparseClassifier(max_k=24)
            y = np.where(rng.random(400) < 1 / (1 + np.exp(-margin)), "yes", "no")
        else:
            estimator = SparseCox(max_k=24)
            y = np.column_stack([rng.exponential(np.exp(-margin)), np.ones(400)])
        result = knockoff_filter(estimator, X, y, fdr=0.2, seed=seed)
        assert result.kind == "gaussian"
        false = np.setdiff1d(result.support, np.arange(12)).size
        shares.append(false / max(1, result.support.size))
        found.append((result.support.size - false) / 12)
    assert np.mean(shares) <= 0.2 + 3 * np.std(shares) / np.sqrt(12)
    assert np.mean(found) > 0.8


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
    file = tmp_path / "table.csv"
    with file.open("w", newline="", encoding="utf8") as out:
        writer = csv.writer(out)
        writer.writerow([*(f"c{j}" for j in range(20)), "y"])
        writer.writerows(np.column_stack([X, y]).tolist())
    return file, X, y


def test_command_fits_the_columns_that_the_filter_chooses(table, tmp_path):
    file, X, y = table
    output = tmp_path / "model.json"
    done = CliRunner().invoke(app, [str(file), "--select", "knockoff", "--fdr", "0.2", "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert "knockoff filter (fixed)" in done.stdout
    model = json.loads(output.read_text())
    expected = knockoff_filter(SparseRegressor(), X, y, fdr=0.2)
    assert {row["name"] for row in model["features"]} == {f"c{j}" for j in expected.support}
    assert model["k"] == expected.support.size == len(model["path"]) - 1
    assert model["knockoffs"]["statistics"]["c0"] == pytest.approx(expected.statistics[0])
    design = np.column_stack([X[:, expected.support], np.ones(300)])
    exact = np.linalg.lstsq(design, y, rcond=None)[0]
    assert model["intercept"] == pytest.approx(exact[-1], abs=1e-8)
    strict = CliRunner().invoke(app, [str(file), "--select", "knockoff", "--fdr", "0.01"])
    assert "no column stands out" in strict.stdout


def test_command_names_all_options_that_do_not_go_with_the_filter(table):
    file, _, _ = table
    told = CliRunner().invoke(app, [str(file), "--select", "knockoff", "-k", "3", "--lower", "0", "--near", "0.1"])
    assert told.exit_code == 2
    for name in ("-k", "bounds", "--near"):
        assert name in told.output
    assert CliRunner().invoke(app, [str(file), "--fdr", "0.2"]).exit_code == 2
    assert CliRunner().invoke(app, [str(file), "--select", "lasso"]).exit_code == 2


def test_bounds_of_the_command_are_refused_together(table):
    file, _, _ = table
    refused = CliRunner().invoke(app, [str(file), "--lower", "1", "--upper", "-1", "--upper", "z=2", "--lower", "c0=x"])
    assert isinstance(refused.exception, DataError)
    for part in ("4 problems", "--lower 1", "--upper -1", "'z'", "'c0=x'"):
        assert part in str(refused.exception)


def test_the_constant_feature_is_named_whatever_the_units_of_others(rng):
    X = rng.standard_normal((60, 3)) * [1.0, 1.0, 1e-20]
    X[:, 1] = 1e6 + 1e-9 * X[:, 1]
    with pytest.raises(ProblemError, match="Feature 1 is constant"):
        knockoff_filter(SparseRegressor(), X, rng.standard_normal(60))
