"""`iobs solve`: input files, its table, JSON and figure, and its errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from regression_commands import column, refused, run, write_table

from iobs.data import tables
from iobs.data.tables import read_table
from iobs.errors import DataError, IOBSError, OtherRunError, OutputError
from iobs.optimize.estimators import SparseClassifier


@pytest.fixture
def numbers(rng):
    X = rng.standard_normal((80, 6))
    return X, 2 * X[:, 1] - 3 * X[:, 4] + 5 + 0.1 * rng.standard_normal(80)


def _csv(file, X, y, names=None):
    return write_table(file, [*(names or [f"c{j}" for j in range(X.shape[1])]), "price"], X, y)


@pytest.mark.parametrize("kind", ["csv", "tsv", "npz", "npz columns", "parquet", "csv by pandas"])
def test_solve_does_not_depend_on_the_file_format(kind, numbers, tmp_path, monkeypatch):
    X, y = numbers
    columns = {f"c{j}": X[:, j] for j in range(6)}
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        file = tmp_path / "t.parquet"
        parquet.write_table(pyarrow.table({**columns, "price": y}), file)
    elif kind.startswith("npz"):
        file = tmp_path / "t.npz"
        np.savez(file, **({"X": X, "y": y} if kind == "npz" else {**columns, "price": y}))
    else:
        file = _csv(tmp_path / f"t.{kind[:3]}", X, y)
        if kind == "tsv":
            file.write_text(file.read_text().replace(",", "\t"))
    if "pandas" in kind:
        monkeypatch.setattr(tables, "_SMALL", 0)
    model = json.loads(run("solve", file, "--target", "y" if kind == "npz" else "price", "-k", 2, "--json"))
    assert {row["name"][-1] for row in model["features"]} == {"1", "4"}
    assert model["intercept"] == pytest.approx(5, abs=0.1)
    assert 0.005 < model["features"][0]["standard_error"] < 0.02


def test_solve_writes_table_json_and_picture(numbers, tmp_path):
    file = _csv(tmp_path / "t.csv", *numbers)
    text = run(
        "solve", file, "--target", "price", "-o", tmp_path / "m.json", "--plot", tmp_path / "p.png", "--certify", 5
    )
    assert "c4" in text
    assert "standard error" in text
    assert "global minimiser" in text
    assert json.loads((tmp_path / "m.json").read_text())["k"] == 2
    assert (tmp_path / "p.png").stat().st_size > 1000
    forced = run("solve", file, "--target", "price", "-k", 1, "--force", "c0", "--drop", "c4")
    assert "c0" in forced
    assert "c4" not in forced


@pytest.mark.filterwarnings("ignore::iobs.errors.SeparationWarning")
@pytest.mark.parametrize("k", ["cv", 1])
def test_solve_treats_text_targets_as_classes(k, numbers, tmp_path):
    X, _ = numbers
    file = _csv(tmp_path / "t.csv", X, np.where(X[:, 3] > 0, "yes", "no"))
    text = run("solve", file, "--target", "price", "-k", k)
    assert "c3" in text
    assert "'yes' against 'no'" in text


@pytest.mark.parametrize("loss", ["poisson", "negative_binomial", "negative-binomial"])
def test_solve_takes_counts_with_losses_of_counts(loss, numbers, rng, tmp_path):
    X, _ = numbers
    file = _csv(tmp_path / "t.csv", X, rng.poisson(np.exp(X[:, 2])))
    assert "c2" in run("solve", file, "--target", "price", "-k", "bic", "--loss", loss)


@pytest.mark.parametrize(
    ("change", "arguments", "error", "message"),
    [
        (lambda t: t, ("-k", "9"), DataError, "from 0 to 6"),
        (lambda t: t, ("-k", "many"), DataError, "from 0 to 6"),
        (lambda t: t, ("-k", "²"), DataError, "from 0 to 6"),
        (lambda t: "\n".join(t.split("\n")[:5]), ("-k", "cv"), DataError, "needs 5 rows, there are 4; give a number"),
        (lambda t: t, ("--loss", "hinge"), DataError, r"--loss \(or --family\) must be"),
        (lambda t: t, ("--force", "zz"), DataError, "force in"),
        (lambda t: t, ("--drop", "zz"), DataError, "no column 'zz'"),
        (lambda t: t, ("-o", "/nowhere/at/all.json"), IOBSError, "Cannot write"),
    ],
)
def test_solve_raises_if_input_is_invalid(change, arguments, error, message, numbers, tmp_path):
    X, y = numbers
    file = _csv(tmp_path / "t.csv", np.abs(X), y)
    file.write_text(change(file.read_text()))
    with pytest.raises(error, match=message):
        run("solve", file, "--target", "price", *arguments)


def test_solve_raises_if_k_cannot_be_chosen(numbers, tmp_path):
    X, _ = numbers
    file = _csv(tmp_path / "t.csv", X[:8], np.arange(8) % 2)
    with pytest.raises(DataError, match="needs 5 rows of one class, there are 4"):
        run("solve", file, "--target", "price", "-k", "cv")
    shares = _csv(tmp_path / "shares.csv", X, 1 / (1 + np.exp(X[:, 0])))
    with pytest.raises(DataError, match="target of two values, got 80"):
        run("solve", shares, "--target", "price", "--loss", "logistic")
    assert "c0" in run("solve", shares, "--target", "price", "--loss", "logistic", "-k", 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", -1], "--seed"),
        (["--ridge", "inf"], "--ridge"),
        *((["--certify", seconds], "--certify") for seconds in ("-5", "nan", "inf")),
        *(([f"--near={gap}"], "such as 0.02 or 2%") for gap in ("-1%", "nan", "inf", "two", "1%%")),
    ],
)
def test_solve_refuses_numbers_out_of_range(arguments, words, numbers, tmp_path):
    assert words in refused("solve", _csv(tmp_path / "t.csv", *numbers), "--target", "price", *arguments)


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson"])
def test_solve_baseline_excludes_forced_columns(loss, numbers, rng, tmp_path):
    X, y = numbers
    y = {"squared": y, "logistic": (X[:, 1] + rng.standard_normal(80) > 0) * 1, "poisson": rng.poisson(np.exp(X[:, 1]))}
    file = _csv(tmp_path / "t.csv", X, y[loss])
    common = (file, "--target", "price", "--loss", loss, "-k", 1)
    free = json.loads(run("solve", *common, "--json"))
    assert free["value_without_features"] == pytest.approx(free["path"][0]["value"])
    model = json.loads(run("solve", *common, "--force", "c1", "--json"))
    assert model["value_without_features"] == pytest.approx(free["value_without_features"])
    assert model["path"][0]["value"] < model["value_without_features"]
    text = run("solve", *common, "--force", "c1")
    assert "2 of 6 columns" in text
    assert f"{1 - model['value'] / free['value_without_features']:.1%} of it explained" in text


def test_solve_auto_loss_looks_at_every_target(rng, tmp_path):
    y = np.repeat([0.0, 1.0, 0.0], 1000)
    X = rng.standard_normal((3000, 2))
    assert "logistic loss" in run("solve", _csv(tmp_path / "t.csv", X, y), "--target", "price", "-k", 0)
    y[1500] = 2.0
    assert "squared loss" in run("solve", _csv(tmp_path / "t.csv", X, y), "--target", "price", "-k", 0)


def test_solve_raises_if_classes_or_files_are_invalid(numbers, tmp_path, monkeypatch):
    X, _ = numbers
    three = _csv(tmp_path / "t.csv", X, np.array(["a", "b", "c"])[np.arange(80) % 3])
    with pytest.raises(DataError, match=r"holds text \(a, b, c\); use --loss logistic"):
        run("solve", three, "--target", "price", "--loss", "squared")
    two = _csv(tmp_path / "two.csv", X, np.array(["a", "b"])[np.arange(80) % 2])
    with pytest.raises(DataError, match="use --loss logistic"):
        run("solve", two, "--target", "price", "--loss", "squared")
    one = _csv(tmp_path / "one.csv", X, np.array(["a"] * 80))
    with pytest.raises(DataError, match="everywhere"):
        run("solve", one, "--target", "price")
    with pytest.raises(DataError, match="no file"):
        read_table(tmp_path / "none.csv", "y")
    (tmp_path / "t.xls").write_text("x")
    with pytest.raises(DataError, match=r"Cannot read \.xls"):
        read_table(tmp_path / "t.xls", "y")
    (tmp_path / "bad.npz").write_text("x")
    with pytest.raises(DataError, match="Cannot read"):
        read_table(tmp_path / "bad.npz", "y")
    np.savez(tmp_path / "two.npz", X=np.eye(3), y=np.ones(3), price=np.arange(3.0))
    assert read_table(tmp_path / "two.npz", "price").y.tolist() == [0, 1, 2]
    with pytest.raises(DataError, match="'cost' is no array of it"):
        read_table(tmp_path / "two.npz", "cost")
    np.savez(tmp_path / "odd.npz", a=np.ones(3), b=np.ones(4))
    with pytest.raises(DataError, match="equal length"):
        read_table(tmp_path / "odd.npz", "a")


@pytest.mark.parametrize("pandas", [True, False])
def test_read_table_raises_if_file_exceeds_memory(pandas, numbers, tmp_path, monkeypatch):
    file = _csv(tmp_path / "t.csv", *numbers)
    needed = 80 * 7 * (tables._BYTES if pandas else tables._BYTES_AS_TEXT)
    if pandas:
        monkeypatch.setattr(tables, "_SMALL", 0)
    monkeypatch.setattr(tables, "_free_memory", lambda: 0.9 * needed)
    with pytest.raises(DataError, match="GiB are free"):
        read_table(file, "price")
    # A sample of half of the rows gives nearly the same estimate; with enough memory the table is read.
    monkeypatch.setattr(tables, "_SAMPLE_ROWS", 40)
    monkeypatch.setattr(tables, "_free_memory", lambda: 1.1 * needed)
    assert read_table(file, "price").X.shape == (80, 6)


def test_free_memory_is_known():
    assert tables._free_memory() > 1 << 20


@pytest.mark.parametrize("ridge", [0.0, 5.0])
def test_solve_does_not_depend_on_column_units(ridge, rng, tmp_path):
    X = rng.standard_normal((200, 4))
    y = (rng.random(200) < 1 / (1 + np.exp(-3 * X[:, 0] + X[:, 1]))).astype(int)
    units = np.array([1e-6, 1.0, 1e4, 1.0])
    models = []
    for number, scale in enumerate((np.ones(4), units)):
        file = tmp_path / f"{number}.npz"
        np.savez(file, X=X * scale, y=y)
        models.append(json.loads(run("solve", file, "-k", 2, "--ridge", ridge, "--json")))
    plain, scaled = ([row["per_standard_deviation"] for row in model["features"]] for model in models)
    assert [row["name"] for row in models[0]["features"]] == ["x0", "x1"]
    np.testing.assert_allclose(scaled, plain, rtol=1e-6)
    assert models[1]["value"] == pytest.approx(models[0]["value"], rel=1e-8)


@pytest.mark.parametrize(
    "arguments", [("-o", "none/x.json"), ("--plot", "none/x.png"), ("--plot", "x.foo"), ("-o", ".")]
)
def test_solve_raises_early_if_output_is_not_writable(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "read_table", lambda *_: pytest.fail("the table was read"))
    (tmp_path / "t.csv").touch()
    with pytest.raises(OutputError, match=r"Cannot (write|draw)"):
        run("solve", "t.csv", *arguments)


def test_solve_draws_column_names_verbatim(numbers, tmp_path):
    names = ["a", "_hidden", "c", "d", r"$\frac$", "US$/CA$"]
    file = _csv(tmp_path / "t.csv", *numbers, names=names)
    run("solve", file, "--target", "price", "-k", 3, "--plot", tmp_path / "p.svg")
    drawn = (tmp_path / "p.svg").read_text()
    assert "<!-- _hidden -->" in drawn
    assert r"<!-- $\frac$ -->" in drawn


def test_solve_has_no_standard_error_if_no_rows_are_left(tmp_path):
    file = _csv(tmp_path / "t.csv", np.array([[1.0, 2.0], [2.0, 5.0], [4.0, 3.0]]), np.array([1.0, 2.0, 5.0]))
    assert "no rows are left" in run("solve", file, "--target", "price", "-k", 2)
    features = json.loads(run("solve", file, "--target", "price", "-k", 2, "--json"))["features"]
    assert [feature["standard_error"] for feature in features] == [None, None]


def test_near_lists_every_model_within_the_gap(tmp_path, rng):
    X = rng.standard_normal((60, 7))
    X[:, 3] = X[:, 1]
    y = X[:, 0] + X[:, 1] + 0.5 * rng.standard_normal(60)
    file = _csv(tmp_path / "t.csv", X, y)
    model = json.loads(run("solve", file, "--target", "price", "-k", 2, "--near", 0.01, "--json"))["near_optimal"]
    assert model["complete"]
    assert [each["features"] for each in model["models"]] == [["c0", "c1"], ["c0", "c3"]]
    shares = {row["name"]: row["share"] for row in model["columns"]}
    assert (shares["c0"], shares["c1"], shares["c2"]) == (1.0, 0.5, 0.0)
    shown = run("solve", file, "--target", "price", "-k", 2, "--near", "1%")
    assert "proved complete" in shown
    assert "c0 c3" in shown


@pytest.mark.parametrize("limits", [[], ["--non-negative", "--upper", "1"]])
def test_near_and_certify_take_classes_and_bounds(limits, tmp_path, rng):
    X = rng.standard_normal((80, 6))
    y = (X[:, 0] + X[:, 1] + rng.standard_normal(80) > 0).astype(float)
    file = _csv(tmp_path / "t.csv", X, y)
    model = json.loads(
        run(
            "solve",
            file,
            "--target",
            "price",
            "-k",
            2,
            "--ridge",
            0.01,
            "--near",
            "2%",
            "--certify",
            20,
            "--json",
            *limits,
        )
    )
    assert model["near_optimal"]["complete"]
    assert model["near_optimal"]["models"][0]["features"] == ["c0", "c1"]
    assert model["certificate"].startswith(("a global minimiser", "within"))


def test_a_proof_goes_on_from_its_checkpoint(tmp_path, rng):
    X = rng.standard_normal((60, 12)) + rng.standard_normal((60, 1))
    file = _csv(tmp_path / "t.csv", X, (X[:, :3].sum(axis=1) + 3 * rng.standard_normal(60) > 0).astype(int))
    common = ("solve", file, "--target", "price", "--ridge", 0.01, "--checkpoint", tmp_path / "proof.npz")
    stopped = json.loads(run(*common, "-k", 3, "--certify", 0, "--json"))["certificate"]
    assert "(1 nodes" in stopped
    whole = json.loads(run(*common, "-k", 3, "--certify", 60, "--json"))["certificate"]
    assert whole.startswith(("a global minimiser", "within"))
    with pytest.raises(OtherRunError, match="its k differ"):
        run(*common, "-k", 2, "--certify", 60)
    assert "--checkpoint" in refused("solve", file, "--target", "price", "--checkpoint", tmp_path / "proof.npz")


def test_points_print_a_card_that_predicts(tmp_path, rng):
    X = (rng.random((120, 6)) < 0.5).astype(float)
    y = np.where(rng.random(120) < 1 / (1 + np.exp(1 - X[:, :2] @ [2.0, 1.0])), "ill", "a")
    file = write_table(tmp_path / "t.csv", [*(f"c{j}" for j in range(6)), "state"], X, y)
    output = tmp_path / "m.json"
    arguments = ["solve", file, "--target", "state", "-k", 2, "--select", "points"]
    shown = run(*arguments, "-o", output)
    assert "points" in shown
    assert "risk of ill" in shown
    assert "proved to be the best" in shown
    card = json.loads(output.read_text())["card"]
    assert set(card["points"]) <= {f"c{j}" for j in range(6)}
    expected = card["intercept"] + card["scale"] * sum(
        points * X[:, int(name[1])] for name, points in card["points"].items()
    )
    chances = np.array(column(run("predict", output, file), "probability of ill"), dtype=float)
    np.testing.assert_allclose(chances, 1 / (1 + np.exp(-expected)), atol=1e-4)
    assert "needs a number of columns" in refused("solve", file, "--target", "state", "--select", "points")
    assert "points does not go with --near" in refused(*arguments, "--near", "0.1")


def _claims(tmp_path, rng, n=300):
    """A table of counts with years of exposure, a category of four levels, and a column of weights."""
    years, age = rng.integers(1, 9, n).astype(float), rng.standard_normal(n)
    town = rng.choice(["a", "b", "c", "d"], n)
    effect = np.vectorize({"a": 0.0, "b": 1.0, "c": -1.0, "d": 0.5}.get)(town)
    y = rng.poisson(years * np.exp(0.5 * age + effect - 1)).astype(float)
    noise = rng.standard_normal((n, 3))
    names = ["age", "town", "n1", "n2", "n3", "years", "w", "claims"]
    file = write_table(tmp_path / "claims.csv", names, age, town, noise, years, rng.integers(1, 4, n), y)
    return file, y, years


@pytest.mark.parametrize("k", ["2", "bic", "cv-1se"])
@pytest.mark.parametrize("loss", ["poisson", "negative_binomial"])
def test_whole_categories_enter_with_all_levels(k, loss, tmp_path, rng):
    file, *_ = _claims(tmp_path, rng)
    extra = ["--exposure", "years", "--weight", "w", "--whole-categories", "--json"]
    model = json.loads(run("solve", file, "--target", "claims", "--loss", loss, "-k", k, *extra))
    assert {row["name"] for row in model["features"]} == {"age", "town=b", "town=c", "town=d"}
    assert model["k"] == 2
    forced = json.loads(run("solve", file, "--target", "claims", "--loss", loss, "-k", 1, "--force", "town", *extra))
    assert {row["name"] for row in forced["features"]} == {"age", "town=b", "town=c", "town=d"}


def test_exposure_is_the_offset_of_solve_and_of_predict(tmp_path, rng):
    from iobs.optimize.objectives import Poisson
    from iobs.optimize.refit.newton import refit

    file, y, years = _claims(tmp_path, rng)
    arguments = ["--target", "claims", "--loss", "poisson", "-k", 1, "--exposure", "years", "--drop", "town"]
    model = json.loads(run("solve", file, *arguments, "--drop", "w", "--json", "-o", tmp_path / "m.json"))
    assert [row["name"] for row in model["features"]] == ["age"]
    age = read_table(file, "claims").X[:, :1]
    objective = Poisson(age, y, intercept=True, offset=np.log(years))
    fit = refit(objective, np.array([0, 1]))
    coefficients, intercept = objective.split(fit.theta)
    assert model["features"][0]["coefficient"] == pytest.approx(coefficients[0], rel=1e-8)
    predicted = np.array(column(run("predict", tmp_path / "m.json", file), "claims"), dtype=float)
    assert np.allclose(predicted, years * np.exp(age[:, 0] * coefficients[0] + intercept), rtol=1e-8)


def test_weights_of_solve_equal_repeated_rows(numbers, tmp_path, rng):
    X, y = numbers
    weights = rng.integers(0, 4, len(y))
    names = [*(f"c{j}" for j in range(6)), "w"]
    once = _csv(tmp_path / "once.csv", np.column_stack([X, weights]), y, names)
    repeated = _csv(tmp_path / "repeated.csv", X.repeat(weights, 0), y.repeat(weights))
    a = json.loads(run("solve", once, "--target", "price", "-k", 2, "--weight", "w", "--json"))
    b = json.loads(run("solve", repeated, "--target", "price", "-k", 2, "--json"))
    for one, other in zip(a["features"], b["features"], strict=True):
        assert one["name"] == other["name"]
        assert one["coefficient"] == pytest.approx(other["coefficient"], rel=1e-8)
        assert one["standard_error"] == pytest.approx(other["standard_error"], rel=1e-6)
        assert one["per_standard_deviation"] == pytest.approx(other["per_standard_deviation"], rel=1e-8)


def test_fractional_weights_are_those_of_the_estimator(numbers, tmp_path, rng):
    X, y = numbers
    weights, labels = rng.uniform(2, 30, len(y)), (y + 2 * rng.standard_normal(len(y)) > 5).astype(int)
    file = _csv(tmp_path / "t.csv", np.column_stack([X, weights]), labels, [*(f"c{j}" for j in range(6)), "w"])
    found = json.loads(run("solve", file, "--target", "price", "-k", 2, "--ridge", 1, "--weight", "w", "--json"))
    model = SparseClassifier(2, ridge=1.0).fit(X, labels, weights)
    rows = {row["name"]: row for row in found["features"]}
    assert {f"c{j}" for j in model.support_} == {*rows}
    for j in model.support_:
        assert rows[f"c{j}"]["coefficient"] == pytest.approx(model.coef_[0, j], rel=1e-5)
        assert rows[f"c{j}"]["standard_error"] == pytest.approx(model.standard_errors_[0, j], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exposure", "years"], "counts or amounts"),
        (["--weight", "town"], "must hold numbers"),
        (["--weight", "absent"], "no column 'absent'"),
        (["--loss", "poisson", "--exposure", "n1"], "must be positive"),
        (["--loss", "poisson", "--exposure", "years", "--offset", "n1"], "no --offset"),
    ],
)
def test_weights_and_offsets_that_do_not_fit_are_refused(arguments, words, tmp_path, rng):
    file, *_ = _claims(tmp_path, rng)
    with pytest.raises(DataError, match=words):
        run("solve", file, "--target", "claims", "-k", 1, *arguments)


def test_two_outputs_of_one_name_are_refused(numbers, tmp_path):
    file = _csv(tmp_path / "t.csv", *numbers)
    with pytest.raises(OutputError, match="Two outputs have the name"):
        run("solve", file, "--target", "price", "-k", 1, "-o", tmp_path / "out.png", "--plot", tmp_path / "out")
    assert not (tmp_path / "out.png").exists()


def test_files_are_written_before_the_table_is_printed(numbers, tmp_path, monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("iobs.cli.solution_tables.show", closed)
    file = _csv(tmp_path / "a.csv", *numbers)
    with pytest.raises(BrokenPipeError):
        run("solve", file, "--target", "price", "-k", 1, "-o", tmp_path / "model.json")
    assert json.loads((tmp_path / "model.json").read_text())["k"] == 1
