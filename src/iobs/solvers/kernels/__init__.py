"""Inner loops of the solvers, each in two forms with equal results: torch for any device, numba for the CPU.

numba is imported on the first call, not by `import iobs`.
"""
