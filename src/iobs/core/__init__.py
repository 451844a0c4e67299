"""Tensor mathematics without models or data: quadratics, sparsity patterns and linear algebra."""
