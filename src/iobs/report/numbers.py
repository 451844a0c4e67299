"""Numbers as people read them, and as other programs do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

_INFINITE = {json.dumps(value): value for value in (math.inf, -math.inf, math.nan)}  # JSON has no numbers for them


def percent(share: float, digits: int = 1) -> str:
    """0.5 -> "50.0 %"."""
    return f"{100 * share:.{digits}f} %"


def significant(value: float | None, digits: int = 3) -> str:
    """Three significant digits, a dash for None; scientific only where a plain number would be unreadable."""
    if value is None:
        return "–"
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    text = f"{value:#.{digits}g}"
    return f"{value:,.0f}" if "e" in text else text.rstrip(".")


def score(value: float) -> str:
    """A perplexity, an accuracy, a count: two or three decimals, none where they say nothing."""
    if float(value).is_integer() and abs(value) >= 100:  # infinity is none
        return f"{value:,.0f}"
    if abs(value) >= 1e5:
        return significant(value)
    return f"{value:,.2f}" if abs(value) >= 10 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Bytes in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def higher_is_better(metric: str) -> bool:
    """Whether a larger value of a metric is the better one."""
    return not any(word in metric for word in ("perplexity", "loss", "kl", "error", "seconds"))


def to_json(value: Any) -> str:
    """Plain values as JSON that every parser reads; what is not finite becomes "Infinity", "-Infinity" or "NaN"."""
    return json.dumps(
        _mapped(value, lambda leaf: json.dumps(leaf) if _is_infinite(leaf) else leaf), indent=1, default=str
    )


def from_json(text: str) -> Any:
    """Read what `to_json` wrote.

    Raises:
        ValueError: it is no JSON.
    """
    return _mapped(json.loads(text), lambda leaf: _INFINITE.get(leaf, leaf) if isinstance(leaf, str) else leaf)


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of dictionaries and lists with every leaf changed."""
    if isinstance(value, dict):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(entry, change) for entry in value]
    return change(value)
