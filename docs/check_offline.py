"""Check that the pages of a built site load nothing from another host: python docs/check_offline.py build/site"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What a browser fetches by itself: scripts, pictures, frames, style sheets and fonts.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*?\bsrc\s*=\s*["'](?:https?:)?//[^"']+"""
    r"""|<link\b(?=[^>]*rel\s*=\s*["'](?:stylesheet|preload|icon|preconnect))[^>]*?href\s*=\s*["'](?:https?:)?//[^"']+"""
)
_STYLE = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//[^)"']+""")


def loaded_from_elsewhere(folder: Path) -> list[str]:
    """Places in pages and style sheets that make a browser ask another host."""
    found = []
    for file in sorted([*folder.rglob("*.html"), *folder.rglob("*.css")]):
        text = file.read_text(encoding="utf8")
        matches = _LOADED.findall(text) + _STYLE.findall(text)
        found += [f"{file.relative_to(folder)}: {match}" for match in matches]
    return found


def main() -> None:
    """Exit with an error if the site is missing or loads something from elsewhere."""
    folder = Path(sys.argv[1])
    if not (folder / "index.html").is_file():
        sys.exit(f"{folder} holds no site; run: make docs")
    found = loaded_from_elsewhere(folder)
    if found:
        sys.exit("\n".join(["The site loads from other hosts:", *found]))


if __name__ == "__main__":
    main()
