"""Coefficients without a finite best value carry a warning that names their columns; finite ones carry none."""

import warnings

import numpy as np
import pytest

import iobs
from iobs.errors import SeparationWarning

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3))
TIMES, EVENTS = RNG.exponential(np.exp(-X[:, 0])), (RNG.random(200) < 0.7).astype(float)
SURVIVAL, CENSORED = np.c_[TIMES, EVENTS], np.c_[X, 1 - EVENTS]
LEVELS = np.eye(4)[RNG.integers(0, 4, 200)][:, 1:]
COUNTS = np.where(LEVELS[:, 2] == 1, 0, RNG.poisson(3, 200)) * 1.0
CLASSES = np.digitize(X[:, 1], [-0.5, 0.5])


@pytest.mark.parametrize(
    ("fit", "name"),
    [
        (lambda: iobs.SparseCox(2).fit(CENSORED, SURVIVAL), "x3"),
        (lambda: iobs.minimize(iobs.objectives.Cox(CENSORED, TIMES, EVENTS), 4), "column 3"),
        (lambda: iobs.SparseRegressor(3, loss="poisson").fit(LEVELS, COUNTS), "x2"),
        (lambda: iobs.SparseRegressor(3, loss="negative_binomial").fit(LEVELS, COUNTS), "x2"),
        (lambda: iobs.SparseRegressor(3, loss="tweedie").fit(LEVELS, COUNTS), "x2"),
        (lambda: iobs.SparseClassifier(1, ridge=0.0).fit(X, X[:, 1] > 0), "x1"),
        (lambda: iobs.SparseClassifier(1, ridge=0.0).fit(X, CLASSES), "x1"),
        (lambda: iobs.SparseClassifier(2, ridge=0.0).fit(X, X[:, 1] - X[:, 2] > 0), "x1, x2"),
        (lambda: iobs.SparseCox(1).fit(X, np.c_[np.argsort(np.argsort(-X[:, 0])) + 1.0, np.ones(200)]), "x0"),
    ],
    ids=[
        "cox",
        "minimize",
        "poisson",
        "negative binomial",
        "tweedie",
        "logistic",
        "multinomial",
        "two columns",
        "order",
    ],
)
def test_separating_columns_are_named(fit, name):
    with pytest.warns(SeparationWarning, match=f"separated by {name}: .* or give a ridge"):
        fit()


@pytest.mark.parametrize(
    "fit",
    [
        lambda: iobs.SparseCox(2, ridge=0.01).fit(CENSORED, SURVIVAL),
        lambda: iobs.SparseClassifier(1).fit(X, X[:, 1] > 0),
        lambda: iobs.SparseClassifier(1).fit(X, CLASSES),
        lambda: iobs.SparseCox(2, lower=-0.1, upper=0.1).fit(X, SURVIVAL),
        lambda: iobs.SparseRegressor(2, loss="poisson", upper=0.01).fit(X, COUNTS),
        lambda: iobs.SparseClassifier(2, ridge=0.0).fit(X, X[:, 1] + 0.2 * X[:, 2] ** 3 > 0.1),
        lambda: iobs.SparseRegressor(3, loss="poisson").fit(LEVELS, np.exp(LEVELS @ [1.0, -9.0, 5.0])),
        lambda: iobs.SparseRegressor(2, loss="poisson").fit(X, np.exp(X @ [5.0, -4.0, 0.0])),
        lambda: iobs.SparseRegressor(2, loss="gamma").fit(X, np.exp(X @ [5.0, -4.0, 0.0])),
    ],
    ids=["cox", "logistic", "multinomial", "at bounds", "at a bound", "hardly", "rare counts", "noiseless", "gamma"],
)
def test_finite_coefficients_carry_no_warning(fit):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit()


@pytest.mark.parametrize("seed", [1, 5])
def test_cross_validation_with_a_separating_column_ends(seed):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(200, 6))
    times, events = rng.exponential(np.exp(-features[:, 0])), (rng.random(200) < 0.7).astype(int)
    with pytest.warns(SeparationWarning, match="x6"):
        fitted = iobs.SparseCox("cv").fit(np.c_[features, 1 - events], np.c_[times, events])
    assert 6 in fitted.support_
