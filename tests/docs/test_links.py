"""Links between pages lead somewhere, on a code host and on the site."""

import json
import re
import sys

import pytest
from blocks import PAGES, ROOT, TUTORIALS, name_of

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[\w-]+)?\)")


def text_of(file):
    if file.suffix != ".ipynb":
        return file.read_text(encoding="utf8")
    cells = json.loads(file.read_text(encoding="utf8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors_of(file):
    """The anchors that a code host makes from headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(file), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS], ids=name_of)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in LINK.findall(text_of(page)):
        file = (page.parent / target).resolve()
        assert file.exists(), target
        assert not anchor or file.suffix not in (".md", ".ipynb") or anchor in anchors_of(file), target + anchor


def test_site_shows_files_outside_its_folder_as_pages():
    from links import on_site

    assert on_site("[a](../benchmarks/RESULTS.md#x)", "accuracy") == "[a](benchmarks.md#x)"
    assert on_site("[a](../../README.md)", "howto/errors") == "[a](../index.md)"
    assert on_site("[a](../benchmarks.md)", "howto/errors") == "[a](../benchmarks.md)"
    assert on_site("[a](../examples/prune_your_own.py)", "index") == "[a](../examples/prune_your_own.py)"
