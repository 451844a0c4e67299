"""Numbers as text for readers, plain values as JSON for programs, and texts without the folders of this machine."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeAlias, cast

from iobs.errors import ProblemError, is_a, shown

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
_LESS_IS_BETTER = ("perplexity", "loss", "kl", "error", "seconds", "bits", "brier")  # parts of names of metrics
_INFINITE = {json.dumps(value): value for value in (math.inf, -math.inf, math.nan)}  # JSON has no such numbers
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_LONGEST = 1e9  # seconds
_NUMBER = r"\d+(?:\.\d+)?"
_PIECE = rf"({_NUMBER})\s*(s|min|h)"
_LONGEST_PATH = 4096  # characters
# An absolute path of Linux, macOS or Windows, at the beginning of a text or after a separator.
_START, _REST = r"""(?:(?<=^)|(?<=[\s'"=\[(,;]))""", r"""[^\s'",;)\]]"""
_ABSOLUTE = re.compile(rf"{_START}(?:/(?!/){_REST}*(?<![.:/])|[A-Za-z]:[\\/]{_REST}+)")


def percent(share: float, digits: int = 1) -> str:
    """0.5 -> "50.0 %"."""
    return f"{100 * share:.{digits}f} %"


def significant(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, "–" for None; scientific notation only below 1e-4 and from 1e6 on."""
    if value is None:
        return "–"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    text = f"{value:#.{digits}g}"
    return f"{value:,.0f}" if "e" in text else text.rstrip(".")


def score(value: float) -> str:
    """A metric or a count: two or three decimals, none for whole numbers from 100 on."""
    if float(value).is_integer() and abs(value) >= 100:  # infinity is not an integer
        return f"{value:,.0f}"
    if abs(value) >= 1e5:
        return significant(value)
    return f"{value:,.2f}" if abs(value) >= 10 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """A time as 12.3 s, 4 min 05 s or 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def as_seconds(within: object) -> float:
    """A time in seconds, from a number of seconds or text such as "30min", "90 s" or "1h 30min".

    Raises:
        ProblemError: it is no time above zero.
    """
    seconds = 0.0
    if isinstance(within, str) and re.fullmatch(rf"\s*{_NUMBER}\s*", within):
        seconds = float(within)
    elif isinstance(within, str) and re.fullmatch(rf"\s*(?:{_PIECE}\s*)+", within):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PIECE, within))
    elif is_a(Real, within) and within < _LONGEST:  # type: ignore[operator]
        seconds = float(within)  # type: ignore[arg-type]
    if not 0 < seconds < math.inf:
        raise ProblemError(
            f'within must be seconds, or a time such as "30min", "90s" or "1h30min"; got {shown(within)}.'
        )
    return seconds


def size(count: float) -> str:
    """A number of bytes in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def higher_is_better(metric: str) -> bool:
    """True if larger values of a metric are better."""
    return not any(word in metric for word in _LESS_IS_BETTER)


def best_name(values: Mapping[str, float], metric: str) -> str | None:
    """The name with the best value of a metric; NaN is never the best."""
    numbers = {name: value for name, value in values.items() if not math.isnan(value)}
    return (max if higher_is_better(metric) else min)(numbers, key=lambda name: numbers[name], default=None)


def to_json(value: object) -> str:
    """Plain values as standard JSON; non-finite numbers become "Infinity", "-Infinity" or "NaN"."""

    def finite(leaf: object) -> object:
        return json.dumps(leaf) if isinstance(leaf, float) and not math.isfinite(leaf) else leaf

    return json.dumps(_mapped(value, finite), indent=1, default=str)


def from_json(text: str) -> JSON:
    """Read JSON that `to_json` wrote.

    Raises:
        ValueError: the text is not JSON.
    """
    return cast(
        JSON, _mapped(json.loads(text), lambda leaf: _INFINITE.get(leaf, leaf) if isinstance(leaf, str) else leaf)
    )


def _mapped(value: object, change: Callable[[object], object]) -> object:
    """Apply `change` to every leaf of a tree of dictionaries and lists."""
    if isinstance(value, dict):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(entry, change) for entry in value]
    return change(value)


def without_folders(text: str) -> str:
    """The text with every absolute path replaced by its last name; only an existing path may contain spaces."""
    # os.path.exists says no where Path.exists raises: no permission, or a name longer than the system allows.
    if text.startswith("/") and len(text) < _LONGEST_PATH and os.path.exists(text):
        return Path(text).name or text
    return _ABSOLUTE.sub(lambda match: _last_name(match[0]), text)


def _last_name(path: str) -> str:
    kind = PurePosixPath if path.startswith("/") else PureWindowsPath
    return kind(path).name or path


def paths_without_folders(value: object) -> object:
    """Plain values, with `without_folders` applied to every text in them."""

    def shortened(leaf: object) -> object:
        return without_folders(leaf) if isinstance(leaf, str) and not leaf.startswith("data:") else leaf

    return _mapped(value, shortened)


def plural(count: int, noun: str) -> str:
    """A count with its noun: (1, "layer") -> "1 layer", (2000, "layer") -> "2,000 layers"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def pandas_module() -> Any:
    """Import pandas.

    Raises:
        ImportError: it is not installed; the message has the command that installs it.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "A data frame needs pandas, which is not installed; run: pip install 'iobs[tables]'"
        ) from error
    return pandas
