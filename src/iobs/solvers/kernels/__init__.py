"""Hot loops. Each has a plain torch form that runs on every device and a numba form for the CPU that must equal it.

numba is imported on the first call, never by `import iobs`.
"""
