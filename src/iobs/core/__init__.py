"""Pure tensor mathematics: quadratics, sparsity patterns, linear algebra with an explicit failure policy."""
