"""Interface of the estimators: names in and out, selection, the table of coefficients, the figure."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, load_wine
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from iobs.errors import ProblemError
from iobs.optimize.estimators import SparseClassifier, SparseRegressor

NAMES = load_diabetes().feature_names


def _frame(library, X, names):
    module = pytest.importorskip(library)
    return module.DataFrame({name: X[:, j] for j, name in enumerate(names)})


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_names_go_in_and_come_out(library):
    X, y = load_diabetes(return_X_y=True)
    frame = _frame(library, X, NAMES)
    series = pytest.importorskip(library).Series(y)
    model = SparseRegressor(3).fit(frame, series)
    plain = SparseRegressor(3).fit(X, y)
    np.testing.assert_allclose(model.coef_, plain.coef_)
    assert model.get_feature_names_out().tolist() == ["bmi", "bp", "s5"]
    assert plain.get_feature_names_out(NAMES).tolist() == ["bmi", "bp", "s5"]
    assert model.get_support(indices=True).tolist() == model.support_.tolist()
    chosen = model.set_output(transform=library).transform(frame)
    assert list(chosen.columns) == ["bmi", "bp", "s5"]
    np.testing.assert_array_equal(np.asarray(chosen), X[:, model.support_])
    np.testing.assert_allclose(model.predict(frame), plain.predict(X))


def test_selector_works_in_pipelines_and_searches():
    X, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), SparseRegressor(4), LinearRegression()).fit(X, y)
    assert pipeline.score(X, y) == pytest.approx(SparseRegressor(4).fit(X, y).score(X, y), abs=1e-6)
    search = GridSearchCV(SparseRegressor(), {"k": [1, 3, 5]}, cv=3).fit(X, y)
    assert search.best_params_["k"] > 1
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()


def test_summary_has_the_errors_of_a_regression_on_the_chosen_features():
    X, y = load_diabetes(return_X_y=True)
    model = SparseRegressor(3).fit(X, y)
    design = np.column_stack([X[:, model.support_], np.ones(len(y))])
    left = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    expected = np.sqrt(left @ left / (len(y) - 4) * np.linalg.inv(design.T @ design).diagonal())[:3]
    np.testing.assert_allclose(model.standard_errors_[model.support_], expected, rtol=1e-8)
    rows = model.summary().rows
    assert [row.name for row in rows] == ["x2", "x3", "x8", "(intercept)"]
    np.testing.assert_allclose([row.z for row in rows[:3]], model.coef_[model.support_] / expected)


def test_summary_prints_text_html_and_a_frame():
    X, y = load_diabetes(return_X_y=True)
    table = SparseRegressor("bic").fit(_frame("pandas", X, ["<b>", *NAMES[1:]]), y).summary()
    text = str(table)
    assert "chosen by bic" in text
    assert "too small" in text
    assert "(intercept)" in text
    assert "e+" not in text  # 240 is easier to read than 2.4e+02
    assert len({len(line) for line in text.splitlines() if line.startswith("--")}) == 1
    assert "<b>" not in table._repr_html_()
    assert "<table>" in table._repr_html_()
    assert list(table.to_frame().columns) == ["feature", "coefficient", "standard_error", "z"]


def test_classifier_of_text_labels_has_names_and_errors_for_every_class():
    X, numbers = load_iris(return_X_y=True)
    labels = load_iris().target_names[numbers]
    model = SparseClassifier(2).fit(X, labels)
    assert model.score(X, labels) > 0.93
    assert set(model.predict(X[:5])) == {"setosa"}
    rows = model.summary().rows
    assert [row.label for row in rows[::3]] == ["setosa", "versicolor", "virginica"]
    assert all(0 < row.error < 50 for row in rows if row.name != "(intercept)")


@pytest.mark.parametrize("k", ["cv", "ebic"])
@pytest.mark.parametrize("classes", [0, 3])
def test_plot_path_marks_the_chosen_k_on_an_axis_of_integers(k, classes):
    X, y = load_wine(return_X_y=True) if classes else load_diabetes(return_X_y=True)
    model = (SparseClassifier if classes else SparseRegressor)(k, max_k=3, cv=3).fit(X[:, :8], y)
    figure = model.plot_path()
    assert figure._repr_png_().startswith(b"\x89PNG")
    left, right = figure.axes
    assert all(float(tick).is_integer() for tick in left.get_xticks())
    assert [text.get_text() for text in left.get_legend().get_texts()][-1] == f"chosen: k = {model.k_}"
    names = [text.get_text() for text in right.get_legend().get_texts()]
    assert sorted(names) == sorted(model.get_feature_names_out())
    finite = [np.isfinite(entry["score_error"]) for entry in model.path_]
    assert all(finite) == any(finite) == (k == "cv")
    assert bool(left.containers) == (k == "cv")


def test_cross_validation_errors_are_those_of_the_folds(rng):
    X = rng.standard_normal((60, 4))
    y = X[:, 1] + rng.standard_normal(60)
    model = SparseRegressor("cv", cv=3, max_k=1).fit(X, y)
    losses = []
    for fold in np.split(np.arange(60), 3):
        rest = np.setdiff1d(np.arange(60), fold)
        losses.append(np.mean((y[fold] - SparseRegressor(1).fit(X[rest], y[rest]).predict(X[fold])) ** 2))
    assert model.path_[1]["score"] == pytest.approx(np.mean(losses))
    assert model.path_[1]["score_error"] == pytest.approx(np.std(losses, ddof=1) / np.sqrt(3))


def test_plot_path_needs_a_path():
    X, y = load_diabetes(return_X_y=True)
    with pytest.raises(ProblemError, match="no path for a given k"):
        SparseRegressor(3).fit(X, y).plot_path()
