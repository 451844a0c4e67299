"""Progress of a run in a terminal and as plain lines."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

from iobs.cli import console
from iobs.cli.console import ConsoleSteps
from iobs.cli.running import Watch
from iobs.pruning.report import LayerRecord, RoundRecord
from iobs.pruning.runtime import ranks as distributed


def test_watch_counts_layers_and_steps(monkeypatch):
    told = []
    steps = SimpleNamespace(update=lambda share, _, text, left: told.append((share, left, text)))
    watch = Watch(steps, "x: ")
    layer = LayerRecord("l", (2, 2), 0.5, 2, 0.1, None, 0.1, 0.01, 0, 5, 0.1)
    watch.on_start(None, ["l", "m"], 2)
    for round_index in range(2):
        watch.on_layer(layer, round_index)
        watch.on_layer(layer, round_index)
        watch.on_round(RoundRecord(round_index, 0.5, 1.0, None, [layer]))
        for step in range(3 if round_index == 0 else 0):
            watch.on_step(round_index, step + 1, 3, 0.5)
    assert [text for _, _, text in told[1:4]] == [
        "x: round 1 of 2, l",
        "x: round 1 of 2, l",
        "x: round 1 of 2, step 1 of 3, loss 0.500",
    ]
    watch.on_step(2, 1, 1, 0.25)
    assert told[-1] == (1.0, 0.0, "x: fine-tuning: step 1 of 1, loss 0.250")


def test_plain_progress_prints_a_line_at_intervals(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("iobs.core.steps.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("iobs.core.steps._memory", lambda peak: (512_000_000, 2_100_000_000))
    with ConsoleSteps("work") as steps:
        for clock[0], done in ((1.0, 1), (20.0, 5), (21.0, 6)):
            steps.update(done, 10)
    shown = capsys.readouterr().err
    assert shown == "work: 50 %, about 20 s left, memory 512 MB (peak 2.1 GB)\n"


def test_a_log_of_hours_has_a_line_a_minute(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("iobs.core.steps.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("iobs.core.steps._memory", lambda peak: (512_000_000, 2_100_000_000))
    with ConsoleSteps("work") as steps:
        for second in range(1, 7201):
            clock[0] = float(second)
            steps.update(second, 7200)
    assert 115 <= capsys.readouterr().err.count("work") <= 135


def test_watch_leaves_out_steps_of_the_resumed_run():
    clock, left = [0.0], []
    steps = SimpleNamespace(update=lambda share, total, text, seconds: left.append(seconds))
    watch = Watch(steps, clock=lambda: clock[0])
    watch.on_start(None, ["l"], 1)
    for done in range(301, 601):
        clock[0] += 2.0
        watch.on_step(1, done, 600, 0.5)
        assert left[-1] == pytest.approx(2.0 * (600 - done), abs=1e-6)


def test_watch_prints_projection_and_finetuning_results(capsys):
    steps = SimpleNamespace(update=lambda *_: None)
    projection = RoundRecord(0, 0.5, 1.0, 0.75, [], seconds=2.0)
    finetuned = RoundRecord(1, 0.5, 1.0, 0.25, [], [0.1, 0.1], seconds=3.0, kind="finetune", parent=0)
    watch = Watch(steps, "x, ")
    watch.on_start(None, ["l"], 5)
    watch.on_rounds(1)
    watch.on_round(projection)
    assert capsys.readouterr().err == ""  # a single projection is the result, printed at the end
    watch.on_step(1, 1, 2, 0.1)
    assert capsys.readouterr().err == "x, projection: 50.0 % zeros, loss 0.7500, 2.0 s\n"
    watch.on_round(finetuned)
    assert capsys.readouterr().err == "x, fine-tuning of 2 steps: 50.0 % zeros, loss 0.2500, 3.0 s\n"
    quiet = Watch(steps, quiet=True)
    quiet.on_start(None, ["l"], 1)
    quiet.on_round(projection)
    quiet.on_step(1, 1, 2, 0.1)
    quiet.on_round(finetuned)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    """Records the output of a terminal."""

    def isatty(self):
        return True


def test_messages_are_printed_above_the_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    with ConsoleSteps("work") as steps:
        steps.update(1, 2)
        Watch(steps).on_note("a note")
        console._show_warning("a warning", UserWarning)
    # Each message starts after the erased bar and ends with a newline.
    sent = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert "\x1b[2Ka note\n" in sent
    assert "\x1b[2KWarning: a warning\n" in sent


@pytest.mark.parametrize("rank", [0, 1])
def test_progress_is_shown_on_the_first_rank_only(monkeypatch, rank):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(distributed, "current", lambda: distributed.Ranks(rank, 2))
    monkeypatch.setattr("iobs.core.steps._PLAIN_INTERVAL", 0.0)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with ConsoleSteps("work") as steps:
            steps.update(1, 2)
            console.say("a note")
        shown = stream.getvalue()
        assert ("work" in shown, "a note" in shown) == (rank == 0, rank == 0)
        assert bool(shown) == (rank == 0)
