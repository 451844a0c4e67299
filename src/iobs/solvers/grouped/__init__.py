"""Solvers for whole groups of columns under one mask for all rows."""
