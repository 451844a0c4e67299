"""`iobs predict`: a model from `iobs solve` predicts new tables, or says all that does not fit."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from regression_commands import column, invoked, run, write_table
from sklearn.datasets import load_wine

from iobs.cli.predict import predict
from iobs.data import fitted
from iobs.errors import DataError, ModelError, NonFiniteError, OutputError
from iobs.optimize.estimators import SparseClassifier


def _houses(file, rng, n=120, gaps=()):
    town = rng.choice(["Berlin", "Paris", "Rome"], n)
    size, rooms = rng.normal(100, 20, n), rng.integers(1, 6, n)
    price = 3 * size + 40 * rooms + 120 * (town == "Paris") + rng.standard_normal(n)
    sizes = ["" if i in gaps else str(each) for i, each in enumerate(size)]
    write_table(file, ["town", "size", "rooms", "luck", "price"], town, sizes, rooms, rng.standard_normal(n), price)
    return price


@pytest.fixture
def model(rng, tmp_path):
    _houses(tmp_path / "old.csv", rng)
    run("solve", tmp_path / "old.csv", "--target", "price", "-k", 3, "-o", tmp_path / "model.json")
    return tmp_path / "model.json"


def test_predictions_of_new_rows_are_close(model, rng, tmp_path):
    price = _houses(tmp_path / "new.csv", rng, 30)
    found = np.array(column(run("predict", model, tmp_path / "new.csv"), "price"), dtype=float)
    assert np.abs(found - price).max() < 5
    run("predict", tmp_path, tmp_path / "new.csv", "-o", tmp_path / "out.csv")  # a folder with model.json
    np.testing.assert_array_equal(np.array(column((tmp_path / "out.csv").read_text(), "price"), dtype=float), found)


def test_json_has_the_columns_of_the_csv_and_quiet_prints_nothing_else(model, rng, tmp_path):
    _houses(tmp_path / "new.csv", rng, 5)
    file = tmp_path / "out.csv"
    found = json.loads(run("predict", model, tmp_path / "new.csv", "--json", "-o", file))
    assert found == {"predictions": {"price": [float(value) for value in column(file.read_text(), "price")]}}
    line = ["predict", str(model), str(tmp_path / "new.csv"), "-o", str(file)]
    assert f"Wrote {file}" in invoked(*line).stderr
    assert invoked(*line, "--quiet").output == ""


@pytest.mark.parametrize("with_y", [True, False])
def test_new_matrix_may_lack_the_target_and_its_columns_may_be_categories(with_y, rng, tmp_path):
    X = np.column_stack([rng.normal(size=60), rng.integers(0, 3, 60)])
    y = 2 * X[:, 0] + (X[:, 1] == 1)
    np.savez(tmp_path / "old.npz", X=X, y=y, w=np.ones(60))
    file = tmp_path / "old.npz"
    run("solve", file, "--category", "x1", "--weight", "w", "-k", 2, "-o", tmp_path / "model.json")
    np.savez(tmp_path / "new.npz", X=X[:10], batch=np.ones(3), **({"y": y[:10]} if with_y else {}))
    found = np.array(column(run("predict", tmp_path / "model.json", tmp_path / "new.npz"), "y"), dtype=float)
    np.testing.assert_allclose(found, y[:10], atol=1e-6)


def test_new_table_may_lack_the_target_and_unused_columns(model, tmp_path):
    file = tmp_path / "new.csv"
    file.write_text("rooms,town,size\n2,Berlin,100\n2,Paris,100\n")
    first, second = (float(value) for value in column(run("predict", model, file), "price"))
    assert first == pytest.approx(380, abs=2)
    assert second - first == pytest.approx(120, abs=2)


def test_new_table_that_does_not_fit_is_refused_with_all_problems(model, tmp_path):
    file = tmp_path / "new.csv"
    file.write_text("town,size\nOslo,\nParis,abc\n")
    with pytest.raises(DataError) as raised:
        run("predict", model, file)
    assert "has 3 problems" in str(raised.value)
    assert "no column 'rooms'" in str(raised.value)
    assert "does not know: 'Oslo'; it knows 'Berlin', 'Paris', 'Rome'" in str(raised.value)
    assert "'size' holds text such as 'abc'" in str(raised.value)
    file.write_text("town,size,rooms\nParis,,1\n")
    with pytest.raises(NonFiniteError, match=r"'size' is missing in 1 of 1 rows .* --missing drop or"):
        run("predict", model, file)


def test_imputed_models_impute_new_rows_by_the_old_mean(rng, tmp_path):
    _houses(tmp_path / "old.csv", rng, gaps=range(0, 120, 9))
    arguments = ("--target", "price", "--missing", "mean", "-k", 4, "-o", tmp_path / "model.json")
    assert "missing values were replaced by the mean" in run("solve", tmp_path / "old.csv", *arguments)
    (tmp_path / "new.csv").write_text("town,size,rooms,luck\nParis,,2,0\n")
    assert float(column(run("predict", tmp_path / "model.json", tmp_path / "new.csv"), "price")[0]) > 0


def test_classes_are_predicted_by_name_with_probabilities(tmp_path):
    data = load_wine()
    file = tmp_path / "wine.csv"
    labels = data.target_names[data.target]
    X, names = data.data[:, :5], data.feature_names[:5]
    write_table(file, [*names, "kind"], X, labels)
    shown = run("solve", file, "--target", "kind", "-k", 3, "-o", tmp_path / "model.json", "--plot", tmp_path / "p.svg")
    assert "class_2" in shown
    found = run("predict", tmp_path / "model.json", file)
    estimator = SparseClassifier(3, ridge=1e-6).fit(X, labels)
    assert column(found, "kind") == estimator.predict(X).tolist()
    shares = np.array(column(found, "probability of class_1"), dtype=float)
    np.testing.assert_allclose(shares, estimator.predict_proba(X)[:, 1], atol=1e-6)
    chosen = run("solve", file, "--target", "kind", "-k", "bic", "--json", "--force", "ash")
    assert "ash" in json.loads(chosen)["path"][0]["features"]


def test_classes_of_minus_one_and_one_are_predicted_as_they_are_written(rng, tmp_path):
    file, X = tmp_path / "signs.csv", rng.standard_normal((60, 2))
    signs = np.where(X[:, 0] + 0.5 * rng.standard_normal(60) > 0, 1, -1)
    write_table(file, ["a", "b", "y"], X, signs)
    run("solve", file, "--loss", "logistic", "-k", 1, "-o", tmp_path / "model.json")
    found = run("predict", tmp_path / "model.json", file)
    predicted = np.array(column(found, "y"), dtype=float)
    assert set(predicted) == {-1.0, 1.0}
    assert (predicted == signs).mean() > 0.7
    assert "probability of -1" in found


def test_files_that_the_commands_read_are_not_replaced(model, rng, tmp_path):
    _houses(tmp_path / "new.csv", rng, 10)
    before = (tmp_path / "new.csv").read_text()
    for file in (tmp_path / "new.csv", model):
        with pytest.raises(OutputError, match="is read by this command"):
            run("predict", model, tmp_path / "new.csv", "-o", file)
    with pytest.raises(OutputError, match="is read by this command"):
        run("solve", tmp_path / "new.csv", "--target", "price", "-o", tmp_path / "new.csv")
    assert (tmp_path / "new.csv").read_text() == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_unfinished_predictions_are_removed(failure, model, rng, tmp_path, monkeypatch):
    def fail(found, file):
        file.write("price\n")
        file.flush()
        raise failure

    _houses(tmp_path / "new.csv", rng, 10)
    monkeypatch.setattr("iobs.cli.predict._write", fail)
    result = invoked("predict", model, tmp_path / "new.csv", "-o", tmp_path / "p.csv")
    assert result.exit_code != 0
    assert not (tmp_path / "p.csv").exists()


def test_signs_that_stdout_lacks_are_one_error(model, rng, tmp_path, monkeypatch):
    _houses(tmp_path / "new.csv", rng, 10)
    monkeypatch.setattr(fitted.Fitted, "predict", lambda *_, **__: {"größe": [1.0]})
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(OutputError, match="ascii has no 'ö'; write a file with -o"):
        predict(model=model, data=tmp_path / "new.csv", output=None, quiet=False, as_json=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not JSON"),
        ("[]", "holds no model"),
        ("{}", "no model of format"),
        ('{"format": "iobs regression 1"}', "damaged"),
    ],
)
def test_damaged_models_are_refused(text, message, tmp_path):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        run("predict", tmp_path / "model.json", tmp_path / "model.json")
    with pytest.raises(ModelError, match="Cannot read"):
        run("predict", tmp_path / "none.json", tmp_path / "model.json")


def test_model_whose_coefficients_do_not_fit_is_refused(model, tmp_path):
    plain = json.loads(model.read_text())
    plain["model"]["coefficients"] = [[1.0]]
    model.write_text(json.dumps(plain))
    with pytest.raises(ModelError, match="do not fit its columns"):
        run("predict", model, tmp_path / "old.csv")


@pytest.mark.parametrize(
    ("loss", "parts", "message"),
    [
        ("logistic", {"classes": ["a", "b", "c"]}, "do not fit its classes"),
        ("cox", {"event_times": [1.0, 2.0], "cumulative_hazard": [0.1]}, "does not fit its times"),
    ],
)
def test_model_whose_parts_do_not_fit_each_other_is_refused(loss, parts, message):
    column = {"name": "x", "levels": [], "fill": None}
    plain = {"format": fitted.FORMAT, "target": "y", "loss": loss, "classes": [], "codings": [column], **parts}
    with pytest.raises(ModelError, match=message):
        fitted.Fitted.of_plain({**plain, "coefficients": [[1.0]], "constants": [0.0]})


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_missing_values_of_new_rows_take_the_means_or_have_no_prediction(loss, tmp_path):
    file, new = tmp_path / "old.csv", tmp_path / "new.csv"
    answers = [1.0, 2, 3, 10, 5, 6] if loss == "squared" else list("nnynyy")
    write_table(file, ["town", "size", "y"], list("aababb"), [0, 1, 2, 3, 4, 5], answers)
    run("solve", file, "--ridge", 0.1, "-k", 2, "-o", tmp_path / "model.json")
    new.write_text("town,size\na,\n,2\nb,1\na,2.5\n")
    name = "y" if loss == "squared" else "probability of y"
    with pytest.raises(NonFiniteError, match="--missing drop or --missing mean"):
        run("predict", tmp_path / "model.json", new)
    dropped = json.loads(run("predict", tmp_path / "model.json", new, "--missing", "drop", "--json"))["predictions"]
    filled = json.loads(run("predict", tmp_path / "model.json", new, "--missing", "mean", "--json"))["predictions"]
    assert dropped[name][:2] == [None, None]
    assert dropped[name][2:] == filled[name][2:]
    assert filled[name][0] == filled[name][3]  # the mean of the sizes is 2.5
    model = fitted.Fitted.load(tmp_path / "model.json")
    assert model.design(new, "mean")[1].tolist() == [0.5, 2.0]  # half of the towns are b
