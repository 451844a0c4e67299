"""The hot loops: compiled for CPU and GPU, each beside the plain torch form that it must equal."""
