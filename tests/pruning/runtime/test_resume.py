"""A run that is stopped at any moment and resumed ends in the same bits."""

import copy
import itertools

import pytest
import torch
from small_runs import problem, prune

import iobs
from iobs.errors import OtherRunError
from iobs.pruning import descent
from iobs.pruning.plan.curves import CurveSweep
from iobs.pruning.runtime import checkpoint


def falls_off(module, batch):
    """A loss without lower bound that is NaN once the last bias is far below 0: only long runs diverge."""
    outputs = module(batch[0] if isinstance(batch, tuple) else batch)
    far = torch.is_grad_enabled() and float(module[3].bias.detach().mean()) < FAR
    return outputs.mean() * (float("nan") if far else 1.0)


FAR = -0.2


OPTIONS = {
    "one shot": {},
    "rounds": {"rounds": iobs.Rounds(3, finetune=iobs.FineTune(lr=1e-3, optimizer="adam", steps=2, loss="kl"))},
    "finetune": {
        "rounds": iobs.Rounds(2, finetune=iobs.FineTune(lr=1e-2)),
        "finetune": iobs.FineTune(lr=1e-3, optimizer="adam", steps=3, loss="kl", parameters="all"),
    },
    "choices": {
        "allocation": iobs.Allocation("search", generations=2),
        "finetune": iobs.FineTune(
            lr="auto", optimizer="auto", steps=12, loss="kl", augment="auto", support="fixed", batch_size=5
        ),
    },
    "on a grid": {
        "pattern": iobs.Unstructured(0.5) & iobs.Grid(4, 8),
        "finetune": iobs.FineTune(lr=1e-3, optimizer="adam", steps=3, loss="kl", parameters="all"),
    },
    "a long fine-tuning that diverges": {
        "finetune": iobs.FineTune(
            lr="auto", optimizer="momentum", steps=36, loss=falls_off, support="fixed", batch_size=5, parameters="all"
        ),
    },
}


class Stop(Exception):
    pass


class StopsAt(iobs.Callback):
    """Raises at the n-th event of a run."""

    def __init__(self, moment):
        self.left = moment

    def _event(self, *_):
        self.left -= 1
        if self.left == 0:
            raise Stop

    on_layer = on_step = on_round = on_measure = _event


# Saved at every event, and at the ends of phases alone, which the decisions in between must not change.
@pytest.mark.parametrize(
    ("options", "every"),
    [
        pytest.param(options, every, id=f"{name}-{every:g}")
        for name, options in OPTIONS.items()
        for every in ((0.0, 120.0) if name in ("one shot", "rounds") else (0.0,))
    ],
)
def test_resumed_run_ends_in_the_same_bits(options, every, tmp_path, monkeypatch):
    monkeypatch.setattr(descent, "SECONDS_BETWEEN_SAVES", every)
    model, data = problem()
    undisturbed = copy.deepcopy(model)
    expected = prune(undisturbed, data, **options)
    for moment in itertools.count(1):
        stopped = copy.deepcopy(model)
        try:
            prune(stopped, data, checkpoint=tmp_path / "run", callbacks=[StopsAt(moment)], **options)
        except Stop:
            continue  # the next attempt resumes this checkpoint and is stopped later
        break
    assert moment > 3
    fresh = copy.deepcopy(model)
    report = prune(fresh, data, checkpoint=tmp_path / "run", **options)
    for network in (stopped, fresh):
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), undisturbed.parameters(), strict=True))
    assert [record.loss_heldout for record in report.rounds] == [record.loss_heldout for record in expected.rounds]
    assert report.best_round == expected.best_round


def test_seconds_of_a_resumed_run_are_those_of_all_its_parts(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: clock[0])
    first = checkpoint.DiskCheckpoint(tmp_path / "c", {})
    assert first.earlier == 0
    for clock[0] in (5.0, 7.0):
        first.put(f"entry at {clock[0]}", {}, {})
    clock[0] = 100.0  # the pause does not count
    second = checkpoint.DiskCheckpoint(tmp_path / "c", {})
    assert second.earlier == 7.0
    clock[0] = 103.0
    second.put("last", {}, {})
    assert checkpoint.DiskCheckpoint(tmp_path / "c", {}).earlier == 10.0


def test_gates_of_a_recurrent_layer_are_resumed_with_the_inputs_that_all_of_them_gave(tmp_path):
    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = torch.nn.LSTM(6, 6, batch_first=True)

        def forward(self, x):
            return self.cells(x)[0][:, -1]

    torch.manual_seed(0)
    model = torch.nn.Sequential(Last(), torch.nn.Linear(6, 3))
    data = [torch.randn(8, 5, 6) for _ in range(3)]
    undisturbed, resumed = copy.deepcopy(model), copy.deepcopy(model)
    iobs.prune(undisturbed, data, 0.5, "one-shot")
    with pytest.raises(Stop):  # two of the four gates of the hidden state are pruned
        iobs.prune(resumed, data, 0.5, "one-shot", checkpoint=tmp_path, callbacks=[StopsAt(6)])
    iobs.prune(resumed, data, 0.5, "one-shot", checkpoint=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), undisturbed.parameters(), strict=True))


def test_resumed_run_restores_buffers_that_forward_changes(tmp_path):
    class Counting(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
            self.register_buffer("passes", torch.zeros(1))

        def forward(self, inputs):
            self.passes += 1
            return super().forward(inputs)

    model, data = Counting(), torch.randn(20, 8)
    with pytest.raises(Stop):
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", checkpoint=tmp_path, callbacks=[StopsAt(3)])
    assert model.passes == 0
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", checkpoint=tmp_path)


def test_run_with_other_frozen_parameters_is_another_run(tmp_path):
    model, data = problem()
    frozen = copy.deepcopy(model)
    frozen[0].bias.requires_grad_(False)
    with pytest.raises(Stop):
        prune(copy.deepcopy(model), data, checkpoint=tmp_path, callbacks=[StopsAt(3)])
    with pytest.raises(OtherRunError, match="frozen parameters was none"):
        prune(frozen, data, checkpoint=tmp_path)
    prune(model, data, checkpoint=tmp_path)


def test_stopped_run_measures_nothing_twice(tmp_path, monkeypatch):
    """Only what was measured at the moment of the stop is measured again."""
    measure, done = CurveSweep._damages, []

    def counted(*args):
        found = measure(*args)
        done.append(1)
        return found

    monkeypatch.setattr(CurveSweep, "_damages", counted)
    model, data = problem()
    iobs.prune(copy.deepcopy(model), data, 0.5, "one-shot", allocation="auto")
    undisturbed = len(done)
    assert undisturbed >= 2
    done.clear()
    for attempt in itertools.count(1):
        try:
            stops = [StopsAt(attempt)]
            iobs.prune(model, data, 0.5, "one-shot", checkpoint=tmp_path, callbacks=stops, allocation="auto")
        except Stop:
            continue
        break
    assert attempt > 3
    assert len(done) == undisturbed
