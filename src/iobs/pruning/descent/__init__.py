"""Gradient steps that keep zeros and grids: one machine for windows, networks by blocks and models with a loss."""
