"""Calibration samples: batches, subsets of the samples, and the outputs of a model on them."""
