"""Predicted memory and time in docs/howto/any-size.md are printed by benchmarks/any_size.py."""

from pathlib import Path

from checks import benchmarks

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "any-size.md"


def test_tables_of_the_page_are_printed_by_the_script():
    page = PAGE.read_text(encoding="utf8")
    with benchmarks() as imported:
        script = imported("any_size")
    tables = "\n".join(script.tables()).split("\n\n")
    assert [table for table in tables if table not in page] == []
    figures = [line.rpartition(": ")[2] for line in script.further(script.shapes())]
    assert [figure for figure in figures if figure not in " ".join(page.split())] == []
