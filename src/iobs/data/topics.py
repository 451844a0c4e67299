"""The embedded text: the help topics of Python, split by topic name into training, calibration and held-out parts."""

from __future__ import annotations

import hashlib
import re
from typing import Literal

from iobs.errors import DataError

Split = Literal["train", "calibration", "heldout"]

# The split of a topic depends on a hash of its name only, so it is the same in every Python version.
_PERCENTILES: dict[Split, range] = {
    "heldout": range(0, 20),
    "calibration": range(20, 48),
    "train": range(48, 100),
}
_TITLE_RULE = re.compile(r"^\s*([*=\-^~\"])\1{3,}\s*$")
# Shorter paragraphs ("Note:", a single keyword) occur in many topics, and cannot leak held-out text.
_SHORTEST_OWNED_PARAGRAPH = 40


def embedded_text(split: Split) -> list[str]:
    """Cleaned help topics of one split, sorted by name, one document per topic.

    The topics come from `pydoc_data.topics` of the running Python. Their wording differs slightly between Python
    versions. The split depends on the topic name only, so topics used to train the embedded model are never held out.
    Topics quote each other. A paragraph stays in the first split that contains it, in the order held-out, calibration,
    train, and is removed from the others.

    Raises:
        DataError: this Python was installed without its help topics, or `split` is not one of the three.
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
    """A number in 0..99 that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % 100


def clean(text: str) -> str:
    """Remove title underlines and trailing spaces; separate paragraphs by one empty line."""
    lines = [line.rstrip() for line in text.expandtabs().splitlines() if not _TITLE_RULE.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def without_owned(text: str, owned: set[str]) -> str:
    """Remove the paragraphs of a text that are in `owned`, and add the remaining paragraphs to `owned`."""
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
