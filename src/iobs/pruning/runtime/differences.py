"""Differences between the identities of two runs, in words.

An identity is nested JSON from `fingerprint.identity_of`. Digests in it begin with `DIGEST`; they are never shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from iobs.errors import listed

DIGEST = "sha256 "
_SHOWN = 4  # differences in one message
_Path = tuple[str, ...]


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """The differing settings with old and new value, and the data and weights with other contents.

    Args:
        old: identity of the stored run.
        new: identity of this run.

    Returns:
        A list separated by semicolons; empty if the identities are equal.
    """
    lines: list[str] = []
    for name in {**old, **new}:
        found = [*_differing((name,), old.get(name), new.get(name))]
        plain = [_values(*difference) for difference in found if not _is_digest(*difference)]
        lines += plain or _contents(name, [path for path, *_ in found])
    rest = len(lines) - _SHOWN
    return "; ".join([*lines[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])])


def _differing(path: _Path, old: object, new: object) -> Iterator[tuple[_Path, object, object]]:
    """The innermost values that differ, with their keys."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differing((*path, str(key)), old.get(key), new.get(key))
    elif old != new:
        yield path, old, new


def _is_digest(path: _Path, old: object, new: object) -> bool:
    return all(isinstance(value, str) and value.startswith(DIGEST) for value in (old, new))


def _contents(name: str, paths: list[_Path]) -> list[str]:
    """One line for all tensors of an entry whose shapes agree."""
    if not paths:
        return []
    inner = [".".join(path[1:-1]) for path in paths]
    if not inner[0]:
        return [f"the {name} have the same shapes and other contents"]
    more = f" and {len(inner) - 1} more tensors" if len(inner) > 1 else ""
    return [f"the {name} {inner[0]}{more} have the same shapes and other contents"]


def _values(path: _Path, old: object, new: object) -> str:
    name = ".".join(path)
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(one, str) for one in [*old, *new]):
        gone, added = [one for one in old if one not in new], [one for one in new if one not in old]
        if gone or added:
            parts = [f"without {listed(gone, 2)}"] * bool(gone) + [f"with {listed(added, 2)}"] * bool(added)
            return f"{name} are {len(new)} instead of {len(old)}: now {' and '.join(parts)}"
    before, after = _shown(old), _shown(new)
    if before == after:  # a function with other code, or an object with other contents
        return f"{name} is {after} with other contents"
    return f"{name} was {before} and is {after}"


def _shown(value: object) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    text = re.sub(rf" ?{DIGEST}[0-9a-f]+", "", text) or "something else"
    return text if len(text) <= 80 else f"{text[:77]}..."
