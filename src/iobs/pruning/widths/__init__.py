"""Widths of a narrower network: costs, error curves and the allocation of units to layers."""
