"""Memory of this process and of the machine, as the system tells it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if sys.platform != "win32":
    import resource

_ROOT, _STATUS = Path("/"), Path("/proc/self/status")
# Files of a group of processes: its limit, its use, and the entries of memory.stat for cached files.
_CGROUP_2 = "memory.max", "memory.current", ("inactive_file", "active_file")
_CGROUP_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")


def resident() -> int:
    """Anonymous resident memory now, in bytes; elsewhere the peak resident memory; 0 on Windows."""
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def available(root: Path = _ROOT) -> int:
    """Main memory that new allocations can take without swapping, in bytes; 0 where the system does not say.

    Containers and batch systems limit the memory of a group of processes (cgroups of Linux, versions 1 and 2). The
    result is then at most what the group has left.

    Args:
        root: folder that holds /proc and /sys.
    """
    file = root / "proc/meminfo"
    if not file.exists():
        return 0
    lines = file.read_text(encoding="ascii").splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    return min([free, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Free bytes of each limited group of this process. The limit of a group holds for all groups in it."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", _CGROUP_2
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _CGROUP_1
        else:
            continue
        own = mount / path.lstrip("/")  # inside a container the path may be that of the host, which is not mounted
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount):
                yield from _left_in_group(folder, *names)


def _left_in_group(folder: Path, limit: str, usage: str, cached: Sequence[str]) -> Iterator[int]:
    """Free bytes of a group; nothing if it has no limit. Cached files count as free: they can be dropped."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        used = int((folder / usage).read_text(encoding="ascii"))
        pairs = [line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()]
        if most != "max":
            yield max(1, int(most) - used + sum(int(value) for name, value in pairs if name in cached))
    except (OSError, ValueError):
        return
