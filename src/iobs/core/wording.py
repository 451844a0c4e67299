"""Words that reports share, and the data frames of a package that not every installation has."""

from __future__ import annotations

from typing import Any


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
