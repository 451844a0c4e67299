"""Code blocks of the project's pages, with the comment that stands above them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
# Marks of a block that no test executes: <!-- not executed: REASON -->
_REASON = re.compile(r"<!--\s*not executed:\s*(?P<reason>.+?)\s*-->", re.DOTALL)
PROGRAMS = ("iobs", "make", "python", "pip", "torchrun", "source")


@dataclass(frozen=True)
class Block:
    """One code block: its page, its first line (from 1), its language, its text, and why it is not executed."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> list[Block]:
    """All code blocks of a page, fenced and indented ones."""
    found, reason = [], None
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block":
            match = _REASON.search(token.content)
            reason = match["reason"] if match else None
        elif token.type in ("fence", "code_block"):
            assert token.map is not None
            found.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, reason))
            reason = None
        elif token.type.endswith("_open"):
            reason = None
    return found


def name_of(file: Path) -> str:
    """A page by its path in the project."""
    return file.relative_to(ROOT).as_posix()


def commands_of(block: Block) -> list[list[str]]:
    """Commands of a block, as lists of words; continued lines are joined, comments and output are left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines if _is_command(line)]
    return [line for line in words if line]


def _is_command(line: str) -> bool:
    return line.strip().removeprefix("$ ").split(" ")[0] in PROGRAMS
