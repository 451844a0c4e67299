"""Threads of OpenMP that sleep while they wait for each other.

By default they spin. On a machine with other work the thread that they wait for often has no core, because another one
spins on it, and small networks were pruned up to 11 times slower with two threads than with one.

`OMP_WAIT_POLICY=PASSIVE` makes them sleep. OpenMP reads it when torch is loaded, so `import iobs` sets it, unless the
user chose a policy. Where torch came first it is too late, and `ensure_sleep` has another way.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from threading import Event, Thread

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_chosen_by_user = any(name in os.environ for name in _CHOICES)
_too_late = "torch" in sys.modules
if not _chosen_by_user:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def ensure_sleep() -> None:
    """Make threads sleep while they wait, also if torch was loaded before iobs. A choice of the user stays.

    GNU's OpenMP lets threads spin a three-hundredth of the usual time where a process has more threads than the machine
    has cores. It counts the threads of all teams, so one more team that does nothing is enough.
    """
    import torch

    if _too_late and not _chosen_by_user and torch.get_num_threads() > 1:
        _hold_idle_team()


@cache
def _hold_idle_team() -> None:
    """Start a thread that has a team of its own, and sleeps for good."""
    import torch

    ready = Event()

    def hold() -> None:
        try:
            torch.ones(2**20).sqrt_()  # large enough for all threads: they are created here
        finally:
            ready.set()
        Event().wait()

    Thread(target=hold, name="iobs-idle-openmp-team", daemon=True).start()
    ready.wait()
