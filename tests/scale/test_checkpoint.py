"""A run that is stopped at any moment and resumed ends in the same bits; a checkpoint of another run is refused."""

import copy
import itertools
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

import iobs
from iobs.errors import CheckpointError
from iobs.prune import checkpoint, distributed, workbench
from iobs.prune.checkpoint import Journal, fingerprint
from iobs.prune.progress import Quiet


def falls_off(module, batch):
    """Falls for ever, and is nothing where the last bias has fallen far: short runs end well, long ones diverge."""
    outputs = module(batch[0] if isinstance(batch, tuple) else batch)
    far = torch.is_grad_enabled() and float(module[3].bias.detach().mean()) < FAR
    return outputs.mean() * (float("nan") if far else 1.0)


FAR = -0.2
OPTIONS = {
    "one shot": {},
    "rounds": {"rounds": 3, "step": iobs.GradientStep(lr=1e-3, optimizer="adam", steps=2, loss="kl")},
    "polish": {
        "rounds": 2,
        "step": iobs.GradientStep(lr=1e-2),
        "polish": iobs.GradientStep(lr=1e-3, optimizer="adam", steps=3, loss="kl", parameters="all"),
    },
    "choices": {
        "allocation": iobs.Allocation("evolve", generations=2),
        "polish": iobs.GradientStep(
            lr="auto", optimizer="auto", steps=12, loss="kl", augment="auto", support="fixed", batch_size=5
        ),
    },
    "a long polish that diverges": {
        "polish": iobs.GradientStep(
            lr="auto", optimizer="momentum", steps=36, loss=falls_off, support="fixed", batch_size=5, parameters="all"
        ),
    },
}


class Stop(Exception):
    pass


class StopsAt(Quiet):
    """Raises at the n-th event of a run."""

    def __init__(self, moment):
        self.left = moment

    def _event(self, *_):
        self.left -= 1
        if self.left == 0:
            raise Stop

    layer = step = round = choosing = _event


def problem():
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
    )
    data = [(torch.randn(16, 12), torch.randint(0, 4, (16,))) for _ in range(4)]
    return model, data


def prune(model, data, **options):
    return iobs.prune(model, data, iobs.Unstructured(0.5), solver="sparsegpt", **options)


@pytest.mark.parametrize("every", [0.0, 120.0])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_resumed_runs_end_in_the_same_bits(options, every, tmp_path, monkeypatch):
    monkeypatch.setattr(workbench, "SAVED_EVERY", every)
    model, data = problem()
    undisturbed = copy.deepcopy(model)
    expected = prune(undisturbed, data, **options)
    for moment in itertools.count(1):
        stopped = copy.deepcopy(model)
        try:
            prune(stopped, data, checkpoint=tmp_path / "run", progress=StopsAt(moment), **options)
        except Stop:
            continue  # the same checkpoint is stopped later and later
        break
    assert moment > 3
    fresh = copy.deepcopy(model)
    report = prune(fresh, data, checkpoint=tmp_path / "run", **options)
    for network in (stopped, fresh):
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), undisturbed.parameters(), strict=True))
    assert [record.loss_heldout for record in report.rounds] == [record.loss_heldout for record in expected.rounds]
    assert report.best_round == expected.best_round


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"damping": 0.02}, "damping was 0.01 and is 0.02"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"skip": "0"}, "layers was"),
    ],
)
def test_changed_settings_are_refused_by_name(change, named, tmp_path):
    model, data = problem()
    prune(copy.deepcopy(model), data, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match=named):
        prune(model, data, checkpoint=tmp_path, **change)


def test_a_sparsity_that_is_written_alike_is_another(tmp_path):
    model, data = problem()
    iobs.prune(copy.deepcopy(model), data, iobs.Unstructured(0.99991), checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="pattern was"):
        iobs.prune(model, data, iobs.Unstructured(0.99994), checkpoint=tmp_path)


def test_changed_weights_and_data_are_refused_by_name(tmp_path):
    model, data = problem()
    prune(copy.deepcopy(model), data, checkpoint=tmp_path)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    with pytest.raises(CheckpointError, match=r"weights 0\.weight"):
        prune(other, data, checkpoint=tmp_path)
    data[0][0][0, 0] += 1
    with pytest.raises(CheckpointError, match="data"):
        prune(model, data, checkpoint=tmp_path)


def test_what_was_half_written_is_ignored_and_removed(tmp_path):
    journal = Journal(tmp_path, {"seed": 0})
    journal.put("a", {"x": torch.ones(2)}, {"n": 1})
    (tmp_path / f".{'0' * 24}.safetensors.partial").write_bytes(b"half")
    (tmp_path / ".run.json.partial").write_bytes(b"half")
    again = Journal(tmp_path, {"seed": 0})
    assert "a" in again
    assert "b" not in again
    assert again.get("a")[1] == {"n": 1}
    assert not list(tmp_path.glob(".*"))


