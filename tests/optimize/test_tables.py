"""Tables are read alike with and without pandas; others are refused with one line."""

import numpy as np
import pytest

from iobs.data import tables
from iobs.data.tables import read_table
from iobs.errors import DataError, NonFiniteError


@pytest.fixture
def read(write):
    """A function that reads a text as a table, with pandas and without."""
    return lambda text, target="y", drop=(), name="t.csv", **more: read_table(write(text, name), target, drop, **more)


@pytest.mark.parametrize("mark", ["", "NA", "NaN", "nan", "null", "NULL", "N/A", " NA "])
def test_read_table_raises_if_an_entry_is_missing(mark, read):
    with pytest.raises(NonFiniteError, match=r"'a' is missing in 1 of 2 rows \(row 2\)"):
        read(f"a,b,y\n1,2,3\n{mark},5,6\n")
    with pytest.raises(NonFiniteError, match=r"'a' is missing in 1 of 2 rows \(row 2\)"):
        read(f"a,b,y\nTrue,2,3\n{mark},5,6\n")
    for first, other in (("yes", "no"), ("True", "False"), ("1", "0")):
        with pytest.raises(NonFiniteError, match=r"'y' is missing in 2 of 4 rows \(rows 2, 4\)"):
            read(f"a,y\n1,{first}\n2,{mark}\n3,{other}\n4,{mark}\n")


def test_read_table_quotes_text_not_missing_entries(read):
    with pytest.raises(
        DataError,
        match=r"'Paris' among numbers, in row 3; correct .* --category 'the city', or .* --drop 'the city'",
    ):
        read("the city,y\n,1\n2,3\nParis,4\n")


def test_read_table_reads_booleans_as_numbers_or_classes(read):
    table = read("a,b,y\nTrue,1,FALSE\nfalse,2,TRUE\nTRUE,3,FALSE\n")
    assert table.X.tolist() == [[1, 1], [0, 2], [1, 3]]
    assert table.classes == ["False", "True"]
    assert table.y.tolist() == [0, 1, 0]


def test_read_table_names_classes_as_written(read, monkeypatch):
    monkeypatch.setattr(tables, "_CHUNK_ROWS", 2)  # one chunk of numbers, one of text
    table = read("a,y\n1,01\n2,01\n3,1.50\n4,x\n", target_classes=True)
    assert table.classes == ["01", "1.50", "x"]
    assert read("a,y\n1,True\n2,TRUE\n3,x\n4,x\n").classes == ["TRUE", "True", "x"]


@pytest.mark.parametrize(("first", "then"), [("007", "A1"), ("TRUE", "0"), ("true", "x"), ("1.50", " NA")])
@pytest.mark.usefixtures("read")
def test_all_rows_of_a_column_are_read_alike(first, then, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "_CHUNK_ROWS", 2)  # the first two rows alone would be numbers or booleans
    file = tmp_path / "t.csv"
    file.write_text(f"a,b,y\n{first},1,1\n{first},2,2\n{then},,3\n{first},4,4\n")
    found = tables.read_columns(file)
    expected = [1.5, 1.5, np.nan, 1.5] if then == " NA" else [first, first, then, first]
    np.testing.assert_array_equal(found["a"], np.array(expected, dtype=found["a"].dtype))
    np.testing.assert_array_equal(found["b"], [1, 2, np.nan, 4])


def test_read_table_drops_columns_without_a_name(read):
    table = read(",a,b,y\nr1,1,5,2\nr2,3,6,4\n", drop=["Unnamed: 0", "Unnamed: 0", "b"])
    assert table.names == ["a"]


@pytest.mark.parametrize("name", ["T.CSV", "t.Tsv"])
def test_read_table_accepts_suffixes_in_capitals(name, read):
    separator = "," if name == "T.CSV" else "\t"
    assert read(f"a{separator}y\n1{separator}2\n", name=name).X.tolist() == [[1]]


DAYS = np.array(["2020-01-01", "2020-01-02", "2020-01-03"], dtype="datetime64[D]")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (DAYS, "dates; give numbers instead, such as days since a date"),
        (DAYS - DAYS[0], "durations; give numbers"),
        (np.array([1, 2j, 3]), "complex numbers; give the real"),
        (np.zeros(3, dtype=[("p", float)]), "records; give each"),
    ],
)
def test_read_table_raises_if_arrays_are_not_numeric(values, what, tmp_path):
    file = tmp_path / "t.npz"
    np.savez(file, d=values, a=np.arange(3.0), y=np.arange(3.0))
    with pytest.raises(DataError, match=f"column 'd' holds {what}.*, or leave it out with --drop d"):
        read_table(file, "y")
    with pytest.raises(DataError, match=f"the target 'd' holds {what}"):
        read_table(file, "d")
    assert read_table(file, "y", ["d"]).names == ["a"]


