"""The embedded text: Python's own help topics, split by topic name into training, calibration and held-out parts."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

from iobs.errors import DataError

Split = Literal["train", "calibration", "heldout"]

# A topic's share is the percentile of the hash of its name, so it never moves between splits, whatever the Python.
_PERCENTILES: dict[Split, range] = {
    "heldout": range(0, 20),
    "calibration": range(20, 48),
    "train": range(48, 100),
}
_TITLE_RULE = re.compile(r"^\s*([*=\-^~\"])\1{3,}\s*$")
# Shorter paragraphs ("Note:", a lone keyword) recur everywhere and carry no text to leak.
_SHORTEST_OWNED_PARAGRAPH = 40


def embedded_text(split: Split) -> list[str]:
    """Cleaned help topics of one split, in the order of their names, one document a topic.

    The topics come from `pydoc_data.topics` of the running Python. Their wording differs a little between Python
    versions, but the split goes by topic name, so a topic that the embedded model was trained on is never held out.
    Topics quote one another; a paragraph belongs to the first of held-out, calibration, train that has it and is
    removed from the others.

    Raises `DataError` where this Python was installed without its help topics or `split` is not one of the three.
    """
    if split not in _PERCENTILES:
        raise DataError(f"the embedded text has no split {split!r}; choose one of {', '.join(_PERCENTILES)}")
    topics = _topics()
    owned: set[str] = set()
    for owner, percentiles in _PERCENTILES.items():
        documents = [
            without_owned(clean(topics[name]), owned) for name in sorted(topics) if percentile(name) in percentiles
        ]
        if owner == split:
            break
    return [document for document in documents if document]


def percentile(name: str) -> int:
    """A number of 0..99 that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % 100


def clean(text: str) -> str:
    """Text without title rules and trailing blanks, with paragraphs separated by one empty line."""
    lines = [line.rstrip() for line in text.expandtabs().splitlines() if not _TITLE_RULE.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def without_owned(text: str, owned: set[str]) -> str:
    """Drop the paragraphs that `owned` already has, and add the remaining ones to it."""
    kept = []
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) >= _SHORTEST_OWNED_PARAGRAPH:
            if key in owned:
                continue
            owned.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise DataError(
            "this Python was installed without pydoc_data, which holds the embedded text; give a text file instead"
        ) from error
    return dict(topics.topics)
