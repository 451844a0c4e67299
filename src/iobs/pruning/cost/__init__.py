"""Estimates of the time and the memory of a run."""
