"""Risk scores against enumeration of all columns and points."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import minimize as scipy_minimize
from sklearn.utils.estimator_checks import check_estimator

import iobs
from iobs.errors import ProblemError


def _loss(X, y, points, ridge, scale):
    """The least loss of a card, by scipy; infinite if it is the card of smaller points at a larger scale."""
    total = X @ points

    def value(v):
        margin = v[1] + v[0] * total
        return np.logaddexp(0, margin).sum() - y @ margin + 0.5 * ridge * v[0] ** 2 * float(points @ points)

    found = scipy_minimize(value, [0.1, 0.0], bounds=[(0, scale), (None, None)], method="L-BFGS-B", tol=1e-14)
    factor = np.gcd.reduce(points)
    smaller = factor > 1 and factor * found.x[0] <= scale * (1 + 1e-6)
    return found.fun if found.x[0] > 1e-6 and not smaller else np.inf


def _check(seed):
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(30, 150)), int(rng.integers(3, 6))
    k, most = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    least = 0 if rng.random() < 0.3 else -most
    X = (rng.random((n, d)) < 0.4).astype(float) if seed % 2 else rng.standard_normal((n, d))
    y = (rng.random(n) < 1 / (1 + np.exp(-X @ rng.standard_normal(d) * 1.5 + 0.3))).astype(float)
    y[:2] = 0, 1
    count, scale, ridge = int(rng.choice([1, 4])), float(rng.choice([0.2, 1.0])), float(rng.choice([0.0, 1e-3]))
    found = iobs.RiskScore(k, lower=least, upper=most, cards=count, scale=scale, ridge=ridge).fit(X, y)
    losses = [
        _loss(X, y, np.array(points), ridge, scale)
        for points in itertools.product(range(least, most + 1), repeat=d)
        if 0 < np.count_nonzero(points) <= k
    ]
    best = sorted(loss for loss in losses if np.isfinite(loss))[:count]
    if not best:
        assert not found.support_.size
        return
    assert found.gap_ == 0, seed
    assert found.complete_, seed
    assert [card.loss for card in found.cards_[: len(best)]] == pytest.approx(best, rel=1e-6), seed
    assert found.support_.size <= k
    assert least <= found.points_.min() <= found.points_.max() <= most


_BATCHES = [pytest.param(range(start, start + 50), marks=pytest.mark.slow) for start in range(0, 300, 50)]


@pytest.mark.parametrize("seeds", [*(range(start, start + 2) for start in range(500, 512, 2)), *_BATCHES])
def test_the_best_cards_equal_enumeration(seeds):
    for seed in seeds:
        _check(seed)


@pytest.fixture(scope="module")
def patients():
    rng = np.random.default_rng(0)
    X = (rng.random((300, 12)) < 0.4).astype(float)
    y = np.where(rng.random(300) < 1 / (1 + np.exp(2 - X[:, :3] @ [2.0, 1.0, 1.0])), "ill", "well")
    return X, y


def test_the_card_prints_and_its_probabilities_are_calibrated(patients):
    X, y = patients
    found = iobs.RiskScore(3, cards=5).fit(X, y)
    assert found.classes_.tolist() == ["ill", "well"]
    assert found.gap_ == 0
    assert "proved to be the best" in found.message_
    assert found.predict_proba(X)[:, 1].mean() == pytest.approx((y == "well").mean(), abs=1e-6)
    np.testing.assert_allclose(found.card_.risk(found.total(X)), found.predict_proba(X)[:, 1])
    text = str(found.card_)
    assert "risk of well" in text
    assert all(f"x{j}" in text for j in found.support_)
    assert len(found.cards_) == 5
    assert [card.loss for card in found.cards_] == sorted(card.loss for card in found.cards_)
    assert found.card_.plot()._repr_png_().startswith(b"\x89PNG")
    assert set(found.predict(X)) <= {"ill", "well"}


def test_a_time_limit_leaves_a_gap(patients):
    X, y = patients
    found = iobs.RiskScore(5, seconds=0.0).fit(X, y)
    assert found.gap_ > 0
    assert not found.complete_
    assert "time limit" in found.message_


def test_columns_that_say_nothing_get_no_points():
    found = iobs.RiskScore(1).fit(np.array([[0.0], [1.0], [0.0], [1.0]]), [0, 0, 1, 1])
    assert not found.support_.size
    assert found.predict_proba([[1.0]])[0] == pytest.approx([0.5, 0.5])
    assert "total" in str(found.card_)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k must be"),
        ({"lower": 1}, "lower must be .* at most 0"),
        ({"upper": 0.5}, "upper must be a whole number"),
        ({"ridge": -1.0}, "ridge must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"cards": 0}, "cards must be"),
        ({"seconds": -1.0}, "numbers of at least 0"),
    ],
)
def test_invalid_settings_are_refused(settings, message, patients):
    with pytest.raises(ProblemError, match=message):
        iobs.RiskScore(**settings).fit(*patients)


def test_three_classes_are_refused(patients):
    with pytest.raises(ProblemError, match="two classes"):
        iobs.RiskScore().fit(patients[0], np.arange(300) % 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_risk_score_is_an_estimator_of_scikit_learn():
    check_estimator(iobs.RiskScore(2, upper=2, lower=-2, gap=0.05, seconds=5.0))


def test_points_with_a_common_factor_are_a_card_where_the_scale_is_at_its_limit():
    rng = np.random.default_rng(0)
    X = (rng.random((200, 2)) < 0.5).astype(float)
    y = rng.random(200) < 1 / (1 + np.exp(-(4 * X[:, 0] - 2)))
    found = iobs.RiskScore(1, scale=0.5).fit(X, y)
    assert found.points_.tolist() == [5, 0]
    assert found.gap_ == 0
    assert found.card_.loss == pytest.approx(_loss(X, y, np.array([5, 0]), 1e-3, 0.5))


@pytest.mark.parametrize("seed", range(6))
def test_the_gap_is_that_to_the_best_card(seed):
    rng = np.random.default_rng(seed)
    X = (rng.random((60, 4)) < 0.5).astype(float)
    y = rng.random(60) < 1 / (1 + np.exp(-X @ rng.standard_normal(4)))
    best = iobs.RiskScore(2, lower=-2, upper=2).fit(X, y)
    near = iobs.RiskScore(2, lower=-2, upper=2, gap=0.1).fit(X, y)
    assert near.card_.loss * (1 - near.gap_) <= best.card_.loss * (1 + 1e-9)


def test_constant_columns_get_no_points():
    X = np.column_stack([np.ones(40), np.arange(40) % 2])
    found = iobs.RiskScore(2).fit(X, (np.arange(40) % 2) & (np.arange(40) > 4))
    assert found.support_.tolist() == [1]


@pytest.mark.parametrize(
    "settings",
    [{"lower": -np.inf}, {"upper": 1e30}, {"lower": [0, 1]}, {"upper": "a"}, {"lower": None}, {"gap": "a"}],
    ids=str,
)
def test_wrong_limits_are_one_error(settings):
    with pytest.raises(ProblemError, match=f"{next(iter(settings))}.* must be"):
        iobs.RiskScore(1, **settings).fit(np.eye(30), np.arange(30) % 2)
