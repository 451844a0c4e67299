"""Checkpoints: fingerprints of runs, locks, damaged entries, full disks."""

import copy
import errno
import logging
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from simulated_gpu import on_gpu
from small_runs import problem, prune

import iobs
from iobs.errors import CheckpointError
from iobs.pruning import workspace
from iobs.pruning.runtime import checkpoint
from iobs.pruning.runtime import ranks as distributed
from iobs.pruning.runtime.checkpoint import DiskCheckpoint, fingerprint, identity_of


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"damping": 0.02}, "damping was 0.01 and is 0.02"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"ignore": "0"}, "layers are 2 instead of 3: now without 0"),
        ({"allocation": iobs.Allocation("fisher")}, "allocation.criterion was auto and is fisher"),
        ({"rounds": 3}, "rounds.count was 1 and is 3; rounds.schedule was constant and is auto"),
    ],
)
def test_checkpoint_names_changed_settings(change, named, tmp_path):
    model, data = problem()
    prune(copy.deepcopy(model), data, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=named):
        prune(model, data, checkpoint=tmp_path, **change)


def test_checkpoint_distinguishes_sparsities_that_print_alike(tmp_path):
    model, data = problem()
    iobs.prune(copy.deepcopy(model), data, iobs.Unstructured(0.99991), "one-shot", checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="pattern was"):
        iobs.prune(model, data, iobs.Unstructured(0.99994), "one-shot", checkpoint=tmp_path)


def test_checkpoint_names_changed_weights_and_data(tmp_path):
    model, data = problem()
    prune(copy.deepcopy(model), data, checkpoint=tmp_path)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    with pytest.raises(CheckpointError, match=r"the weights 0\.weight have the same shapes and other contents"):
        prune(other, data, checkpoint=tmp_path)
    data[0][0][0, 0] += 1
    with pytest.raises(CheckpointError, match="the calibration data have the same shapes and other contents"):
        prune(model, data, checkpoint=tmp_path)


@pytest.mark.parametrize(
    "other", [{"inputs": torch.ones(2, 3), "scale": 2.0}, {"hidden": torch.ones(2, 3), "scale": 1.0}]
)
def test_identity_covers_names_and_numbers_of_batches(other):
    batch = {"inputs": torch.ones(2, 3), "scale": 1.0}
    identity = identity_of({}, [], [batch], [])
    assert identity == identity_of({}, [], [copy.deepcopy(batch)], [])
    assert identity != identity_of({}, [], [other], [])


def test_checkpoint_names_changed_amounts_of_data_and_no_digest(tmp_path):
    model, data = problem()
    prune(copy.deepcopy(model), data, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=r"calibration data\.samples was 58 and is 43") as caught:
        prune(model, data[:3], checkpoint=tmp_path)
    assert "sha256" not in str(caught.value)


def test_checkpoint_names_another_device(gpu, tmp_path):
    model, data = problem()
    prune(copy.deepcopy(model), data, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="device was cpu and is cuda"):
        prune(on_gpu(model), data, checkpoint=tmp_path)


def test_checkpoint_names_another_number_of_ranks(tmp_path, monkeypatch):
    model, data = problem()
    prune(copy.deepcopy(model), data, checkpoint=tmp_path)
    monkeypatch.setattr(workspace, "current", lambda: distributed.Ranks(0, 2))
    with pytest.raises(CheckpointError, match="ranks was 1 and is 2"):
        prune(model, data, checkpoint=tmp_path)


def test_checkpoint_removes_half_written_files(tmp_path):
    checkpoint = DiskCheckpoint(tmp_path, {"seed": 0})
    checkpoint.put("a", {"x": torch.ones(2)}, {"n": 1})
    (tmp_path / f".{'0' * 24}.safetensors.partial").write_bytes(b"half")
    (tmp_path / ".run.json.partial").write_bytes(b"half")
    again = DiskCheckpoint(tmp_path, {"seed": 0})
    assert "a" in again
    assert "b" not in again
    assert again.get("a")[1] == {"n": 1}
    assert not list(tmp_path.glob(".*"))


