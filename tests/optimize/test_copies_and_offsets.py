"""Equal columns count once; the origin of an offset moves the intercept only; weights count rows; folds have events."""

import numpy as np
import pytest
from sklearn.model_selection import KFold, StratifiedGroupKFold

import iobs
from iobs import objectives
from iobs.errors import ProblemError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4))
MARGIN = X[:, 0] - 0.5 * X[:, 1]
OFFSET = RNG.normal(size=120)
TARGETS = {
    objectives.LeastSquares: MARGIN + RNG.normal(size=120),
    objectives.Logistic: (RNG.random(120) < 1 / (1 + np.exp(-MARGIN))) * 1.0,
    objectives.Poisson: RNG.poisson(np.exp(MARGIN)) * 1.0,
    objectives.Gamma: RNG.gamma(2, np.exp(MARGIN) / 2),
    objectives.Tweedie: RNG.poisson(np.exp(MARGIN)) * RNG.gamma(2, 1, 120),
    objectives.NegativeBinomial: RNG.poisson(np.exp(MARGIN)) * 1.0,
}
TIMES, EVENTS = np.ceil(8 * RNG.exponential(np.exp(-MARGIN))), (RNG.random(120) < 0.7) * 1.0
SURVIVAL = np.c_[TIMES, EVENTS]
CASES = pytest.mark.parametrize("family", TARGETS, ids=lambda family: family.__name__)


@pytest.mark.parametrize("copy", [X[:, 1], -3 * X[:, 1] + 5], ids=["equal", "a multiple"])
@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        (iobs.SparseRegressor(5), TARGETS[objectives.LeastSquares]),
        (iobs.SparseRegressor("ebic", max_k=5), TARGETS[objectives.LeastSquares]),
        (iobs.SparseRegressor(5, loss="poisson"), TARGETS[objectives.Poisson]),
        (iobs.SparseClassifier(5), TARGETS[objectives.Logistic]),
        (iobs.SparseClassifier(5), np.digitize(MARGIN + RNG.normal(size=120), [-0.5, 0.5])),
        (iobs.SparseMultiTaskRegressor(5), np.c_[MARGIN, -MARGIN] + RNG.normal(size=(120, 2))),
        (iobs.SparseCox(5), SURVIVAL),
    ],
    ids=["squares", "path", "poisson", "logistic", "multinomial", "responses", "cox"],
)
def test_equal_columns_count_once(estimator, target, copy):
    fitted = estimator.fit(np.c_[X, copy], target)
    assert 4 not in fitted.support_
    assert all(4 not in entry["support"] for entry in fitted.path_)
    assert np.nanmax(fitted.standard_errors_) < 10


def test_of_equal_columns_the_forced_one_stays_and_bounds_tell_multiples_apart():
    y = TARGETS[objectives.LeastSquares]
    fitted = iobs.SparseRegressor(3, forced=[4]).fit(np.c_[X, X[:, 1]], y)
    assert fitted.support_.tolist() == [0, 2, 3, 4]
    opposite = iobs.SparseRegressor(2, lower=0.0).fit(np.c_[X, -X[:, 1]], y)
    assert opposite.support_.tolist() == [0, 4]


@pytest.mark.parametrize("settings", [{"k": 4}, {"k": "cv"}, {"k": 4, "groups": np.arange(5)}])
@pytest.mark.parametrize(
    ("factor", "limits", "used"),
    [
        (2.0, {"lower": 0.0}, [0, 3]),  # what both can do one can do
        (2.0, {"lower": 0.0, "upper": [np.inf, 1, np.inf, 0.1, np.inf]}, [0, 4]),  # the one without an upper bound
        (2.0, {"lower": 0.0, "upper": 0.1}, [0, 3, 4]),  # both reach further than one
        (-2.0, {"lower": 0.0}, [0, 3]),  # the other one would have the wrong sign
    ],
)
def test_within_bounds_multiples_of_a_column_count_once_where_one_can_replace_the_other(settings, factor, limits, used):
    column = -X[:, 1]
    features = np.c_[X[:, 0], X[:, 2:], column, factor * column]
    y = X[:, 0] + column + 0.1 * np.random.default_rng(1).normal(size=120)
    fitted = iobs.SparseRegressor(**settings, **limits).fit(features, y)
    assert [j for j in fitted.support_ if j in (0, 3, 4)] == used


