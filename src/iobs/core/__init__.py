"""Tensor mathematics without models or data: quadratics, patterns, linear algebra; files, words, progress, memory."""
