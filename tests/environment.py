"""Variables of every process of the tests. Import this before torch and numba, which read them when they are loaded."""

import os
from pathlib import Path

# Compiled kernels are kept between runs and shared by parallel workers; numba reads the variable when it is imported.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".numba_cache"))
# Triton's kernels run in its interpreter on the CPU; the variable is read when triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
# One thread that sleeps while it waits, here and in every process that a test starts: the tests are small and run in
# parallel, and threads that spin while they wait for a core made runs on a busy machine up to 20 times slower.
os.environ.update(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