# The lock of a checkpoint, in a process that need not load torch.
HOLDER = """
import fcntl, os, sys
os.mkdir(sys.argv[1])
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""


def test_checkpoint_refuses_a_second_process(tmp_path, monkeypatch):
    import fcntl

    run = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        half = run / f".{'0' * 24}.safetensors.partial"
        half.write_bytes(b"half")  # a file that the running process is writing
        with pytest.raises(CheckpointError, match="Another process is at work"):
            DiskCheckpoint(run, {})
        assert half.exists()
        half.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "current", lambda: distributed.Ranks(1, 2))
            DiskCheckpoint(run, {})  # another rank of the same run
        holder.stdin.close()
        holder.wait()
    first = DiskCheckpoint(run, {})
    assert "a" not in DiskCheckpoint(run, {})  # a stopped run may be resumed while its old object is still alive
    handle = os.open(run, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # as another process that would take the lock
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    assert first is not None


def test_checkpoint_leaves_files_of_others(tmp_path):
    DiskCheckpoint(tmp_path, {})
    half = tmp_path / f".{'0' * 24}.safetensors.partial"
    half.write_bytes(b"half")
    (tmp_path / ".pruned.x1.partial").mkdir()  # an output that another process is writing
    with pytest.raises(CheckpointError, match=r"\.pruned\.x1\.partial, which is no checkpoint"):
        DiskCheckpoint(tmp_path, {})
    assert half.exists()
    assert (tmp_path / ".pruned.x1.partial").is_dir()


def test_checkpoint_stores_gpu_generators(tmp_path, monkeypatch):
    put_back = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.ByteTensor([1]), torch.ByteTensor([2])])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put_back.append((device, state.tolist())))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    checkpoint = DiskCheckpoint(tmp_path, {})
    checkpoint.put("a", {"x": torch.ones(2)}, {})
    tensors, _ = DiskCheckpoint(tmp_path, {}).get("a")
    assert [*tensors] == ["x"]
    assert sorted(put_back) == [(0, [1]), (1, [2])]
    put_back.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of another machine
    DiskCheckpoint(tmp_path, {}).get("a")
    assert put_back == [(0, [1])]


def test_checkpoint_refuses_damaged_entries_and_other_folders(tmp_path):
    checkpoint = DiskCheckpoint(tmp_path / "run", {})
    checkpoint.put("a", {"x": torch.ones(2)}, {})
    next((tmp_path / "run").glob("*.safetensors")).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.get("a")
    (tmp_path / "run" / "holiday.jpg").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holiday\.jpg"):
        DiskCheckpoint(tmp_path / "run", {})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be written"):
        DiskCheckpoint(tmp_path / "file", {})


def test_checkpoint_keeps_earlier_entries_if_the_disk_is_full(tmp_path):
    import resource

    checkpoint = DiskCheckpoint(tmp_path, {})
    checkpoint.put("a", {"x": torch.ones(2)}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="still good"):
            checkpoint.put("b", {"x": torch.ones(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    again = DiskCheckpoint(tmp_path, {})
    assert "a" in again
    assert "b" not in again


@pytest.mark.parametrize(("code", "works"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_checkpoint_needs_no_sync_of_directories(code, works, tmp_path, monkeypatch):
    """Some network and shared folders refuse it; other failures are errors."""
    sync = os.fsync

    def of_files(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        sync(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    if not works:
        with pytest.raises(CheckpointError, match="cannot be written"):
            DiskCheckpoint(tmp_path, {})
        return
    DiskCheckpoint(tmp_path, {}).put("a", {"x": torch.ones(2)}, {})
    assert "a" in DiskCheckpoint(tmp_path, {})


def test_fingerprint_distinguishes_functions_of_one_name():
    def loss_of(factor):
        return lambda model, batch: factor * model(batch).square().mean()

    class Settings:
        def __init__(self, value):
            self.value = value

    assert fingerprint(loss_of(1.0)) == fingerprint(loss_of(1.0))
    assert fingerprint(loss_of(1.0)) != fingerprint(loss_of(2.0))
    assert fingerprint(lambda model, batch: model(batch).sum()) != fingerprint(lambda model, batch: model(batch).mean())
    assert fingerprint(Settings(3)) == fingerprint(Settings(3))
    assert fingerprint(Settings(3)) != fingerprint(Settings(4))


def _with_default(factor):
    def loss(model, batch, *, factor=factor):
        return factor * model(batch).square().mean()

    return loss


class Loss:
    def __init__(self, factor):
        self.factor = factor

    def of(self, model, batch):
        return self.factor * model(batch).square().mean()


class Teacher(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))


@dataclass
class Weighted:
    weights: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        _with_default,
        lambda factor: Loss(factor).of,
        lambda factor: partial(Loss.of, factor=factor),
        Teacher,
        lambda factor: torch.nn.CrossEntropyLoss(label_smoothing=factor / 10),
        lambda factor: torch.nn.Sequential(torch.nn.MSELoss(reduction="mean" if factor == 1 else "sum")),
        lambda factor: Weighted(torch.full((2000,), 1.0).index_fill(0, torch.tensor(1000), factor)),
        lambda factor: {"inner": [np.full(2000, factor)]},
    ],
    ids=["keyword", "method", "partial", "module", "smoothing", "reduction", "dataclass", "containers"],
)
def test_fingerprint_covers_the_values_a_loss_holds(make):
    assert fingerprint(make(1.0)) == fingerprint(make(1.0))
    assert fingerprint(make(1.0)) != fingerprint(make(9.0))


def _around(names):
    """A function that holds a logger, a set, another function and a variable without a value."""
    log = logging.getLogger("a")

    def loss(model, batch):
        log.info(names)
        return "a" in {"b", "c"}

    later = lambda: (loss, log, names, none)  # noqa: E731
    if not names:
        none = 1
    return later


def test_fingerprint_knows_no_addresses_and_no_order_of_sets():
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other], "as the same names may be in two processes"
    first, second = _around(one), _around(other)
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(partial(first, one)) == fingerprint(partial(second, other))
    assert fingerprint(lambda value: value in {0, 8}) == fingerprint(lambda value: value in {8, 0})
    assert fingerprint(first) != fingerprint(_around({0, 9}))


@pytest.mark.slow
def test_fingerprint_is_equal_in_every_process():
    code = (
        "import logging, numpy; from functools import partial\n"
        "from iobs.pruning.runtime.checkpoint import fingerprint\n"
        "log, names = logging.getLogger('a'), {'some', 'other', 'names'}\n"
        "def loss(model, batch, draw=numpy.random.default_rng(0)):\n    log.info(names); return 'a' in {'b', 'c'}\n"
        "def made():\n    inner = loss; later = lambda: (inner, log, names, none)\n"
        "    if not names: none = 1\n    return later\n"
        "print(fingerprint(made()), fingerprint(partial(loss, names)))"
    )
    run = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)]
    assert run[0] == run[1]