HOLDER = """
import sys
from iobs.prune.checkpoint import Journal
journal = Journal(sys.argv[1], {})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_takes_nothing_away(tmp_path, monkeypatch):
    run = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        half = run / f".{'0' * 24}.safetensors.partial"
        half.write_bytes(b"half")  # which the living run is writing
        with pytest.raises(CheckpointError, match="Another process is at work"):
            Journal(run, {})
        assert half.exists()
        half.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "current", lambda: distributed.Ranks(1, 2))
            Journal(run, {})  # another rank of the same run
        holder.stdin.close()
        holder.wait()
    first = Journal(run, {})
    assert "a" not in Journal(run, {})  # a run that was stopped may be resumed before Python has let go of it
    assert first is not None


def test_what_is_not_the_journals_stays_whatever_it_is_called(tmp_path):
    Journal(tmp_path, {})
    half = tmp_path / f".{'0' * 24}.safetensors.partial"
    half.write_bytes(b"half")
    (tmp_path / ".pruned.x1.partial").mkdir()  # an output that another process is writing
    with pytest.raises(CheckpointError, match=r"\.pruned\.x1\.partial, which is no checkpoint"):
        Journal(tmp_path, {})
    assert half.exists()
    assert (tmp_path / ".pruned.x1.partial").is_dir()


def test_the_generators_of_gpus_are_kept_too(tmp_path, monkeypatch):
    put_back = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.ByteTensor([1]), torch.ByteTensor([2])])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put_back.append((device, state.tolist())))
    journal = Journal(tmp_path, {})
    journal.put("a", {"x": torch.ones(2)}, {})
    tensors, _ = Journal(tmp_path, {}).get("a")
    assert [*tensors] == ["x"]
    assert sorted(put_back) == [(0, [1]), (1, [2])]


def test_damaged_entries_and_strange_directories_are_clear_errors(tmp_path):
    journal = Journal(tmp_path / "run", {})
    journal.put("a", {"x": torch.ones(2)}, {})
    next((tmp_path / "run").glob("*.safetensors")).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="damaged"):
        journal.get("a")
    (tmp_path / "run" / "holiday.jpg").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holiday\.jpg"):
        Journal(tmp_path / "run", {})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Journal(tmp_path / "file", {})


def test_a_full_disk_stops_cleanly_and_earlier_entries_stay_good(tmp_path):
    import resource

    journal = Journal(tmp_path, {})
    journal.put("a", {"x": torch.ones(2)}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="still good"):
            journal.put("b", {"x": torch.ones(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    again = Journal(tmp_path, {})
    assert "a" in again
    assert "b" not in again


def test_another_function_of_the_same_name_is_another_run():
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
        lambda factor: Weighted(torch.full((2000,), 1.0).index_fill(0, torch.tensor(1000), factor)),
        lambda factor: {"inner": [np.full(2000, factor)]},
    ],
    ids=["keyword", "method", "partial", "module", "dataclass", "containers"],
)
def test_what_a_loss_holds_tells_it_from_another(make):
    assert fingerprint(make(1.0)) == fingerprint(make(1.0))
    assert fingerprint(make(1.0)) != fingerprint(make(9.0))


def test_what_a_loss_holds_is_the_same_in_every_process():
    code = (
        "import logging, numpy; from functools import partial; from iobs.prune.checkpoint import fingerprint\n"
        "log, names = logging.getLogger('a'), {'some', 'other', 'names'}\n"
        "def loss(model, batch, draw=numpy.random.default_rng(0)):\n    log.info(names); return 'a' in {'b', 'c'}\n"
        "def made():\n    inner = loss; later = lambda: (inner, log, names, none)\n"
        "    if not names: none = 1\n    return later\n"
        "print(fingerprint(made()), fingerprint(partial(loss, names)))"
    )
    run = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)]
    assert run[0] == run[1]


def test_a_network_that_counts_its_forward_passes_can_be_resumed(tmp_path):
    class Counting(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
            self.register_buffer("passes", torch.zeros(1))

        def forward(self, inputs):
            self.passes += 1
            return super().forward(inputs)

    model, data = Counting(), torch.randn(20, 8)
    with pytest.raises(Stop):
        iobs.prune(model, data, iobs.Unstructured(0.5), checkpoint=tmp_path, progress=StopsAt(3))
    assert model.passes == 0
    iobs.prune(model, data, iobs.Unstructured(0.5), checkpoint=tmp_path)
