"""Calibration samples: batches, subsets of them, and the outputs of a model on them."""
