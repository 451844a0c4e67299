"""Docstrings speak plainly: they name the thing first, in the words of docs/glossary.md."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "iobs"
FILES = sorted(SOURCE.rglob("*.py"))
RIDDLE = re.compile(r"^(What|Whether|That|How|Those|All that|Such|None but|Of what|Who|Which|Where|As)\b")
BANNED = re.compile(
    r"\b(dear|dearest|told|journal|polish|polishes|polished|twin|stranger|strangers|residence|workbench|resents|"
    r"by heart|so many|so much|skip=|GradientStep)\b"
)


def docstrings(file):
    tree = ast.parse(file.read_text(encoding="utf8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield f"{file.relative_to(SOURCE)}:{getattr(node, 'name', 'module')}", text


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_docstrings_name_the_thing_first(file):
    riddles = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings(file) if RIDDLE.match(text)]
    assert not riddles


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_docstrings_use_the_words_of_the_glossary(file):
    found = [f"{place}: {match[0]}" for place, text in docstrings(file) for match in BANNED.finditer(text)]
    assert not found
