"""The time that is left of a run, from its forecast and the work done so far."""

from types import SimpleNamespace

import families
import menagerie
import pytest

import iobs
from iobs.pruning.cost import seconds
from iobs.pruning.forecast import Forecast, Part, Remaining
from iobs.pruning.progress import ProgressBar
from iobs.pruning.recipe import BlockFit

FORECAST = Forecast((Part("curves", 10, 2.0, once=True), Part("layers", 20, 1.0), Part("steps", 100, 0.5)))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(remaining, clock, name, units, seconds):
    for _ in range(units):
        clock.now += seconds
        remaining.advance(name)


def test_forecast_is_the_time_left_at_first():
    clock = Clock()
    remaining = Remaining(clock)
    assert remaining.left is None
    remaining.expect(FORECAST)
    assert remaining.left == pytest.approx(FORECAST.seconds) == 90


def test_time_left_is_corrected_by_the_work_done():
    clock = Clock()
    remaining = Remaining(clock)
    remaining.expect(FORECAST)
    run(remaining, clock, "curves", 5, 6.0)  # three times slower than forecast
    assert remaining.left == pytest.approx(3 * 80, rel=0.15)
    run(remaining, clock, "curves", 5, 6.0)
    run(remaining, clock, "layers", 20, 1.0)  # as forecast
    run(remaining, clock, "steps", 50, 1.0)
    assert remaining.left == pytest.approx(50, rel=0.1)
    run(remaining, clock, "steps", 50, 1.0)
    assert remaining.left == pytest.approx(0)
    assert remaining.share == pytest.approx(1)


def test_part_that_ends_early_is_over_when_the_next_begins():
    clock = Clock()
    remaining = Remaining(clock)
    remaining.expect(FORECAST)
    run(remaining, clock, "curves", 3, 2.0)
    run(remaining, clock, "layers", 10, 1.0)
    assert remaining.left == pytest.approx(60, rel=0.05)


def test_work_without_a_forecast_goes_on_as_it_began():
    clock = Clock()
    remaining = Remaining(clock)
    remaining.expect_part("stages", 8)
    run(remaining, clock, "stages", 2, 3.0)
    assert remaining.left == pytest.approx(18)


def test_preparations_and_compilation_are_not_taken_for_the_speed():
    clock = Clock()
    remaining = Remaining(clock)
    clock.now = 100.0
    remaining.expect(FORECAST)
    run(remaining, clock, "curves", 3, 50.0)
    assert remaining.left < 2.5 * 84
    run(remaining, clock, "curves", 2, 2.0)
    assert remaining.left == pytest.approx(80, rel=0.35)


@pytest.mark.parametrize("recipe", ["one-shot", "fast", "paper"])
def test_bar_ends_at_the_whole_with_no_time_left(recipe):
    model, data = menagerie.build("perceptron")
    shown = []
    bar = ProgressBar(SimpleNamespace(update=lambda share, total, text, left: shown.append((share, left))))
    changes = {"rounds": 2} if recipe == "paper" else {}
    iobs.prune(model, data, 0.5, recipe, callbacks=[bar], **changes)
    assert all(0 <= share <= 1 for share, _ in shown)
    share, left = shown[-1]
    assert left == pytest.approx(0, abs=1e-6)
    assert share == pytest.approx(1)


@pytest.mark.parametrize("network_steps", [0, 30])
def test_forecast_of_block_reconstruction_counts_its_passes(network_steps, monkeypatch):
    # A machine on which only forward passes take time: a second per sample. Short windows are joined, so count tokens.
    for name, value in {"_OVERHEAD": 0.0, "_GROUP_SHARE": 1.0, "_GROUP_OVERHEAD": 0.0, "_STEP_FORWARDS": 3.0}.items():
        monkeypatch.setattr(seconds, name, value)
    monkeypatch.setattr(
        "iobs.pruning.algorithm.measured_costs", lambda *_: seconds.Costs(1.0, 0.0, 12, dict.fromkeys(names, 0.0))
    )
    model = families.LANGUAGE_MODELS["llama"][0]().eval()
    data, names = families.language_batches(), [name for name, _ in model.named_modules()]
    length, blocks = data[0]["input_ids"].shape[1], model.model.layers
    passes, foretold = [0.0], []

    def count(module, args, output):
        samples = output.shape[:2].numel() / length
        passes[0] += samples * (3 if output.requires_grad else 1) / len(blocks)

    for block in blocks:
        block.self_attn.q_proj.register_forward_hook(count)
    bar = ProgressBar(SimpleNamespace(update=lambda *_: None))
    monkeypatch.setattr(bar, "on_forecast", lambda forecast: foretold.append(forecast.seconds))
    fit = BlockFit(window=1, masks=2, between=10, steps=20, lr=1e-3, network_steps=network_steps, network_lr=1e-4)
    changes = {"solver": "sparsegpt", "target": "residual", "blocks": fit, "holdout": 0.0}
    iobs.prune(model, data, 0.5, callbacks=[bar], **changes)
    assert foretold[0] == pytest.approx(passes[0], rel=0.3)
