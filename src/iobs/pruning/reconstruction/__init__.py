"""Block reconstruction: projections of a block with growing sparsity, and fits of windows to the dense outputs."""
