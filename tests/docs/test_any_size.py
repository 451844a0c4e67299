"""Predicted memory and time in docs/howto/any-size.md are printed by benchmarks/any_size.py."""

from dataclasses import replace
from pathlib import Path

import pytest
from checks import benchmarks

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "any-size.md"


@pytest.fixture
def script():
    with benchmarks() as imported:
        yield imported("any_size")


def test_row_of_the_first_table_is_printed_by_the_script(script, monkeypatch):
    """All rows take some 15 seconds."""
    name = "`fast`"
    recipe = script.recipes()[name]
    monkeypatch.setattr(script, "recipes", lambda: {name: recipe})
    machines = [replace(gpu, count=count) for count in (1, 8) for gpu in script.GPUS]
    title, _, row = script.memory_and_time(script.network("8 billion"), machines)
    lines = PAGE.read_text(encoding="utf8").splitlines()
    assert row in lines[lines.index(title) :]


@pytest.mark.slow
def test_tables_of_the_page_are_printed_by_the_script(script):
    page = PAGE.read_text(encoding="utf8")
    tables = "\n".join(script.tables()).split("\n\n")
    assert [table for table in tables if table not in page] == []
    figures = [line.rpartition(": ")[2] for line in script.further(script.shapes())]
    assert [figure for figure in figures if figure not in " ".join(page.split())] == []
