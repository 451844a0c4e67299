"""Cox's model and bounds on the command line, from a table to predictions."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
from regression_commands import run, write_table

from iobs import SparseCox
from iobs.data.fitted import Fitted
from iobs.errors import DataError, ModelError, SeparationWarning
from iobs.optimize.estimators.survival import baseline, concordance

NAMES = ["age", "dose", "luck", "height"]


@pytest.fixture
def patients(rng, tmp_path):
    """300 patients: the hazard rises with age and falls with the dose; ward B has twice the hazard."""
    X = rng.standard_normal((300, 4)) + np.array([60, 0, 0, 170])
    ward = rng.choice(["A", "B"], 300)
    rate = np.exp(0.8 * (X[:, 0] - 60) - 0.6 * X[:, 1] + np.log(2) * (ward == "B"))
    event, censored = rng.exponential(1 / rate), rng.exponential(2.0, 300)
    time, status = np.minimum(event, censored), (event <= censored).astype(int)
    file = tmp_path / "patients.csv"
    write_table(file, [*NAMES, "ward", "time", "status"], X, ward, time, status)
    return file, np.column_stack([X, ward == "B"]), time, status


def test_cox_model_is_that_of_the_estimator(patients, tmp_path):
    file, X, time, status = patients
    output = tmp_path / "model.json"
    run("solve", file, "--family", "cox", "--target", "time", "--event", "status", "-k", 3, "-o", output)
    report = json.loads(output.read_text())
    model = SparseCox(3).fit(X, np.column_stack([time, status]))
    names = np.array([*NAMES, "ward=B"])
    rows = {row["name"]: row for row in report["features"]}
    assert set(rows) == set(names[model.support_])
    for name, value, error in zip(names, model.coef_, model.standard_errors_, strict=True):
        if name in rows:
            assert rows[name]["coefficient"] == pytest.approx(value, rel=1e-7)
            assert rows[name]["standard_error"] == pytest.approx(error, rel=1e-6)
            assert rows[name]["hazard_ratio"] == pytest.approx(np.exp(value), rel=1e-7)
    assert report["concordance"] == pytest.approx(model.score(X, np.column_stack([time, status])))


def test_predictions_are_hazards_and_median_times(patients, tmp_path):
    file, X, time, status = patients
    output = tmp_path / "model.json"
    run("solve", file, "--target", "time", "--status", "status", "-k", 3, "-o", output)
    rows = list(csv.DictReader(io.StringIO(run("predict", output, file))))
    model = SparseCox(3).fit(X, np.column_stack([time, status]))
    hazard = np.array([float(row["log hazard ratio"]) for row in rows])
    assert hazard == pytest.approx(model.predict(X) - model.predict(X).mean(), abs=1e-6)
    for i in range(0, 300, 30):
        median = float(rows[i]["median time"])
        if np.isfinite(median):
            before = np.nextafter(median, 0)
            assert model.predict_survival(X[i : i + 1], [median])[0, 0] <= 0.5 + 1e-9
            assert model.predict_survival(X[i : i + 1], [before])[0, 0] > 0.5 - 1e-9
        else:
            assert model.predict_survival(X[i : i + 1], [time.max()])[0, 0] > 0.5


def test_table_shows_hazard_ratios_events_and_no_constant(patients):
    file, _, _, status = patients
    shown = run("solve", file, "--loss", "cox", "--target", "time", "--status", "status", "-k", "bic")
    assert "hazard ratio" in shown
    assert f"{status.sum()} events" in shown
    assert "concordance 0." in shown
    assert "(intercept)" not in shown


def test_cox_and_its_columns_need_each_other(patients):
    file = patients[0]
    with pytest.raises(DataError, match="need each other"):
        run("solve", file, "--loss", "cox", "--target", "time", "-k", 2)
    with pytest.raises(DataError, match="need each other"):
        run("solve", file, "--loss", "squared", "--target", "time", "--status", "status", "-k", 2)
    with pytest.raises(DataError, match="must be 0 or 1"):
        run("solve", file, "--target", "time", "--status", "luck", "-k", 2)
    with pytest.raises(DataError, match="must be times"):
        run("solve", file, "--target", "luck", "--status", "status", "-k", 2)


def test_damaged_baseline_is_refused(patients, tmp_path):
    output = tmp_path / "model.json"
    run("solve", patients[0], "--target", "time", "--status", "status", "-k", 1, "-o", output)
    plain = json.loads(output.read_text())["model"]
    del plain["event_times"]
    with pytest.raises(ModelError, match="damaged"):
        Fitted.of_plain(plain)


def test_baseline_and_concordance_equal_plain_loops(rng):
    times, events = np.round(rng.exponential(size=60), 1), rng.integers(0, 2, 60).astype(float)
    weights, margin = rng.uniform(0.5, 2, 60), rng.standard_normal(60)
    found, hazard = baseline(times, events, weights, margin)
    total = 0.0
    for time, value in zip(found, hazard, strict=True):
        deaths = weights[(times == time) & (events == 1)].sum()
        total += deaths / (weights * np.exp(margin))[times >= time].sum()
        assert value == pytest.approx(total)
    assert concordance(times, np.ones(60), -times) == 1.0
    assert concordance(times, np.ones(60), times) == 0.0
    counts = rng.integers(0, 4, 60)
    repeated = concordance(*(values.repeat(counts) for values in (times, events, margin)))
    assert concordance(times, events, margin, counts) == pytest.approx(repeated)


def _line(tmp_path, rng):
    X = rng.standard_normal((120, 3))
    y = 2 * X[:, 0] - 1.5 * X[:, 1] + 0.1 * X[:, 2] + 0.1 * rng.standard_normal(120)
    file = tmp_path / "line.csv"
    return write_table(file, ["a", "b", "c", "y"], X, y)


def test_coefficients_stay_within_the_bounds(tmp_path, rng):
    file = _line(tmp_path, rng)
    model = json.loads(run("solve", file, "-k", 2, "--non-negative", "--upper", "a=1.25", "--json"))
    found = {row["name"]: row for row in model["features"]}
    assert found["a"]["coefficient"] == 1.25
    assert found["a"]["standard_error"] is None
    assert set(found) == {"a", "c"}
    assert found["c"]["coefficient"] > 0
    shown = run("solve", file, "-k", 2, "--lower", "0", "--upper", "a=1.25")
    assert "at a bound, so without a standard error: a" in shown


def test_whole_categories_hold_their_bounds(tmp_path, rng):
    town = rng.choice(["A", "B", "C"], 200)
    size = rng.standard_normal(200)
    y = size - 2.0 * (town == "B") + 1.5 * (town == "C") + 0.1 * rng.standard_normal(200)
    file = tmp_path / "towns.csv"
    write_table(file, ["y", "size", "town"], y, size, town)
    model = json.loads(run("solve", file, "-k", 2, "--whole-categories", "--lower", "-1", "--json"))
    found = {row["name"]: row["coefficient"] for row in model["features"]}
    assert found["town=B"] == -1
    assert found["town=C"] > 0
    assert found["size"] == pytest.approx(1, abs=0.3)


def test_cox_with_interactions_finds_the_product_and_predicts(tmp_path, rng):
    X = rng.standard_normal((400, 3))
    margin = 0.8 * X[:, 0] - 0.7 * X[:, 1] + 0.9 * X[:, 0] * X[:, 1]
    event, censored = rng.exponential(np.exp(-margin)), rng.exponential(3.0, 400)
    file, output = tmp_path / "times.csv", tmp_path / "model.json"
    rows = np.column_stack([X, np.minimum(event, censored), event <= censored])
    write_table(file, ["a", "b", "c", "time", "status"], rows)
    settings = ["--family", "cox", "--target", "time", "--status", "status", "--interactions", "strong"]
    run("solve", file, *settings, "-k", 3, "-o", output)
    model = json.loads(output.read_text())
    found = {row["name"]: row["coefficient"] for row in model["features"]}
    assert set(found) == {"a", "b", "a:b"}
    design = np.column_stack([X[:, 0], X[:, 1], X[:, 0] * X[:, 1]])
    exact = SparseCox(3).fit(design, rows[:, 3:]).coef_
    assert [found["a"], found["b"], found["a:b"]] == pytest.approx(exact, abs=1e-6)
    predicted = list(csv.DictReader(io.StringIO(run("predict", output, file))))
    ratios = np.array([float(next(iter(row.values()))) for row in predicted])
    expected = design @ exact
    np.testing.assert_allclose(ratios, expected - expected.mean(), atol=1e-5)
    run("solve", file, *settings, "-k", "bic", "-o", output)
    assert {"a", "b", "a:b"} <= {row["name"] for row in json.loads(output.read_text())["features"]}


@pytest.mark.parametrize("choice", ["cv", "ebic"])
def test_chosen_k_respects_the_bounds(tmp_path, rng, choice):
    model = json.loads(run("solve", _line(tmp_path, rng), "-k", choice, "--lower", "b=-1", "--json"))
    found = {row["name"]: row["coefficient"] for row in model["features"]}
    assert found["b"] == -1
    assert found["a"] == pytest.approx(2, abs=0.3)


def test_wrong_bounds_are_refused(tmp_path, rng):
    file = _line(tmp_path, rng)
    for options, said in [
        (["--lower", "1"], "at most 0"),
        (["--upper", "a=-1"], "at least 0"),
        (["--upper", "z=1"], "no column 'z'"),
        (["--lower", "a=low"], "needs a number"),
    ]:
        with pytest.raises(DataError, match=said):
            run("solve", file, "-k", 2, *options)


def test_a_separating_column_is_named(patients, tmp_path):
    _, X, time, status = patients
    file = tmp_path / "lost.csv"
    write_table(file, [*NAMES, "ward", "lost", "time", "status"], X, 1 - status, time, status)
    with pytest.warns(SeparationWarning, match="separated by lost: the best coefficient is infinite"):
        run("solve", file, "--target", "time", "--event", "status", "-k", 3)
