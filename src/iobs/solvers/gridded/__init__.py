"""Solvers for weights whose values lie on a grid, dense or sparse."""
