"""Links between pages lead somewhere, on a code host and on the site."""

import json
import re
import sys

import pytest
from code_blocks import PAGES, ROOT, TUTORIALS, name_of

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


@pytest.mark.parametrize(
    ("text", "file", "page", "expected"),
    [
        ("](../benchmarks/RESULTS.md#x)", "docs/accuracy.md", "docs/accuracy.md", "](benchmarks.md#x)"),
        ("](../../README.md)", "docs/howto/errors.md", "docs/howto/errors.md", "](../index.md)"),
        ("](../examples/lora.py)", "docs/own-models.md", "docs/own-models.md", "](../examples/lora.py)"),
        ("](docs/pruning.md#counts)", "README.md", "docs/results.md", "](pruning.md#counts)"),
        ("](results/grid.md)", "benchmarks/RESULTS.md", "docs/benchmarks.md", "](benchmarks-all.md)"),
        ("](results/race.png)", "benchmarks/RESULTS.md", "docs/benchmarks.md", "](../benchmarks/results/race.png)"),
        ("](https://host.example/a.md)", "README.md", "docs/results.md", "](https://host.example/a.md)"),
    ],
)
def test_links_lead_to_pages_of_the_site(text, file, page, expected):
    from links import on_site

    assert on_site(text, file, page) == expected
