"""Whole parts of a network that are removed: blocks (depth) and experts, with the refit of what follows."""
