"""The API reference lists every public name, and its names exist."""

import importlib
import re

from code_blocks import ROOT

import iobs

PAGES = sorted((ROOT / "docs" / "api").glob("*.rst"))
NAMED = re.compile(r"^\.\. auto(?:function|class|module|data|exception):: (\S+)", re.MULTILINE)
DOCUMENTED = [name for page in PAGES for name in NAMED.findall(page.read_text(encoding="utf8"))]


def found(name):
    """The object that a dotted path names; attributes of a package may be imported on first use."""
    first, *rest = name.split(".")
    value = importlib.import_module(first)
    for part in rest:
        first = f"{first}.{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(first)
    return value


def test_every_public_name_has_an_entry():
    assert not [name for name in dir(iobs) if f"iobs.{name}" not in DOCUMENTED]


def test_every_entry_exists_and_occurs_once():
    assert all(found(name) is not None for name in DOCUMENTED)
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


def test_every_page_is_in_the_contents():
    contents = (ROOT / "docs" / "api" / "index.rst").read_text(encoding="utf8")
    assert all(f"   {page.stem}\n" in contents for page in PAGES if page.stem != "index")
