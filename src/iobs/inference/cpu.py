"""Instruction sets of this CPU. A missing instruction would end the process, so they are read before compiling."""

from __future__ import annotations

import platform
from functools import cache
from typing import Literal

Level = Literal["avx512", "avx2", "none"]
_NEEDED: dict[Level, frozenset[str]] = {
    "avx512": frozenset({"avx512vbmi2", "avx512bw", "avx512vbmi", "avx512vnni", "avx512f"}),
    "avx2": frozenset({"avx2", "fma", "popcnt", "ssse3"}),
}


@cache
def level() -> Level:
    """The best instruction set among "avx512", "avx2" and "none" that numba compiles for."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "none"
    return level_of(_features())


def level_of(features: frozenset[str]) -> Level:
    """The best instruction set that a CPU with these features runs."""
    return next((name for name, needed in _NEEDED.items() if needed <= features), "none")


def _features() -> frozenset[str]:
    """Features of the CPU that numba compiles for: the host, or what NUMBA_CPU_FEATURES says."""
    import llvmlite.binding
    import numba

    cpu_name, listed = (getattr(numba.config, name) for name in ("CPU_NAME", "CPU_FEATURES"))
    if cpu_name not in (None, "", "host") and not listed:
        return frozenset()  # a CPU by name: its features are not known here
    features = listed or llvmlite.binding.get_host_cpu_features().flatten()
    return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))
