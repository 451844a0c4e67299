"""Solvers of a whole network inside the rounds: schedule, fresh data, and what they do not need."""

import threading

import menagerie
from torch import nn

import iobs
from iobs.pruning import baselines

STEP = iobs.FineTune(lr=1e-2, steps=2, loss="task")


class Zeros(iobs.Callback):
    def __init__(self):
        self.found = []

    def on_start(self, model, layers, rounds):
        self.matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]

    def on_round(self, record):
        zeros = sum(int((weight == 0).sum()) for weight in self.matrices)
        self.found.append((record.asked, zeros / sum(weight.numel() for weight in self.matrices)))


def test_network_solver_follows_the_cubic_schedule():
    model, data = menagerie.build("perceptron")
    zeros = Zeros()
    recipe = iobs.Recipe(solver=iobs.CHITA(block=50), rounds=iobs.Rounds(4, "cubic", finetune=STEP))
    iobs.prune(model, data, 0.7, recipe, callbacks=[zeros])
    first, second, third, last = (asked for asked, _ in zeros.found)
    assert second < third < last == first
    for asked, real in zeros.found:
        assert abs(asked - real) < 0.01


def test_one_round_of_a_network_solver_has_no_schedule_to_decide():
    model, data = menagerie.build("perceptron")
    recipe = iobs.Recipe(solver="global-magnitude", rounds=iobs.Rounds(1, "auto"))
    assert len(iobs.prune(model, data, 0.7, recipe).rounds) == 1


def test_network_solver_sees_its_own_part_of_fresh_data(monkeypatch):
    seen = []
    real = baselines.gradient_rows

    def counted(model, layers, samples):
        seen.append(samples.samples)
        return real(model, layers, samples)

    monkeypatch.setattr(baselines, "gradient_rows", counted)
    model, data = menagerie.build("perceptron")
    rounds = iobs.Rounds(2, finetune=STEP, data="fresh")
    iobs.prune(model, data, 0.7, iobs.Recipe(solver=iobs.CHITA(block=50), rounds=rounds), holdout=0.0)
    assert seen == [32, 32]


def test_one_shot_network_solver_needs_no_copy_of_the_model():
    model, data = menagerie.build("perceptron")
    model.lock = threading.Lock()  # which cannot be copied
    report = iobs.prune(model, data, 0.5, iobs.Recipe(solver="chita"), holdout=0.0)
    assert report.zeros == report.weights // 2
    assert report.loss_name == "not measured"
