import pytest
import torch
from simulated_gpu import SimulatedGpu


@pytest.fixture
def gpu(monkeypatch):
    for one in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(one, "synchronize", lambda device=None: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**40, 2**40))
    with SimulatedGpu() as simulated:
        yield simulated
