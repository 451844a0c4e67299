"""Reuse of freed memory by the C library, and peak memory."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import iobs
from iobs.core.memory import available
from iobs.core.steps import _memory
from iobs.pruning import blockwise
from iobs.pruning.runtime import memory
from iobs.pruning.runtime.memory import _MMAP_THRESHOLD, MemoryWatch, mapped_bytes, reachable, reusing_memory

MEGABYTE = 1 << 20
PROBE = """
import torch
from iobs.core.memory import resident
from iobs.pruning.runtime.memory import reusing_memory
with reusing_memory():
    tensor = torch.ones(16 << 20)
    filled = resident()
    del tensor
    print((filled - resident()) >> 20)
"""


@pytest.fixture(autouse=True)
def nothing_left():
    if sys.platform != "linux" or any("MALLOC_" in name or "TUNABLES" in name for name in os.environ):
        pytest.skip("the C library has no such switch, or it is set from outside")


# Each measurement runs in a process of its own: the heap of this one depends on the tests before. Both are forks of a
# process that has done nothing but load the library, which takes seconds.
MEASURED = """
import os, sys, torch
from iobs.core.memory import resident
from iobs.pruning.runtime import memory
from iobs.pruning.runtime.memory import giving_memory_back, reusing_memory

def left():
    before = resident()
    tensor = torch.ones(16 << 20)
    del tensor
    return (resident() - before) >> 20

def ends():
    before = resident()
    with reusing_memory():
        with reusing_memory():
            pass  # leaving an inner context must not end the outer one
        inside = left()
    after = (resident() - before) >> 20
    try:
        with reusing_memory():
            left()
            raise ZeroDivisionError
    except ZeroDivisionError:
        print(inside, after, (resident() - before) >> 20, memory._thresholds == memory._DEFAULT)

def gaps():
    with giving_memory_back():
        with reusing_memory():
            early = [torch.ones(4 << 18) for _ in range(16)]
            del early[::2]
        before = resident()
        late = [torch.ones(3 << 18) for _ in range(8)]
        del late
        print((resident() - before) >> 20)

for measure in (ends, gaps):
    if os.fork() == 0:
        measure()
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def measured():
    """Megabytes that are left inside and after a context of reuse and after an error in one, whether the thresholds are
    restored, and megabytes that are left with both contexts.

    Tensors made after a context do not count: they may lie in gaps of the heap, whose pages the C library keeps.
    """
    found = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    ends, gaps = found.stdout.splitlines()
    *left, restored = ends.split()
    return *map(int, left), restored == "True", int(gaps)


@pytest.mark.slow
def test_reusing_memory_returns_freed_memory_at_the_end_and_on_an_error(measured) -> None:
    with reusing_memory():  # which sets the threshold back
        if not ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 30):
            pytest.skip("this C library refuses to keep blocks of 64 MB")
    inside, after, after_error, restored, _ = measured
    assert inside > 60
    assert max(after, after_error) < 4
    assert restored


@pytest.mark.slow
def test_memory_is_given_back_where_both_are_asked_for(measured):
    """Reuse would put the later tensors into gaps of the heap, and keep their pages."""
    assert measured[-1] < 4


