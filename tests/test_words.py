"""Docstrings speak plainly: they name the thing first, in the words of docs/glossary.md."""

import re

from source_files import source_files

RIDDLE = re.compile(r"^(What|That|How|Those|All that|Such|None but|Of what|Who|Which|Where|As)\b")
BANNED = re.compile(
    r"\b(dear|dearest|told|journal|polish|polishes|polished|twin|stranger|strangers|residence|workbench|resents|"
    r"by heart|so many|so much|skip=|GradientStep)\b"
)


def docstrings():
    """The place of each docstring, and its text."""
    return [(f"{one.name}:{owner}", text) for one in source_files() for owner, text in one.docstrings]


def test_docstrings_name_the_thing_first():
    riddles = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if RIDDLE.match(text)]
    assert not riddles, "\n".join(riddles)


def test_docstrings_use_the_words_of_the_glossary():
    found = [f"{place}: {match[0]}" for place, text in docstrings() for match in BANNED.finditer(text)]
    assert not found, "\n".join(found)
