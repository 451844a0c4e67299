"""Odd CSV files: each is read as a person means it, or refused by one error that names all its problems."""

from __future__ import annotations

import numpy as np
import pytest
from regression_commands import run
from sklearn.preprocessing import OneHotEncoder

from iobs.data.fitted import Fitted
from iobs.data.tables import read_table
from iobs.errors import DataError, IOBSError, NonFiniteError

ROWS = "".join(f"{a},{b},{a + b}\n" for a, b in ((1, 2), (3, 1), (5, 4), (2, 2)))

READ = {
    "a byte order mark": ("﻿a,b,y\n" + ROWS, ["a", "b"], [1, 2]),
    "semicolons": ("a;b;y\n1;2;3\n3;1;4\n5;4;9\n", ["a", "b"], [1, 2]),
    "semicolons and a comma in quotes": ('"a, EUR";b;y\n1;2;3\n3;1;4\n5;4;9\n', ["a, EUR", "b"], [1, 2]),
    "semicolons and decimal commas": ("a;b;y\n1,5;2;3\n3,25;1;4\n5;4;9\n", ["a", "b"], [1.5, 2]),
    "tabs in a .csv": ("a\tb\ty\n1\t2\t3\n3\t1\t4\n", ["a", "b"], [1, 2]),
    "quoted commas in a name": ('"a, in m",b,y\n' + ROWS, ["a, in m", "b"], [1, 2]),
    "quoted numbers": ('a,b,y\n"1","2",3\n"3",1,4\n', ["a", "b"], [1, 2]),
    "Windows line ends": ("a,b,y\r\n1,2,3\r\n3,1,4\r\n", ["a", "b"], [1, 2]),
    "spaces around numbers": ("a,b,y\n 1 , 2,3\n3,1 ,4\n", ["a", "b"], [1, 2]),
    "a constant column": ("a,b,y\n1,2,3\n1,1,4\n", ["a", "b"], [1, 2]),
    "huge whole numbers": (
        "a,b,y\n123456789012345678901234567890,2,3\n1,1,4\n",
        ["a", "b"],
        [1.2345678901234568e29, 2],
    ),
    "booleans": ("a,b,y\ntrue,2,3\nFALSE,1,4\n", ["a", "b"], [1, 2]),
    "separators at line ends": ("a,b,y\n1,2,3,\n4,5,6,\n", ["a", "b"], [1, 2]),
    "more separators at a line's end": ("a,b,y\n1,2,3\n4,5,6,,\n", ["a", "b"], [1, 2]),
    "blank lines": ("\na,b,y\n\n1,2,3\n  \n4,5,6\n\n\n", ["a", "b"], [1, 2]),
    "exponents": ("a,b,y\n1e3,-2E-1,3\n3,1,4\n", ["a", "b"], [1000, -0.2]),
}


@pytest.mark.parametrize("name", READ)
def test_odd_table_is_read(name, write):
    content, names, first = READ[name]
    table = read_table(write(content), "y")
    assert table.names == names
    np.testing.assert_allclose(table.X[0], first)


def test_decimal_commas_of_a_target_are_numbers(write):
    table = read_table(write("a;b;y\n1,5;2;0,5\n3,25;1;-1,25\n5;4;2\n"), "y")
    assert table.y.tolist() == [0.5, -1.25, 2]
    assert table.classes == []


def test_categories_with_decimal_commas_are_known_again(write):
    file = write("size;b;y\nS;2;1\n1,5;1;2\nM;4;3\n1,5;3;4\nS;0;5\n")
    table = read_table(file, "y")
    assert table.names == ["size=M", "size=S", "b"]
    model = Fitted("y", "squared", (), table.codings, np.ones((1, 3)), np.zeros(1))
    np.testing.assert_array_equal(model.design(file), table.X)


def test_missing_categories_of_parquet_are_missing(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    towns = pyarrow.array(["Bonn", None, "Rome", None, "Bonn"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"town": towns, "y": [1.0, 2, 3, 4, 5]}), tmp_path / "t.parquet")
    with pytest.raises(NonFiniteError, match="'town' is missing in 2 of 5 rows"):
        read_table(tmp_path / "t.parquet", "y")
    assert read_table(tmp_path / "t.parquet", "y", missing="mean").names == ["town=Rome", "town=(missing)"]


