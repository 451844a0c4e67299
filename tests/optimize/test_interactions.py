"""Interactions with hierarchy against the enumeration of all models."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest
from regression_commands import column, refused, run, write_table
from sklearn.utils import get_tags

from iobs import SparseInteractions, SparseRegressor
from iobs.errors import DataError, ModelError, ProblemError
from iobs.optimize.estimators.interactions import with_products
from iobs.optimize.objectives.families import Logistic
from iobs.optimize.objectives.linear import LeastSquares
from iobs.optimize.refit.newton import refit
from iobs.optimize.search import hierarchy as search
from iobs.optimize.search.hierarchy import Hierarchy, hierarchical_path, pairs_of


def _data(seed, n=80, d=5, noise=1.0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)) + 0.5
    signal = X[:, 0] - 0.4 * X[:, 1] + 0.9 * X[:, 0] * X[:, 1] + 0.8 * X[:, 2] * X[:, 3]
    return X, signal + noise * rng.standard_normal(n)


def _obeys(kind, d, terms):
    """The rule of the hierarchy, written independently of the search."""
    pairs = list(itertools.combinations(range(d), 2))
    needed = all if kind == "strong" else any
    return all(needed(parent in terms for parent in pairs[term - d]) for term in terms if term >= d)


def _best(kind, d, k, value_of):
    terms = d + d * (d - 1) // 2
    return min(value_of(chosen) for chosen in itertools.combinations(range(terms), k) if _obeys(kind, d, chosen))


@pytest.mark.parametrize("kind", ["strong", "weak"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_model_is_the_best_of_all_with_that_hierarchy(kind, k):
    for seed in range(3):
        X, y = _data(seed)
        terms = with_products(X)
        centred, target = terms - terms.mean(axis=0), y - y.mean()

        def loss(chosen, centred=centred, target=target):
            part = centred[:, list(chosen)]
            return 0.5 * float(((part @ np.linalg.lstsq(part, target, rcond=None)[0] - target) ** 2).sum())

        model = SparseInteractions(k, hierarchy=kind).fit(X, y)
        assert model.path_[0]["loss"] == pytest.approx(_best(kind, 5, k, loss), rel=1e-9)
        assert model.support_.size == k
        assert _obeys(kind, 5, model.support_.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_search_without_enumeration_is_nearly_always_the_best(kind, monkeypatch):
    sizes = [1, 2, 3, 4, 5]
    exact, found = [], []
    for seed in range(10):
        X, y = _data(seed, noise=2.0)
        hierarchy = Hierarchy(LeastSquares(with_products(X), y, intercept=True), 5, kind)
        exact += [fit.value for fit in hierarchical_path(hierarchy, sizes)]
        with monkeypatch.context() as patch:
            patch.setattr(search, "_ENUMERATED", 0)
            found += [fit.value for fit in hierarchical_path(hierarchy, sizes, thorough=True)]
    assert (np.array(found) >= np.array(exact) * (1 - 1e-9)).all()
    assert np.mean(np.array(found) <= np.array(exact) * (1 + 1e-9)) >= 0.96


def test_logistic_model_is_the_best_of_all(rng):
    X, y = _data(3, n=120, d=4)
    objective = Logistic(with_products(X), (y > y.mean()).astype(float), ridge=0.1, intercept=True)
    fit = hierarchical_path(Hierarchy(objective, 4, "strong"), [3], thorough=True)[0]
    best = _best("strong", 4, 3, lambda chosen: refit(objective, np.array([*chosen, 10])).value)
    assert fit.value == pytest.approx(best, rel=1e-9)


def test_main_effects_that_are_forced_are_free_of_k():
    X, y = _data(4)
    objective = LeastSquares(with_products(X), y, intercept=True)
    model = SparseInteractions(1, forced=[2, 3]).fit(X, y)
    more = [0, 1, 4, 5 + pairs_of(5).tolist().index([2, 3])]
    assert model.path_[0]["loss"] == pytest.approx(min(refit(objective, np.array([2, 3, term])).value for term in more))
    assert {2, 3} < set(model.support_.tolist())
    mask = SparseInteractions(1, forced=[False, False, True, True, False], thorough=False).fit(X, y)
    assert {2, 3} < set(mask.support_.tolist())
    with pytest.raises(ProblemError, match="Forced features"):
        SparseInteractions(1, forced=[7]).fit(X, y)


def test_estimator_predicts_names_and_chooses_k():
    X, y = _data(5, n=300, noise=0.3)
    frame = pd.DataFrame(X, columns=list("abcde"))
    model = SparseInteractions("bic").fit(frame, y)
    names = np.array(model.get_term_names())
    assert set(names[model.support_]) == {"a", "b", "c", "d", "a:b", "c:d"} - (
        set() if model.k_ == 6 else {"c", "d", "c:d"}
    )
    assert model.predict(frame) == pytest.approx(with_products(X) @ model.coef_ + model.intercept_)
    assert model.score(frame, y) > 0.95
    assert "a:b" in str(model.summary())
    assert f"{model.k_} of 15 terms" in model.summary().title
    assert model.get_feature_names_out().tolist() == [
        name for name in "abcde" if name in set("".join(names[model.support_]))
    ]
    assert model.coef_[model.support_[0]] != 0
    assert np.isfinite(model.standard_errors_[model.support_]).all()
    assert SparseInteractions("cv", max_k=4, hierarchy="weak").fit(X, y).k_ <= 4


def test_wrong_settings_are_named():
    X, y = _data(6)
    with pytest.raises(ProblemError, match="hierarchy"):
        SparseInteractions(2, hierarchy="none").fit(X, y)
    with pytest.raises(ProblemError, match="between 0 and the 15"):
        SparseInteractions(16).fit(X, y)


def _table(tmp_path, rng, n=200):
    town = rng.choice(["Berlin", "Paris"], n)
    size, age, luck = rng.normal(2, 1, n), rng.normal(1, 1, n), rng.standard_normal(n)
    price = size + 0.5 * age + 2 * size * (town == "Paris") - 1.5 * size * age + 0.05 * rng.standard_normal(n)
    file = tmp_path / "prices.csv"
    return write_table(file, ["town", "size", "age", "luck", "price"], town, size, age, luck, price), price


@pytest.mark.parametrize(("kind", "k"), [("strong", 5), ("weak", 4), ("strong", "bic")])
def test_command_line_finds_and_predicts_interactions(kind, k, tmp_path, rng):
    file, price = _table(tmp_path, rng)
    output = tmp_path / "model.json"
    run("solve", file, "--target", "price", "--interactions", kind, "-k", k, "-o", output)
    found = {row["name"] for row in json.loads(output.read_text(encoding="utf8"))["features"]}
    assert {"size", "age", "size:age", "town=Paris:size"} <= found
    assert ("town=Paris" in found) == (kind == "strong")
    predicted = np.array(column(run("predict", output, file), "price"), dtype=float)
    assert predicted == pytest.approx(price, abs=0.3)
    (tmp_path / "plain.json").write_text(output.read_text(encoding="utf8").replace('"products"', '"nothing"'))
    with pytest.raises(ModelError, match="damaged"):
        run("predict", tmp_path / "plain.json", file)


def test_command_line_refuses_what_does_not_go_with_interactions(tmp_path, rng):
    file, _ = _table(tmp_path, rng)
    for options, said in [
        (["--interactions", "none"], "strong or weak"),
        (["--interactions", "strong", "--non-negative"], "no bounds"),
        (["--interactions", "weak", "--whole-categories"], "no --whole-categories"),
        (["--interactions", "strong", "--force", "size:age"], "no column 'size:age'"),
    ]:
        with pytest.raises(DataError, match=said):
            run("solve", file, "--target", "price", "-k", 2, *options)


def test_proofs_say_nothing_about_interactions(tmp_path, rng):
    file, _ = _table(tmp_path, rng)
    text = refused("solve", file, "--target", "price", "--interactions", "weak", "--certify", 1)
    assert "proves nothing" in text


def test_criterion_recovers_interactions_among_a_thousand_terms(monkeypatch):
    monkeypatch.setattr(search, "_ENUMERATED", 0)  # the models of two terms too are searched for
    rng = np.random.default_rng(0)
    X = rng.standard_normal((500, 50))
    y = X[:, 0] + X[:, 1] + X[:, 0] * X[:, 1] - X[:, 2] * X[:, 3] + 0.5 * rng.standard_normal(500)
    model = SparseInteractions("ebic", max_k=8).fit(X, y)
    names = np.array(model.get_term_names())[model.support_]
    assert names.tolist() == ["x0", "x1", "x2", "x3", "x0:x1", "x2:x3"]


def test_tags_say_that_sparse_matrices_are_refused():
    assert get_tags(SparseRegressor()).input_tags.sparse
    assert not get_tags(SparseInteractions()).input_tags.sparse
