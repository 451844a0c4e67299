"""A full device is an error of its own: no check takes it for a refusal of the model, and none renames it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from traced_sites import find_sites

import iobs
from iobs.errors import is_out_of_memory
from iobs.pruning.blockwise.offloaded import OffloadedStore
from iobs.pruning.calibration import losses, replay
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.chains import running_along_is_exact
from iobs.pruning.calibration.losses import task_loss
from iobs.pruning.calibration.observe import changing_modules, observe
from iobs.pruning.calibration.uses import Tracker
from iobs.pruning.network.copies import dense_copy
from iobs.pruning.network.folding import folded
from iobs.pruning.network.layers import find_layers
from iobs.pruning.runtime.ranks import explained
from iobs.pruning.structure import expected

FULL = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
]
OTHERS = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
]


def test_words_of_a_full_device_are_known():
    assert [text for text in FULL if not is_out_of_memory(RuntimeError(text))] == []
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert [text for text in OTHERS if is_out_of_memory(RuntimeError(text))] == []


class Full:
    """Raises the error of a full device at its first call and whenever it is copied."""

    def __init__(self, result=None):
        self.result, self.calls = result, 0

    def __call__(self, *arguments, **named):
        self.calls += 1
        if self.calls == 1:
            raise torch.OutOfMemoryError(FULL[0])
        return self.result

    def __deepcopy__(self, memo):
        raise torch.OutOfMemoryError(FULL[0])


class Fills(nn.Linear):
    """A linear layer whose first forward pass fills the device."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 1:
            raise torch.OutOfMemoryError(FULL[0])
        return super().forward(x)


class Doubled(nn.Module):
    """A parametrisation that can be inverted, if it can be copied."""

    def __init__(self):
        super().__init__()
        self.full = Full()

    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


class Blocks(nn.Module):
    """A chain of two blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.full: object = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def chain_is_checked(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), Fills(4, 4))
    running_along_is_exact(model, [Block("0", 0), Block("1", 0)], [torch.ones(2, 4)], find_layers(model))


def dense_model_is_copied(monkeypatch):
    model = Blocks()
    model.full = Full()
    dense_copy(model)


def dense_blocks_are_copied(monkeypatch):
    model = Blocks()
    model.full = Full()
    iobs.prune(OffloadedStore(model, "cpu"), [torch.randn(8, 4)], 0.5, iobs.Recipe(target="residual"))


def labels_have_a_loss(monkeypatch):
    monkeypatch.setattr(losses.functional, "cross_entropy", Full())
    task_loss(nn.Linear(4, 3), (torch.ones(2, 4), torch.tensor([0, 2])))


def parametrisation_is_inverted(monkeypatch):
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Doubled())
    with folded(model):
        pass


def site_is_verified(monkeypatch):
    model, batch = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), torch.randn(2, 4)
    sites = find_sites(model, batch)
    monkeypatch.setattr(expected, "remove", Full())
    expected.verify(model, [batch], sites)


def model_is_observed(monkeypatch):
    observe(nn.Sequential(nn.Linear(4, 4), Fills(4, 4)), [torch.ones(2, 4)], 0)


def product_is_compared(monkeypatch):
    model = nn.Sequential(Fills(4, 4))
    changing_modules(model, find_layers(model), torch.ones(2, 4))


def shortcut_is_tried(monkeypatch):
    replay._is_exact(SimpleNamespace(model=nn.Identity(), run=Full()), 0, 0, [], {}, None)


def copies_are_followed(monkeypatch):
    weight = nn.Parameter(torch.ones(2, 2))
    joined = torch.cat([weight, weight])
    Tracker({"weight": weight}).follow("cat", Full(joined), ([weight, weight],), {}, joined)


def ranks_exchange(monkeypatch):
    with explained():
        raise torch.OutOfMemoryError(FULL[0])


@pytest.mark.parametrize(
    "check",
    [
        *(chain_is_checked, dense_model_is_copied, dense_blocks_are_copied, labels_have_a_loss, site_is_verified),
        *(parametrisation_is_inverted, model_is_observed, product_is_compared, shortcut_is_tried, copies_are_followed),
        ranks_exchange,
    ],
    ids=lambda check: check.__name__,
)
def test_full_device_is_not_taken_for_a_refusal(check, monkeypatch):
    with pytest.raises(torch.OutOfMemoryError):
        check(monkeypatch)