def test_minimize_counts_copies_once():
    y = TARGETS[objectives.LeastSquares]
    assert iobs.minimize(objectives.LeastSquares(np.c_[X, X[:, 1]], y), 5).support.tolist() == [0, 1, 2, 3]


@CASES
@pytest.mark.parametrize("origin", [80.0, -500.0, 1e4])
def test_the_origin_of_an_offset_moves_the_intercept_only(family, origin):
    y = TARGETS[family]
    near, far = (iobs.minimize(family(X, y, intercept=True, offset=OFFSET + shift), 2) for shift in (0.0, origin))
    np.testing.assert_array_equal(near.support, far.support)
    np.testing.assert_allclose(far.theta, near.theta, atol=1e-9)
    assert far.intercept + origin == pytest.approx(near.intercept, abs=1e-8)


@CASES
def test_whole_weights_count_rows(family):
    y, weights = TARGETS[family], RNG.integers(0, 4, 120)
    rows = np.repeat(np.arange(120), weights)
    weighted = iobs.minimize(family(X, y, intercept=True, offset=OFFSET, sample_weight=weights), 2)
    repeated = iobs.minimize(family(X[rows], y[rows], intercept=True, offset=OFFSET[rows]), 2)
    np.testing.assert_allclose(weighted.theta, repeated.theta, atol=1e-9)
    assert weighted.loss == pytest.approx(repeated.loss)


def test_whole_weights_count_rows_with_the_ties_of_breslow_and_not_of_efron():
    weights = RNG.integers(1, 4, 120)
    rows = np.repeat(np.arange(120), weights)
    for ties in ("breslow", "efron"):
        weighted = iobs.SparseCox(2, ties=ties).fit(X, SURVIVAL, weights)
        repeated = iobs.SparseCox(2, ties=ties).fit(X[rows], SURVIVAL[rows])
        assert np.allclose(weighted.coef_, repeated.coef_, atol=1e-8) == (ties == "breslow")
    assert "do not equal repeated rows" in iobs.SparseCox.__doc__


def test_folds_of_cox_have_the_same_share_of_events():
    events = np.arange(120) < 24  # sorted by status: the first of five folds in order would hold all events
    assert np.isfinite([entry["score"] for entry in iobs.SparseCox("cv").fit(X, np.c_[TIMES, events]).path_]).all()
    with pytest.raises(ProblemError, match="outside fold 1 of the cross-validation: Cox needs events"):
        iobs.SparseCox("cv", cv=KFold(5)).fit(X, np.c_[TIMES, events])


def test_folds_of_people_have_events_too():
    people = np.repeat(np.arange(24), 5)
    events = people < 8  # folds of whole people in their order: only two of five would hold events
    folds = iobs.SparseCox("cv").fit(X, np.c_[TIMES, events], sample_groups=people)
    given = [*StratifiedGroupKFold(5).split(X, events, people)]
    assert all(events[test].any() for _, test in given)
    again = iobs.SparseCox("cv", cv=given).fit(X, np.c_[TIMES, events])
    assert [entry["score"] for entry in folds.path_] == [entry["score"] for entry in again.path_]


@pytest.mark.parametrize(
    "fit",
    [
        lambda X, y: iobs.SparseRegressor(4).fit(X, y),
        lambda X, y: iobs.SparseRegressor(4, loss="poisson").fit(X, np.floor(np.exp(y / 2))),
        lambda X, y: iobs.SparseClassifier(4, ridge=0.0).fit(X, np.sin(9 * y) > 0),
        lambda X, y: iobs.SparseCox(4).fit(X, np.c_[np.exp(-y), np.ones(len(y))]),
    ],
    ids=["squared", "poisson", "logistic", "cox"],
)
def test_a_sum_of_columns_beside_them_is_not_taken(rng, fit):
    first, second, third = rng.standard_normal((3, 120))
    y = 2 * first - second + 0.5 * rng.standard_normal(120)
    model = fit(np.c_[first, second, third, first + second], y)
    assert model.support_.tolist() == [0, 1, 2]
    assert np.nanmax(model.standard_errors_) < 10
    assert iobs.SparseRegressor(4, ridge=0.1).fit(np.c_[first, second, third, first + second], y).support_.size == 4
