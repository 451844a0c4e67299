import pytest
import torch
from simulated_gpu import SimulatedGpu

from iobs.pruning.widths import latency


@pytest.fixture(autouse=True)
def short_timings(monkeypatch):
    """Time a network whose units were removed only a few times: no test depends on the seconds of this machine."""
    monkeypatch.setattr(latency, "_SECONDS", 0.01)
    monkeypatch.setattr(latency, "_SLICE", 1e-5)


@pytest.fixture
def gpu(monkeypatch):
    for one in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(one, "synchronize", lambda device=None: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**40, 2**40))
    with SimulatedGpu() as simulated:
        yield simulated