@pytest.mark.slow
def test_reusing_memory_respects_settings_of_the_user() -> None:
    """With this setting, blocks of 64 MB are mapped one by one and returned when freed."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MEGABYTE)}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 60


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_thresholds_that_the_user_sets_stay_as_they_are(name, monkeypatch):
    assert memory._glibc.__wrapped__() is not None
    monkeypatch.setenv(name, "")
    assert memory._glibc.__wrapped__() is None


def test_memory_watch_of_the_cpu_calls_no_cuda(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a context on the GPU would be made")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert MemoryWatch(torch.device("cpu")).look() > 0


def test_memory_watch_of_a_gpu_asks_that_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 2**50)
    assert MemoryWatch(torch.device("cuda:1")).look() == 2**50
    assert {str(device) for device in asked} == {"cuda:1"}


def test_blocks_that_torch_keeps_for_later_are_left(monkeypatch):
    """A GPU of 20 bytes: 5 are free, and torch has 12, of which tensors take 3."""
    for name, found in {"mem_get_info": (5, 20), "memory_reserved": 12, "memory_allocated": 3}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    gpu = torch.device("cuda", 0)
    assert reachable(gpu) == 17
    for needed in (14, 15):  # what tensors take now is not free for a model
        monkeypatch.setattr(blockwise, "resident_bytes", lambda *_, needed=needed: needed)
        assert blockwise.fits(torch.nn.Linear(1, 1), [], iobs.Recipe(), gpu) == (needed == 14)


def test_progress_shows_the_memory_of_the_gpu_that_is_used(monkeypatch):
    """Each thread has a current device of its own, which need not be the device of the model."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=0: [0, 2**30][device])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=0: [0, 2**31][device])
    assert _memory(0) == (2**30, 2**31)


GIGABYTE = 1 << 30
STAT = "anon 7\ninactive_file {0}\nactive_file {0}\ntotal_inactive_file {0}\ntotal_active_file {0}\n"


def limited(root, membership, folders):
    """Write the files of a system with 64 GiB free: folder -> (file of the limit, limit, file of the use, use)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n")
    (root / "proc/self/cgroup").write_text(membership)
    for folder, (limit, most, usage, used) in folders.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / limit).write_text(f"{most}\n")
        (root / folder / usage).write_text(f"{used}\n")
        (root / folder / "memory.stat").write_text(STAT.format(GIGABYTE))


def second(most, used):
    return "memory.max", most, "memory.current", used


def first(most, used):
    return "memory.limit_in_bytes", most, "memory.usage_in_bytes", used


@pytest.mark.parametrize(
    ("membership", "folders", "left_in_gib"),
    [
        ("0::/\n", {}, 64),
        ("0::/job\n", {"sys/fs/cgroup/job": second(10 * GIGABYTE, 5 * GIGABYTE)}, 7),
        ("0::/job\n", {"sys/fs/cgroup/job": second("max", 5 * GIGABYTE)}, 64),
        (
            "0::/user/job\n",
            {
                "sys/fs/cgroup/user": second(9 * GIGABYTE, 8 * GIGABYTE),
                "sys/fs/cgroup/user/job": second("max", GIGABYTE),
            },
            3,
        ),
        ("0::/of/the/host\n", {"sys/fs/cgroup": second(6 * GIGABYTE, 4 * GIGABYTE)}, 4),
        ("2:cpu:/\n1:memory:/job\n0::/\n", {"sys/fs/cgroup/memory/job": first(8 * GIGABYTE, 7 * GIGABYTE)}, 3),
        ("1:memory:/\n0::/\n", {"sys/fs/cgroup/memory": first(2**63 - 4096, 7 * GIGABYTE)}, 64),
    ],
    ids=["none", "job", "unlimited", "parent", "container", "version 1", "version 1 unlimited"],
)
def test_available_memory_keeps_to_the_limits_of_its_groups(membership, folders, left_in_gib, tmp_path):
    limited(tmp_path, membership, folders)
    assert available(tmp_path) == left_in_gib * GIGABYTE


def test_a_full_group_is_not_unknown_memory(tmp_path):
    limited(tmp_path, "0::/job\n", {"sys/fs/cgroup/job": second(GIGABYTE, 5 * GIGABYTE)})
    assert available(tmp_path) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_tensors_of_mapped_files_are_told_apart(tmp_path):
    save_file({"weight": torch.ones(64, 64)}, tmp_path / "weights.safetensors")
    mapped, own = load_file(tmp_path / "weights.safetensors")["weight"], torch.ones(64, 64)
    assert mapped_bytes([mapped, own]) == mapped.nbytes
    assert mapped_bytes([own, torch.empty(0)]) == 0
