"""Words that the shell completes.

They are written out here, because completion must be quick and their own modules import torch. A test compares them
with the registries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

RECIPES = ("fast", "best", "one-shot", "paper")
SOLVERS = ("admm", "sparsegpt", "obc", "lobs", "nettrim", "wanda", "magnitude", "exact")
NETWORK_SOLVERS = ("chita", "cbs", "woodfisher", "global-magnitude")
UNIT_SOLVERS = ("flap", "greedy", "osscar", "random", "search")
SHARES = ("50%", "60%", "70%", "80%", "90%")
PATTERNS = ("2:4", "4:8", "1:4")
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
CORPORA = ("wikitext2", "c4", "redpajama")

Completion = Callable[[str], list[str]]


def words(known: Sequence[str]) -> Completion:
    """Completion of one word from the known words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


def listed(known: Sequence[str]) -> Completion:
    """Completion of the last of several words with commas between them; known words do not repeat."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        used = before.split(",")
        return [f"{before}{comma}{word}" for word in known if word.startswith(last) and word not in used]

    return complete
