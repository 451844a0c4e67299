"""docs/guarantees.md names a test for each law; the tests exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LAWS = [
    line
    for line in (TESTS.parent / "docs" / "guarantees.md").read_text(encoding="utf8").splitlines()
    if "`test_" in line
]
DEFINED = {
    node.name
    for file in TESTS.rglob("test_*.py")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8")))
    if isinstance(node, ast.FunctionDef)
}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.split("|")[1].strip())
def test_law_has_the_tests_that_it_names(law):
    named = re.findall(r"`(test_\w+)`", law)
    assert named
    assert not [name for name in named if name not in DEFINED]
