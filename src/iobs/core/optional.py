"""Packages that not every installation has."""

from __future__ import annotations

from typing import Any


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
