"""The time that is left of a run, from its forecast and the work done so far."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import families
import menagerie
import pytest
import torch
from typer.testing import CliRunner

import iobs
from iobs.cli import app
from iobs.models import EMBEDDED
from iobs.pruning.callbacks import ProgressBar
from iobs.pruning.cost import prices
from iobs.pruning.cost import work as cost
from iobs.pruning.cost.foresight import Foresight
from iobs.pruning.driver import requested, selected_for
from iobs.pruning.forecast import Forecast, Part, Remaining
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import STRUCTURED, BlockFit, LayerSettings
from iobs.pruning.samples.batches import Samples
from iobs.pruning.store import Store
from iobs.pruning.workspace import Decisions

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
    assert remaining.seconds_left is None
    remaining.expect(FORECAST)
    assert remaining.seconds_left == pytest.approx(FORECAST.seconds) == 90


def test_time_left_is_corrected_by_the_work_done():
    clock = Clock()
    remaining = Remaining(clock)
    remaining.expect(FORECAST)
    run(remaining, clock, "curves", 5, 6.0)  # three times slower than forecast
    assert remaining.seconds_left == pytest.approx(3 * 80, rel=0.15)
    run(remaining, clock, "curves", 5, 6.0)
    run(remaining, clock, "layers", 20, 1.0)  # as forecast
    run(remaining, clock, "steps", 50, 1.0)
    assert remaining.seconds_left == pytest.approx(50, rel=0.1)
    run(remaining, clock, "steps", 50, 1.0)
    assert remaining.seconds_left == pytest.approx(0)
    assert remaining.share == pytest.approx(1)


def test_part_that_ends_early_is_over_when_the_next_begins():
    clock = Clock()
    remaining = Remaining(clock)
    remaining.expect(FORECAST)
    run(remaining, clock, "curves", 3, 2.0)
    run(remaining, clock, "layers", 10, 1.0)
    assert remaining.seconds_left == pytest.approx(60, rel=0.05)


def test_work_without_a_forecast_goes_on_as_it_began():
    clock = Clock()
    remaining = Remaining(clock)
    remaining.expect_part("stages", 8)
    run(remaining, clock, "stages", 2, 3.0)
    assert remaining.seconds_left == pytest.approx(18)


def test_long_preparations_leave_the_time_of_all_units_but_one():
    clock = Clock()
    remaining = Remaining(clock)
    remaining.expect(FORECAST)
    clock.now = 300.0
    assert remaining.share == 0
    assert remaining.seconds_left == pytest.approx(FORECAST.seconds - 2.0)  # "0 %, about 0 s left" was shown


def test_preparations_and_compilation_are_not_taken_for_the_speed():
    clock = Clock()
    remaining = Remaining(clock)
    clock.now = 100.0
    remaining.expect(FORECAST)
    run(remaining, clock, "curves", 3, 50.0)
    assert remaining.seconds_left < 2.5 * 84
    run(remaining, clock, "curves", 2, 2.0)
    assert remaining.seconds_left == pytest.approx(80, rel=0.35)


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
    # A machine on which only forward passes take time: a second per token.
    for name, value in {"_GROUP": 1.0, "_GROUP_CALL": 0.0, "STEP_PASSES": 3.0}.items():
        monkeypatch.setattr(cost, name, value)
    measure, only_passes = prices.measure, cost.Prices(1.0, 0.0, 0.0, 0.0)
    monkeypatch.setattr("iobs.pruning.algorithm.measure", lambda *given: (measure(*given)[0], only_passes))
    model = families.LANGUAGE_MODELS["llama"][0]().eval()
    data, passes, foretold = families.language_batches(), [0.0], []
    blocks = model.model.layers

    def count(module, args, output):
        passes[0] += output.shape[:2].numel() * (3 if output.requires_grad else 1) / len(blocks)

    for block in blocks:
        block.self_attn.q_proj.register_forward_hook(count)
    bar = ProgressBar(SimpleNamespace(update=lambda *_: None))
    monkeypatch.setattr(bar, "on_forecast", lambda forecast: foretold.append(forecast.seconds))
    fit = BlockFit(window=1, masks=2, between=10, steps=20, lr=1e-3, network_steps=network_steps, network_lr=1e-4)
    changes = {"solver": "sparsegpt", "target": "residual", "blocks": fit, "holdout": 0.0}
    iobs.prune(model, data, 0.5, callbacks=[bar], **changes)
    assert foretold[0] == pytest.approx(passes[0], rel=0.3)


def layers(count, rows, columns):
    return [Layer(f"layers.{index}", (rows, columns)) for index in range(count)]


def forecast_of(recipe, depth, **changes):
    """The forecast of a run of a model with `depth` blocks of four layers, and equal prices of everything."""
    every = layers(4 * depth, 64, 64)
    sizes = {"held_out": 0.1, "blocks": depth, "step": 50.0, "inputs": cost.inputs_by_width(every, depth)} | changes
    work = cost.Work(every, 100, 1000, model_bytes=10**6, **sizes)
    decided = Decisions(recipe.rounds, None, blocks=recipe.blocks)
    return cost.forecast(work, cost.Prices(1e-3 * depth, 1e-9, 1e-9, 2e-9, 1e-3, byte=1e-9), recipe, decided)


@pytest.mark.parametrize("name", ["one-shot", "fast"])
def test_forecast_grows_linearly_with_depth(name):
    recipe = iobs.Recipe.preset(name)
    times = [forecast_of(recipe, depth) for depth in (10, 20, 40)]
    phases = [{key: value for key, value in one.phases.items() if key != "allocation"} for one in times]
    for phase in phases[0]:
        assert phases[2][phase] - phases[1][phase] == pytest.approx(2 * (phases[1][phase] - phases[0][phase]), rel=0.1)


def test_phases_of_a_forecast_take_its_time():
    forecast = forecast_of(iobs.Recipe.preset("best"), 4, whole=True)
    assert sum(forecast.phases.values()) == pytest.approx(forecast.seconds)
    assert {"allocation", "Grams", "solves", "steps of blocks", "steps of the network"} <= forecast.phases.keys()


def test_solver_changes_the_forecast_by_what_it_declares():
    times = {solver: forecast_of(iobs.Recipe(solver=solver), 4).phases["solves"] for solver in ("admm", "sparsegpt")}
    assert times["admm"] > 2 * times["sparsegpt"]


def test_small_layers_are_priced_by_solves_of_their_own_shape():
    measured = cost.Prices(0.0, 0.0, 1e-9, 2e-9, measured={"small": 0.5})
    small, other = (Layer(name, (8, 8)) for name in ("small", "other"))
    solves = cost.Solves(LayerSettings("admm"), measured)
    assert solves.seconds(small) == 0.5
    assert solves.seconds(small, rows=4) == 0.25
    assert solves.seconds(other) < 0.1
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    work, found = _measured(model, 0.5)
    assert found.measured.keys() == {"0", "2"}
    assert found.measured["0"] == found.measured["2"]  # one shape is solved once
    assert (work.batches, work.sites, work.grouped) == (2, 0, set())


def _measured(model, pattern):
    """Sizes and prices of a run on two batches of 8 samples."""
    store, data = Store(model.eval()), [torch.randn(8, 16) for _ in range(2)]
    recipe = iobs.Recipe.preset("one-shot")
    selection = selected_for(store, iobs.Unstructured(pattern), None, None, recipe.depthwise)
    _, request = requested(model, recipe, iobs.Unstructured(pattern), selection, 0.0, 0, None)
    foresight = Foresight.of(store, request, data)
    return foresight.workload, foresight.prices


def test_forecast_of_units_counts_the_effects_of_widths():
    pattern = iobs.Structured(0.3)
    every = layers(4, 64, 64)
    work = cost.Work(every, 100, 100, 0.1, 4, 50.0, cost.inputs_by_width(every, 4), sites=4, grouped={"layers.0"})
    seconds = {}
    for name in ("one-shot", "fast"):
        recipe = STRUCTURED[name]
        decided = Decisions(recipe.rounds, None, blocks=recipe.blocks)
        seconds[name] = cost.forecast(work, cost.Prices(1e-3, 1e-9, 1e-9, 2e-9), recipe, decided, pattern).phases
    assert seconds["fast"].pop("allocation") > 1e-3 * 4 * 4 * 25  # trials: sites, widths, samples that judge
    assert seconds["fast"] == pytest.approx(seconds["one-shot"])


def test_losses_take_passes_of_held_out_samples():
    times = {held: forecast_of(iobs.Recipe.preset("one-shot"), 4, whole=True, held_out=held) for held in (0.1, 0.2)}
    assert times[0.2].phases["losses"] == pytest.approx(2 * times[0.1].phases["losses"])


def test_batches_are_counted_as_they_are_given():
    forecasts = [forecast_of(iobs.Recipe.preset(name), 4, batches=5) for name in ("one-shot", "fast")]
    in_steps = [forecast_of(iobs.Recipe.preset(name), 4) for name in ("one-shot", "fast")]
    passes, more = ([one.phases["forward passes"] for one in both] for both in (forecasts, in_steps))
    assert passes[0] < more[0]  # 20 steps of 50 positions
    assert passes[1] == more[1]


@pytest.mark.parametrize(("between", "sets"), [(50, 2), (0, 1)])
def test_blocks_with_a_grid_after_other_levels_have_trials_of_two_rates(between, sets):
    every, recipe = layers(4, 8, 8), iobs.Recipe(blocks=BlockFit(masks=2, between=between))
    work = cost.Work(every, 100, 100, 0.1, 4, 50.0, cost.inputs_by_width(every, 4))
    decided, prices = Decisions(recipe.rounds, None, blocks=recipe.blocks), cost.Prices(1e-3, 0.0, 0.0, 0.0)
    units = [
        {part.name: part.units for part in cost.forecast(work, prices, recipe, decided, pattern).parts}
        for pattern in (iobs.Unstructured(0.5), iobs.Unstructured(0.5) & iobs.Grid(4), iobs.Grid(4))
    ]
    trials = [each["rate of block reconstruction"] for each in units]
    assert trials == [trials[0], sets * trials[0], trials[0]]


@pytest.mark.parametrize("loss", ["kl", "task"])
def test_trials_of_all_gradient_steps_are_foretold(loss):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    data = [(torch.randn(32, 12), torch.randint(0, 4, (32,))) for _ in range(2)]
    after, between = (iobs.FineTune(lr="auto", optimizer="adam", steps=8, loss=name) for name in ("kl", loss))
    forecasts, trials, listener = [], [], iobs.Callback()
    listener.on_forecast = forecasts.append
    listener.on_measure = lambda task, done, total: trials.append(task)
    recipe = iobs.Recipe(rounds=iobs.Rounds(2, finetune=between), finetune=after)
    iobs.prune(network, data, 0.6, recipe, callbacks=[listener])
    (part,) = (part for part in forecasts[0].parts if part.name == "trial")
    assert part.units == len([task for task in trials if task.startswith("trial")])  # shared where the loss is the same


def test_windows_that_steps_between_rounds_sample_are_foretold():
    model = families.LANGUAGE_MODELS["llama"][0]().eval()
    data = [{"input_ids": torch.randint(model.config.vocab_size, (4, 32))} for _ in range(2)]
    step = iobs.FineTune(lr=1e-3, optimizer="adam", steps=2, loss="kl", augment="auto")
    forecasts, listener = [], iobs.Callback()
    listener.on_forecast = forecasts.append
    iobs.prune(model, data, 0.5, iobs.Recipe(rounds=iobs.Rounds(2, finetune=step)), callbacks=[listener])
    assert "windows of sampled text" in [part.name for part in forecasts[0].parts]


def test_gradient_steps_of_a_small_network_have_a_time_of_their_own():
    every, finetune = layers(1, 8, 8), iobs.FineTune(lr=0.1, steps=100)
    work = cost.Work(every, 8, 8, 0.0, 0, 8.0, {}, fit=Samples.of([torch.randn(8, 4)]))
    decided = Decisions(iobs.Rounds(), finetune)
    phases = cost.forecast(work, cost.Prices(0.0, 0.0, 1e-9, 2e-9), iobs.Recipe(), decided).phases
    assert phases["fine-tuning"] == pytest.approx(100 * cost._STEP_CALL)


def test_block_steps_and_trials_of_layers_have_a_time_of_their_own(monkeypatch):
    every, recipe = layers(4, 8, 8), iobs.Recipe.preset("fast")
    work = cost.Work(every, 100, 100, 0.1, 4, 50.0, cost.inputs_by_width(every, 4))
    decided = Decisions(recipe.rounds, None, blocks=recipe.blocks)
    passes = cost.Prices(1e-3, 0.0, 0.0, 0.0)
    text, image = (cost.forecast(each, passes, recipe, decided).phases for each in (work, replace(work, whole=True)))
    judges = 100 * (0.2 * 0.9 + 0.1)
    assert image["allocation"] - text["allocation"] == pytest.approx(1e-3 * 4 * 2 * judges)
    free = cost.forecast(work, cost.Prices(0.0, 0.0, 0.0, 0.0), recipe, decided).phases
    assert free["steps of blocks"] > 4 * cost._STEP_CALL  # calls of steps, at least one of each block
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # loaded
    loaded = cost.forecast(work, passes, recipe, decided)
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert cost.forecast(work, passes, recipe, decided).seconds == pytest.approx(loaded.seconds + cost._COMPILER)


@pytest.mark.parametrize("solver", [*iobs.solvers.SOLVERS])
def test_every_solver_has_a_cost(solver):
    small, large = (cost.solver_cost(LayerSettings(solver), 64, columns) for columns in (64, 128))
    assert 0 < small.operations < large.operations
    assert 0 < small.bytes < large.bytes


@pytest.mark.parametrize(
    ("recipe", "warned"),
    [
        (iobs.Recipe(solver="obc"), True),
        (iobs.Recipe(solver=iobs.solvers.OBC()), True),
        (iobs.Recipe(refine="swap"), True),
        (iobs.Recipe(rules=[iobs.Rule("layers.*", solver="obc")]), True),
        (iobs.Recipe(), False),
        (iobs.Recipe(solver="sparsegpt"), False),
    ],
)
def test_solvers_that_take_days_are_named_before_the_work(recipe, warned):
    assert bool(cost.warning_of_days(layers(32, 4096, 14336), recipe)) == warned
    assert cost.warning_of_days(layers(12, 768, 3072), recipe) is None


@pytest.mark.parametrize("options", [["--low-memory"], []])
def test_command_line_warns_of_days_before_the_work(options, monkeypatch):
    monkeypatch.setattr(cost, "_DAY", 1e-9)
    options = ["--solver", "obc", "--recipe", "one-shot", "--dry-run", "--device", "cpu", *options]
    run = CliRunner().invoke(app, ["prune", str(EMBEDDED), *options, "--samples", "4", "--seq-len", "16"])
    assert run.exit_code == 0, run.output
    assert "the solves take rows x columns^3 operations" in " ".join(run.stderr.split())


def test_fastest_call_is_the_measured_one(monkeypatch):
    times = iter([0.0, 5.0, 10.0, 11.0, 20.0, 27.0])  # another program takes the processor in two of three calls
    monkeypatch.setattr(prices, "_CALLS", 3)
    monkeypatch.setattr(prices, "_LONG", 100.0)
    monkeypatch.setattr(prices, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert prices.timed(lambda: None, torch.device("cpu")) == 1.0


def test_call_that_takes_seconds_is_made_once(monkeypatch):
    times = iter([0.0, 5.0])
    monkeypatch.setattr(prices, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert prices.timed(lambda: None, torch.device("cpu")) == 5.0


class Picky:
    """A solver of layers of the model alone."""

    def __init__(self, shape):
        self.shape = shape

    def __call__(self, problem, pattern):
        if problem.shape != self.shape:
            raise RuntimeError("another shape")
        return iobs.solvers.Magnitude()(problem, pattern)


def test_run_with_a_bar_goes_on_where_its_solver_refuses_the_trial():
    model, data = torch.nn.Sequential(torch.nn.Linear(6, 5)), [torch.randn(16, 6)]
    bar = ProgressBar(SimpleNamespace(update=lambda *_: None))
    report = iobs.prune(model, data, 0.5, "one-shot", solver=Picky((5, 6)), callbacks=[bar])
    assert report.zeros == 15
