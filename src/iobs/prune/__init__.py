"""Prune a whole network: Algorithm 2."""