def test_read_table_reads_text_in_arrays(tmp_path):
    file = tmp_path / "t.npz"
    np.savez(file, a=np.array(["1", "2.5"]), b=np.array([b"3", b"4"]), y=np.array([b"yes", b"no"]))
    table = read_table(file, "y")
    assert table.X.tolist() == [[1, 3], [2.5, 4]]
    assert table.classes == ["no", "yes"]
    np.savez(file, a=np.arange(2.0), y=np.array(["yes", ""]))
    with pytest.raises(NonFiniteError, match="in 1 of 2 rows"):
        read_table(file, "y")


def test_read_table_raises_if_target_names_a_column_of_x(tmp_path):
    np.savez(tmp_path / "t.npz", X=np.eye(3), y=np.arange(3.0))
    assert read_table(tmp_path / "t.npz", "y").names == ["x0", "x1", "x2"]
    with pytest.raises(DataError, match="'x0' names a column of X"):
        read_table(tmp_path / "t.npz", "x0")


def test_arrays_beside_x_and_y_have_a_use_or_are_refused(tmp_path):
    file = tmp_path / "t.npz"
    np.savez(file, X=np.eye(3), y=np.arange(3.0), w=np.array([1.0, 2, 3]))
    with pytest.raises(DataError, match=r"holds X and y, and also w, which would not be used: .*--drop w"):
        read_table(file, "y")
    weighted = read_table(file, "y", aside=["w"])
    assert weighted.names == read_table(file, "y", ["w"]).names == ["x0", "x1", "x2"]
    assert weighted.aside["w"].tolist() == [1, 2, 3]
    np.savez(file, X=np.eye(3), y=np.arange(3.0), w=np.ones(2))
    with pytest.raises(DataError, match="equal length"):
        read_table(file, "y", aside=["w"])
    assert [*tables.read_columns(file)] == ["x0", "x1", "x2", "y"]
    np.savez(file, X=np.eye(3), y=np.arange(3.0), x0=np.ones(3))
    with pytest.raises(DataError, match="holds an array 'x0' beside X; rename it"):
        read_table(file, "y", aside=["x0"])


@pytest.mark.parametrize("damage", ["cut off", "empty", "in its header", "in its numbers", "an array alone"])
def test_read_table_raises_if_an_archive_is_damaged(damage, tmp_path):
    file = tmp_path / "t.npz"
    np.savez_compressed(file, a=np.arange(1000.0), y=np.arange(1000.0))
    content = bytearray(file.read_bytes())
    if damage == "an array alone":
        np.save(tmp_path / "t.npy", np.eye(3))
        content = (tmp_path / "t.npy").read_bytes()
    elif damage.startswith("in"):
        content[100 if damage == "in its header" else len(content) // 4] ^= 255
    file.write_bytes({"cut off": content[: len(content) // 2], "empty": b""}.get(damage, content))
    with pytest.raises(DataError, match=r"Cannot read .*; save it again"):
        read_table(file, "y")


def test_categories_of_text_arrays_keep_their_names(tmp_path):
    file = tmp_path / "t.npz"
    np.savez(file, code=np.array(["01", "1", "01", "1"]), x=np.arange(4.0), y=np.array(["0", "1", "1", "0"]))
    table = read_table(file, "y", categories=["code"])
    assert table.names == ["code=1", "x"]
    assert table.y.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["5", "6", "x", "7"], "text such as 'x' among numbers, in row 3; correct these entries, or give --loss"),
        (["2024-01-02", "2024-01-03", "2024-01-02", "b"], "dates such as '2024-01-02'; give days since a date"),
    ],
)
def test_target_that_may_be_a_mistake_is_refused_unless_it_holds_classes(tmp_path, entries, message):
    file = tmp_path / "table.csv"
    file.write_text("y,a\n" + "".join(f"{entry},{row}\n" for row, entry in enumerate(entries)))
    with pytest.raises(DataError, match=message):
        read_table(file, "y")
    assert read_table(file, "y", target_classes=True).classes == sorted({*entries})


def test_target_of_mostly_text_is_classes(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("y,a\nlow,1\nhigh,2\n3,3\nlow,4\n")
    assert read_table(file, "y").classes == ["3", "high", "low"]
