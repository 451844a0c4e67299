"""docs/guarantees.md names a test for each law; the tests exist."""

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LAWS = [
    line
    for line in (TESTS.parent / "docs" / "guarantees.md").read_text(encoding="utf8").splitlines()
    if "`test_" in line
]


@cache
def defined():
    """Names of all test functions, which begin their line: to parse the files would take seconds."""
    files = [file.read_text(encoding="utf8") for file in TESTS.rglob("test_*.py")]
    return {name for text in files for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.split("|")[1].strip())
def test_law_has_the_tests_that_it_names(law):
    named = re.findall(r"`(test_\w+)`", law)
    assert named
    assert not [name for name in named if name not in defined()]
