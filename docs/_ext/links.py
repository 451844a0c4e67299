"""Links of the pages: they are written for a code host, and lead to pages of the site or to downloads here."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
# Files of the project that are pages of the site, by their paths in both.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
}
_TABLES = "benchmarks/results/"  # whose pages stand together on one page of the site
_LINK = re.compile(r"\]\((?!\w+:)(?P<path>[\w./-]+)(?P<anchor>#[\w-]+)?\)")


def on_site(text: str, file: str, page: str) -> str:
    """The text of a file, with its links as the page that shows the file needs them.

    Args:
        text: Markdown.
        file: path of the file in the project; its links are relative to it.
        page: path of the page in the project.
    """

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), match["path"]))
        if path in PAGES:
            path = f"docs/{PAGES[path]}"
        elif path.startswith(_TABLES) and path.endswith(".md"):
            path = "docs/benchmarks-all.md"
        return f"]({posixpath.relpath(path, posixpath.dirname(page))}{match['anchor'] or ''})"

    return _LINK.sub(replaced, text)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    if app.env.doc2path(page).suffix == ".md":
        source[0] = on_site(source[0], f"docs/{page}.md", f"docs/{page}.md")


def _include(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    file = (Path(app.srcdir) / path).resolve().relative_to(ROOT).as_posix()
    content[0] = on_site(content[0], file, f"docs/{page}.md")


def setup(app: Sphinx) -> dict[str, bool]:
    """Rewrite the source of every page, and of every file that a page includes, when it is read."""
    app.connect("source-read", _read)
    app.connect("include-read", _include)
    return {"parallel_read_safe": True}
