"""Inner loops of the solvers, each in two forms with equal results: torch for any device, numba for the CPU.

The torch form, and the choice between the two, stand here, or with the one algorithm that the kernel serves (`obc`,
`sparsegpt`, `gridded/feedback`). The files `*_numba.py` hold the loops. numba is imported on the first call, not by
`import iobs`.
"""
