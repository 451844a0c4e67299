"""Inner loops of the solvers, each in two forms with equal results: torch for any device, numba for the CPU.

The torch form, and the choice between the two, stand here, or with the one algorithm that the kernel serves (`obc`,
`sparsegpt`, `gridded/feedback`). The files `*_numba.py` hold the loops. numba is imported on the first call, not by
`import iobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

# ---- rows of a matrix shared out to the threads of torch; the result does not depend on their number
_ROWS_A_THREAD = 16  # least number of rows for each thread


def over_rows(task: Callable[[int, int], None], rows: int) -> None:
    """Call `task(start, stop)` on consecutive parts of range(rows).

    The parts must be independent of each other. To run in parallel, `task` must release the interpreter lock.
    """
    threads = max(1, min(torch.get_num_threads(), rows // _ROWS_A_THREAD))
    if threads == 1:
        task(0, rows)
        return
    bounds = [rows * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(task, start, stop) for start, stop in pairwise(bounds)]:
            future.result()
