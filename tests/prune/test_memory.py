"""What the C library keeps of freed tensors."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from iobs.prune.memory import _MMAP_THRESHOLD, MemoryWatch, resident, reusing_memory

MEGABYTE = 1 << 20
PROBE = """
import torch
from iobs.prune.memory import resident, reusing_memory
with reusing_memory():
    tensor = torch.ones(16 << 20)
    filled = resident()
    del tensor
    print((filled - resident()) >> 20)
"""


def left_by(megabytes: int) -> int:
    """Bytes that stay resident after a tensor of this size is freed."""
    before = resident()
    tensor = torch.ones(megabytes * MEGABYTE // 4)
    assert resident() - before > 0.9 * megabytes * MEGABYTE
    del tensor
    return resident() - before


@pytest.fixture(autouse=True)
def nothing_left():
    if sys.platform != "linux" or any("MALLOC_" in name or "TUNABLES" in name for name in os.environ):
        pytest.skip("the C library has no such switch, or it is set from outside")
    with reusing_memory():
        pass  # what earlier tests have left is returned


def test_freed_memory_is_kept_inside_and_returned_at_the_end() -> None:
    before = resident()
    with reusing_memory():
        with reusing_memory():
            pass  # an inner use ends nothing
        if not ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 30):
            pytest.skip("this C library refuses to keep blocks of 64 MB")
        assert left_by(64) > 60 * MEGABYTE
    assert resident() - before < 4 * MEGABYTE
    assert left_by(64) < 4 * MEGABYTE


def test_an_error_ends_it_too() -> None:
    with pytest.raises(ZeroDivisionError), reusing_memory():
        raise ZeroDivisionError
    assert left_by(64) < 4 * MEGABYTE


def test_what_the_user_has_set_stays() -> None:
    """Blocks of 64 MB are then mapped one by one, and returned at once."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MEGABYTE)}
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 60


def test_cuda_is_asked_nothing_about_a_network_on_the_cpu(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a context on the GPU would be made")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert MemoryWatch(torch.device("cpu")).look() > 0


def test_a_gpu_is_asked_about_itself(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 2**50)
    assert MemoryWatch(torch.device("cuda:1")).look() == 2**50
    assert {str(device) for device in asked} == {"cuda:1"}
