"""Links of the pages: they are written for a code host, and lead to pages of the site or to downloads here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# Files outside docs/ that are pages of the site, as links of pages in docs/ name them.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "benchmarks/results/layer_race.md": "benchmarks.md",
}
_OUTSIDE = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[\w./-]+?)(?P<anchor>#[\w-]+)?\)")


def on_site(text: str, page: str) -> str:
    """The text of a page with links that leave docs/ turned to the pages that show the same files."""
    depth = page.count("/")

    def replaced(match: re.Match[str]) -> str:
        outside = match["up"].count("../") == depth + 1
        target = PAGES.get(match["path"]) if outside else None
        return f"]({'../' * depth}{target}{match['anchor'] or ''})" if target else match[0]

    return _OUTSIDE.sub(replaced, text)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = on_site(source[0], page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Rewrite the source of every page when it is read."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
