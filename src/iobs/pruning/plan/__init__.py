"""Non-uniform sparsity: the number of weights that each layer keeps."""
