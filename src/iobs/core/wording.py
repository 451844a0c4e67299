"""Words of messages and reports."""


def plural(count: int, noun: str) -> str:
    """A count with its noun: (1, "layer") -> "1 layer", (2000, "layer") -> "2,000 layers"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
