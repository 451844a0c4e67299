"""Published one-shot pruners, for comparison."""
