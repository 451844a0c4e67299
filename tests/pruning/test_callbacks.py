"""Callbacks, the logger and the progress bar tell the same run."""

import logging
import re
import time
from io import StringIO

import menagerie
import pytest
import torch
from rich.console import Console

import iobs
from iobs.core import steps as progress
from iobs.core.steps import Steps
from iobs.pruning.callbacks import ProgressBar


class Everything(iobs.Callback):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda *arguments: self.events.append((name, *arguments))
        return super().__getattribute__(name)


def test_callbacks_are_told_everything_in_order():
    model, data = menagerie.build("perceptron")
    watch = Everything()
    report = iobs.prune(model, data, 0.5, "paper", rounds=2, callbacks=[watch])
    names = [name for name, *_ in watch.events]
    assert names[0] == "on_start"
    assert watch.events[0][2:] == (["fc1", "fc2", "fc3"], 2)
    assert names[-1] == "on_end"
    assert watch.events[-1][1] is report
    told = [name for name in names if name in ("on_layer", "on_round", "on_step")]
    assert told == ["on_layer"] * 3 + ["on_round", "on_step"] + ["on_layer"] * 3 + ["on_round"]
    assert [text for name, *text in watch.events if name == "on_note"] == [[note] for note in report.notes]


def test_on_round_sees_the_projected_model():
    model, data = menagerie.build("perceptron")
    zeros = []

    class Count(iobs.Callback):
        def on_start(self, model, layers, rounds):
            self.model = model

        def on_round(self, record):
            zeros.append(int((self.model.fc1.weight == 0).sum()))

    iobs.prune(model, data, 0.5, "paper", rounds=3, callbacks=[Count()])
    assert zeros == [96, 96, 96]


def test_an_error_in_a_callback_gives_the_weights_back():
    model, data = menagerie.build("perceptron")
    before = [value.clone() for value in model.parameters()]

    class Stop(iobs.Callback):
        def on_layer(self, record, round_index):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        iobs.prune(model, data, 0.5, callbacks=[Stop()])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_logger_tells_what_is_decided_and_done(caplog):
    model, data = menagerie.build("perceptron")
    with caplog.at_level(logging.INFO, logger="iobs"):
        report = iobs.prune(model, data, 0.5)
    text = caplog.text
    assert "Pruning 3 layers of Perceptron" in text
    assert all(note in text for note in report.notes)
    assert "weights are zero" in text


def test_nothing_is_shown_unless_asked(capsys):
    model, data = menagerie.build("perceptron")
    iobs.prune(model, data, 0.5)
    assert capsys.readouterr() == ("", "")


def test_progress_prints_plain_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_INTERVAL", 0.0)
    monkeypatch.setattr(progress, "_LONGEST_INTERVAL", 0.0)
    model, data = menagerie.build("perceptron")
    iobs.prune(model, data, 0.5, "one-shot", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert any(re.match(r"fc2: \d+ %, about .+ left, memory [\d.]+ [MG]B", line) for line in lines)
    assert lines[-1].startswith("losses: 1 of 1: 100 %")


def test_a_log_gets_lines_during_a_long_step(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_INTERVAL", 0.1)
    out = StringIO()
    with Steps("pruning", Console(file=out, width=100)) as steps:
        for left, fact in ((60.0, "about .+ left"), (-1.0, ".+ so far")):
            steps.update(1, 4, "fc1", left)
            began = len(out.getvalue())
            while len(out.getvalue()) == began:  # nothing calls `update` any more
                time.sleep(0.05)
            assert re.fullmatch(rf"fc1: 25 %, {fact}, memory [\d.]+ [MG]B .+\n", out.getvalue()[began:])
    ended = out.getvalue()
    time.sleep(0.3)
    assert out.getvalue() == ended


def test_progress_is_a_bar_on_a_terminal():
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    model, data = menagerie.build("perceptron")
    with Steps("pruning", console) as steps:
        iobs.prune(model, data, 0.5, "one-shot", callbacks=[ProgressBar(steps, "mine, ")])
    assert "mine, losses: 1 of 1" in out.getvalue()
    assert " left" in out.getvalue()