def test_a_parquet_without_columns_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has no columns"):
        Fitted("y", "squared", (), (), np.zeros((1, 0)), np.zeros(1)).predict(tmp_path / "t.parquet")


REFUSED = {
    "an empty column": ("a,b,y\n1,,3\n2,,4\n", NonFiniteError, "column 'b' is empty; leave it out with --drop b"),
    "a number that overflows": ("a,b,y\n1e400,2,3\n3,1,4\n", NonFiniteError, "'a' is infinite or too large .*row 1"),
    "a number too large to square": ("a,b,y\n1e200,2,3\n3,1,4\n", NonFiniteError, "'a' is infinite or too large"),
    "infinity": ("a,b,y\n1,2,3\n3,-inf,4\n", NonFiniteError, "'b' is infinite .*row 2"),
    "dates": ("a,d,y\n1,2020-01-02,3\n2,2020-01-03,4\n", DataError, "'d' holds dates such as '2020-01-02'; give days"),
    "local dates": ("a,d,y\n1,2.1.2020,3\n2,31.1.2020,4\n", DataError, "'d' holds dates"),
    "names of rows": ("id,a,y\nr1,1,3\nr2,3,4\nr3,2,2\n", DataError, "'id' holds text such as 'r1', 3 different ones"),
    "a typing error": ("a,y\n1,3\n2,4\n3x,4\n", DataError, "'a' holds text such as '3x' among numbers, in row 3"),
    "an infinite target": ("a,y\n1,3\n2,inf\n", NonFiniteError, "the target 'y' is infinite"),
    "missing targets": (
        "a,y\n1,3\n2,\n3,NA\n",
        NonFiniteError,
        r"the target 'y' is missing in 2 of 3 rows \(rows 2, 3\)",
    ),
    "only missing values": ("a,y\n,\n,\n", NonFiniteError, "has 2 problems"),
    "a target of names": (
        "a,y\n" + "".join(f"{i},name{i}\n" for i in range(60)),
        DataError,
        "'y' holds 60 different texts such as 'name0'; give numbers",
    ),
    "one class": ("a,y\n1,yes\n2,yes\n", DataError, "the target 'y' is 'yes' everywhere"),
    "another encoding": ("ä,y\n1,2\n".encode("latin-1"), DataError, "save it as text in UTF-8"),
    "two columns of one name": ("a,a,y\n1,2,3\n", DataError, "several columns of one name: a"),
    "a long row": ("a,y\n1,2\n1,2,3\n", DataError, "Line 3 .* has 3 entries under a header of 2 names"),
    "a long first row": ("a,b,y\n1,2,3,9\n4,5,6\n", DataError, "Line 2 .* 4 entries under a header of 3 names"),
    "long rows": ("a,b,y\n1,2,3,9\n4,5,6,8\n", DataError, "Line 2 .* 4 entries under a header of 3 names"),
    "a long row below a quoted line": (
        'a,b,y\n"1\n",2,3\n\n4,5,6,8,9\n',
        DataError,
        "Line 5 .* 5 entries under a header of 3 names",
    ),
    "a short row": ("a,b,y\n1,2,3\n4,5\n", NonFiniteError, r"'y' is missing in 1 of 2 rows \(row 2\)"),
    "columns of two names twice": ("a,b,a,b,c,y\n1,2,3,4,5,6\n", DataError, "several columns of one name: a, b; give"),
    "another encoding below its header": ("a,y\n1,ä\n".encode("latin-1"), DataError, "save it as text in UTF-8"),
    "nothing": ("", DataError, "it is empty"),
    "blank lines alone": ("\n\n", DataError, "it is empty"),
    "a header alone": ("a,y\n", DataError, "no rows"),
    "an absent target": ("a,Y\n1,2\n", DataError, "has no column 'y'; it has: a, Y"),
    "a target much like another": ("a,yield\n1,2\n", DataError, "no column 'yeild'.*Did you mean 'yield'"),
    "binary": (bytes(range(256)), DataError, "Cannot read"),
    "only a target": ("y\n1\n2\n", DataError, "no column besides the target"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_odd_table_is_refused_by_one_error(name, write):
    content, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        read_table(write(content), "yeild" if "much like" in name else "y")


def test_all_problems_of_a_table_are_named_at_once(write):
    lines = [f"{i},{'' if i in (3, 5) else i},2021-01-{i + 1:02d},r{i},{'' if i == 6 else i},," for i in range(9)]
    file = write("a,gaps,day,id,y,empty,\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError) as raised:
        read_table(file, "y")
    text = str(raised.value)
    assert "has 6 problems" in text
    assert "the target 'y' is missing in 1 of 9 rows (row 7)" in text
    assert "column 'gaps' is missing in 2 of 9 rows (rows 4, 6)" in text
    assert "column 'day' holds dates" in text
    assert "column 'id' holds text" in text
    assert "column 'empty' is empty" in text


def test_rows_with_missing_values_are_dropped_or_marked(write):
    file = write("a,c,y\n1,u,1\n,v,2\n3,,3\n4,u,\n5,v,5\n")
    dropped = read_table(file, "y", missing="drop")
    assert dropped.X.tolist() == [[1, 0], [5, 1]]
    assert dropped.dropped == 3
    marked = read_table(file, "y", missing="mean")
    assert marked.names == ["a", "a is missing", "c=u", "c=v"] or marked.names == [
        "a",
        "a is missing",
        "c=v",
        "c=(missing)",
    ]
    np.testing.assert_allclose(marked.X[:, 0], [1, 3, 3, 5])
    assert marked.X[:, 1].tolist() == [0, 1, 0, 0]
    assert marked.y.tolist() == [1, 2, 3, 5]
    with pytest.raises(NonFiniteError, match="every row has missing values"):
        read_table(write("a,b,y\n1,,1\n,2,2\n"), "y", missing="drop")


def test_categories_are_coded_as_by_scikit_learn(write):
    towns = ["Rome", "Berlin", "Paris", "Berlin", "Rome", "Paris"]
    file = write("town,zip,y\n" + "".join(f"{town},{i % 2},{i}\n" for i, town in enumerate(towns)))
    table = read_table(file, "y", categories=["zip"])
    assert table.names == ["town=Paris", "town=Rome", "zip=1"]
    theirs = OneHotEncoder(drop="first", sparse_output=False).fit_transform(np.array(towns)[:, None])
    np.testing.assert_array_equal(table.X[:, :2], theirs)
    assert table.codings[0].levels[0] == "Berlin"  # the reference level


def test_a_category_of_one_level_has_no_column(write):
    table = read_table(write("town,a,y\n" + "".join(f"Rome,{i % 3},{i}\n" for i in range(6))), "y")
    assert table.names == ["a"]
    assert table.X.shape == (6, 1)


def _weighted(*weights):
    return "a,b,w,y\n" + "".join(f"{i % 3},{i % 2},{weight},{i}\n" for i, weight in enumerate(weights))


_WEIGHTED = _weighted(*[1] * 8)
_ROLE = "'{}' has two roles; name it in one option, and do not drop it"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,y\n1,2\n", [], "1 row"),
        ("w,y\n1,2\n2,3\n3,5\n", ["--weight", "w", "-k", 0], "t.csv has no column that could explain 'y'"),
        ("w,t,y\n1,R,2\n2,R,3\n3,R,5\n", ["--weight", "w", "-k", 0], "t.csv has no column that could explain 'y'"),
        *(
            (_WEIGHTED, ["--weight", "w", option, "w"], "'w' has two roles")
            for option in ("--drop", "--target", "--offset", "--category")
        ),
        (_WEIGHTED, ["--drop", "y"], _ROLE.format("y")),
        (_WEIGHTED, ["--category", "a", "--drop", "a"], _ROLE.format("a")),
        (_WEIGHTED, ["--category", "y"], _ROLE.format("y")),
        (_weighted(*[0] * 8), ["--weight", "w", "-k", 1], "weights 'w'"),
        (_weighted(*[1] * 7, -1), ["--weight", "w", "-k", 1], "weights 'w'"),
        (
            "y,a,years\n1,1,1\n2,3,inf\n0,2,2\n",
            ["-k", 1, "--loss", "poisson", "--exposure", "years"],
            "exposure 'years' must be positive and finite, got inf",
        ),
        (_WEIGHTED, ["--select", "knockoff"], "--drop w"),  # a constant column has no knockoff
    ],
)
def test_a_table_that_does_not_fit_the_command_is_refused(text, options, message, write):
    with pytest.raises(IOBSError) as raised:
        run("solve", write(text), *options)
    assert message in str(raised.value)
