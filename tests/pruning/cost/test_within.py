"""Runs that end within a given time: which form of a recipe they take."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import families
import pytest
import torch
from menagerie import SmallTransformer, token_batches
from typer.testing import CliRunner

import iobs
from iobs.cli import app
from iobs.core.formats import as_seconds
from iobs.core.patterns import as_pattern
from iobs.pruning import driver
from iobs.pruning.callbacks import Callbacks
from iobs.pruning.cost import foresight as foresight_module
from iobs.pruning.cost import prices
from iobs.pruning.cost.affordable import fitting, forms
from iobs.pruning.cost.foresight import Foresight
from iobs.pruning.cost.work import Prices
from iobs.pruning.forecast import Forecast, Part
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.modes import evaluating
from iobs.pruning.plan import widths
from iobs.pruning.recipe import STRUCTURED
from iobs.pruning.store import Store
from iobs.pruning.structured.narrowing import SiteRemoval
from iobs.pruning.structured_report import StructuredRequest
from iobs.pruning.workspace import Request


@pytest.mark.parametrize(
    ("within", "seconds"),
    [(90, 90), (0.5, 0.5), ("90", 90), ("90s", 90), ("30min", 1800), (" 1.5 h", 5400), ("1h 30min", 5400)],
)
def test_times_are_read(within, seconds):
    assert as_seconds(within) == seconds


_OWN = "layers match their own outputs"


@pytest.mark.parametrize("within", [0, -1, float("nan"), float("inf"), "", "0s", "soon", "5 days", "1h-2h", None, True])
def test_other_values_are_refused(within):
    with pytest.raises(iobs.errors.ProblemError, match="30min"):
        as_seconds(within)


def test_forms_of_a_recipe_leave_out_more_and_more():
    words = [form.words for form in forms(iobs.Recipe.preset("best"), as_pattern(0.5))]
    assert words[0] == ""
    assert words[1:9] == [
        f"{share} % of the gradient steps".replace(" %", "%") for share in (70, 50, 35, 25, 18, 12, 8, 5)
    ]
    assert words[9] == "one projection, and short fits of blocks"
    assert words[10] == "one projection, no gradient steps"
    assert [word.split(", ")[-1] for word in words[11:]] == [
        "equal shares of all layers",
        "layers match their own outputs",
    ]
    last = [*forms(iobs.Recipe.preset("best"), as_pattern(0.5))][-1].recipe
    assert last == iobs.Recipe(bias=last.bias)


def test_bounds_keep_their_division():
    bounded = iobs.Recipe.preset("fast").but(allocation=iobs.Allocation("fisher", least=0.1))
    assert all(form.recipe.division.criterion != "uniform" for form in forms(bounded, as_pattern(0.5)))


def test_forms_leave_out_only_what_a_pattern_has():
    def words(recipe, pattern):
        return [form.words for form in forms(recipe, as_pattern(pattern))]

    one_shot = iobs.Recipe.preset("one-shot")
    assert words(one_shot, 0.5) == ["", "equal shares of all layers", "equal shares of all layers, " + _OWN]
    assert words(one_shot, iobs.Grid(4)) == ["", _OWN]
    equal = "rows of a layer that count equally"
    assert words(one_shot, "2:4") == ["", equal, f"{equal}, {_OWN}"]
    assert words(one_shot, iobs.Rate(3.0)) == words(one_shot, 0.5)  # bits are divided among layers too
    assert words(one_shot.but(allocation="uniform"), 0.5)[1] == "rows of a layer that count equally"


def test_steps_are_fewer_in_every_form():
    found = [form.recipe for form in forms(iobs.Recipe.preset("best"), as_pattern(0.5))][:9]
    for richer, poorer in itertools.pairwise(found):
        assert poorer.blocks.epochs < richer.blocks.epochs
        assert poorer.blocks.network_steps < richer.blocks.network_steps
        assert poorer.finetune.most_steps < richer.finetune.most_steps
        assert poorer.rounds.count == richer.rounds.count
    assert [recipe.blocks.sampled for recipe in found[:4]] == ["auto", "auto", "auto", 0]  # 10, 7, 5 and 3.5 epochs


def test_no_form_searches_where_the_recipe_would_not():
    found = [form.recipe for form in forms(iobs.Recipe.preset("best"), as_pattern(0.5))]
    assert not any(recipe.division.generations for recipe in found[9:-2])
    plain = iobs.Recipe.preset("best").but(blocks=None)  # fine-tuning, which does search
    words = [form.words for form in forms(plain, as_pattern(0.5))]
    assert words[10].endswith("no search among divisions")


def test_the_whole_recipe_is_the_recipe():
    recipe = iobs.Recipe.preset("best").but(blocks=iobs.pruning.recipe.BlockFit(epochs=3, sampled="auto"))
    assert next(forms(recipe, as_pattern(0.5))).recipe == recipe
    short = [form.recipe for form in forms(recipe, as_pattern(0.5)) if form.words.startswith("one projection, and")]
    assert [one.blocks.epochs for one in short] == [1.0]
    step = iobs.FineTune(lr=0.1, steps=6)  # a single step would take the gradient of all data
    found = [form.recipe.finetune for form in forms(iobs.Recipe(finetune=step), as_pattern(0.5))]
    assert [one.steps for one in found if one is not None] == [6, 5, 3, 3, 2, 2, 2, 2, 2]


def test_the_richest_form_that_ends_in_time_is_taken():
    recipe, pattern = iobs.Recipe.preset("fast"), as_pattern(0.5)
    times = {form.words: 100.0 - 5 * number for number, form in enumerate(forms(recipe, pattern))}

    def foretold(wanted):
        return next(times[form.words] for form in forms(recipe, pattern) if form.recipe == wanted)

    assert fitting(recipe, pattern, 100, foretold)[0] == 0
    number, note = fitting(recipe, pattern, 91, foretold)
    assert number == 2
    assert note == "Within 1 min 31 s: 50% of the gradient steps; about 1 min 30 s."
    with pytest.raises(iobs.errors.ProblemError, match=f"the shortest takes about {min(times.values()):.0f} s"):
        fitting(recipe, pattern, 10, foretold)


@pytest.fixture
def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(24, 48), torch.nn.ReLU(), torch.nn.Linear(48, 24), torch.nn.Linear(24, 6)]
    return torch.nn.Sequential(*layers), [torch.randn(32, 24) for _ in range(4)]


def test_forecasts_of_the_forms_fall(network):
    model, data = network
    pattern, store = as_pattern(0.5), Store(model)
    selection = store.select(None, None, False)
    patterns = dict.fromkeys(selection.layers, pattern)
    recipe = iobs.Recipe.preset("best")
    with evaluating(model):
        foresight = Foresight.of(store, Request(recipe, patterns, pattern, 0.1, 0, None), data)
        times = [foresight.forecast(form.recipe).seconds for form in forms(recipe, pattern)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] > 0


def foresight_of(model, data, recipe, pattern=0.5):
    pattern, store = as_pattern(pattern), Store(model)
    patterns = dict.fromkeys(store.select(None, None, False).layers, pattern)
    with evaluating(model):
        return Foresight.of(store, Request(recipe, patterns, pattern, 0.1, 0, None), data)


def test_scores_of_a_vocabulary_take_part_where_the_whole_model_runs(monkeypatch):
    """They were counted in every pass along the blocks, and losses as passes of all samples: 2.8 times the time."""
    clock = [0.0]
    monkeypatch.setattr(prices, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    model = families.LANGUAGE_MODELS["llama"][0]().eval()
    model.model.layers[0].register_forward_hook(lambda *_: clock.__setitem__(0, clock[0] + 1.0))
    model.lm_head.register_forward_hook(lambda *_: clock.__setitem__(0, clock[0] + 3.0))
    foresight = foresight_of(model, families.language_batches(), iobs.Recipe.preset("one-shot"))
    assert foresight.prices.head == pytest.approx(3 * foresight.prices.forward)
    added = {name for name, entry in foresight.workload.inputs.items() if entry.added}
    assert added == {layer.name for layer in foresight.workload.layers if layer.name.endswith(("o_proj", "down_proj"))}


def test_a_limit_of_time_counts_the_rounds_that_a_run_may_add(network):
    recipe = iobs.Recipe.preset("best")
    foresight = foresight_of(*network, recipe)
    rounds = {grown: {part.name: part for part in foresight.forecast(recipe, grown).parts} for grown in (False, True)}
    count, steps = recipe.rounds.count, recipe.rounds.finetune.steps
    assert rounds[True]["layers"].units == count * rounds[False]["layers"].units
    assert "steps" not in rounds[False]
    assert rounds[True]["steps"].units == (count - 2) * steps  # the first projection of growing sparsity is undone
    before = foresight.forecast(recipe, True).seconds
    assert foresight.within(1.01 * before)[0] == 0
    assert foresight.within(0.99 * before)[0] > 0


def test_windows_that_steps_sample_are_foretold(monkeypatch):
    model, data = SmallTransformer(), token_batches()
    step = iobs.FineTune(lr=1e-3, optimizer="adam", steps=8, most_steps=40, loss="kl", augment="auto")
    recipe = iobs.Recipe(finetune=step)
    foresight = foresight_of(model, data, recipe)

    def units(windows):
        monkeypatch.setattr(foresight_module, "windows_of_steps", lambda *_: windows)
        return {part.name: part.units for part in foresight.forecast(recipe).parts}

    given, sampled = units(0), units(7)
    assert given["fine-tuning"] == 8
    assert sampled["windows of sampled text"] == 7
    assert sampled["fine-tuning"] == 40


def test_prices_leave_the_generator_of_torch_as_it_was():
    class Noisy(torch.nn.Linear):
        def forward(self, value):
            return super().forward(value + 1e-3 * torch.randn_like(value))

    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = torch.nn.Sequential(Noisy(8, 8), torch.nn.Linear(8, 4))
    torch.set_rng_state(before)
    foresight_of(model, [torch.ones(8, 8)], iobs.Recipe())
    assert torch.equal(torch.get_rng_state(), before)


def test_kernels_are_compiled_before_a_solve_is_timed(network, monkeypatch):
    calls, timed = [], prices.timed
    monkeypatch.setattr(prices.TrialSolve, "solve", lambda trial: calls.append("solve"))
    monkeypatch.setattr(
        prices, "timed", lambda *arguments, **options: calls.append("time") or timed(*arguments, **options)
    )
    foresight_of(*network, iobs.Recipe(), iobs.Grid(4))
    first = calls.index("solve")
    assert calls[first : first + 3] == ["solve", "time", "solve"]


def test_curves_of_grids_have_a_price_of_their_own(network):
    pattern = iobs.Unstructured(0.5) & iobs.Grid(4)
    recipe = iobs.Recipe.preset("one-shot").but(solver="sparsegpt")
    foresight = foresight_of(*network, recipe, pattern)
    assert foresight.prices.of_curves is not None
    free, dear = Prices(0.0, 0.0, 0.0, 0.0), Prices(0.0, 0.0, 1.0, 2.0)

    def allocation(prices):
        return replace(foresight, prices=prices).forecast(recipe).phases["allocation"]

    assert allocation(replace(dear, of_curves=free)) == allocation(free)
    assert allocation(dear) > allocation(free)


def test_layers_with_a_pattern_by_a_rule_have_no_curves(network):
    model, data = network
    tasks, listener = [], iobs.Callback()
    listener.on_measure = lambda task, done, total: tasks.append(task)
    recipe = iobs.Recipe.preset("one-shot").but(rules=(iobs.Rule("0", pattern="2:4"),))
    store, pattern = Store(model), as_pattern(0.5)
    selection = driver.selected_for(store, pattern, None, None, False)
    _, request = driver.requested(model, recipe, pattern, selection, 0.1, 0, None)
    with evaluating(model):
        rows, curves, _, losses = Foresight.of(store, request, data).forecast(recipe).parts
    iobs.prune(model, data, pattern, recipe, callbacks=[listener])
    foretold = [rows.name, *[curves.name] * curves.units, losses.name]
    assert foretold == tasks == ["prices of rows", *["error curves of layers"] * 2, "losses"]


class Quiet(SmallTransformer):
    """A language model whose outputs have no gradients."""

    @torch.no_grad()
    def forward(self, input_ids):
        return super().forward(input_ids)


def test_without_gradients_nothing_is_divided_and_no_curve_is_foretold():
    recipe = iobs.Recipe.preset("one-shot")
    tasks, listener = [], iobs.Callback()
    listener.on_measure = lambda task, done, total: tasks.append(task)
    foresight = foresight_of(Quiet(), token_batches(), recipe)
    priced = replace(foresight, workload=replace(foresight.workload, priced=True))
    uniform = recipe.but(allocation="uniform")  # rows may have prices all the same
    times = [each.forecast(form).phases["allocation"] for each, form in ((foresight, recipe), (foresight, uniform))]
    assert times[0] == times[1] < priced.forecast(recipe).phases["allocation"]
    iobs.prune(Quiet(), token_batches(), 0.5, recipe, callbacks=[listener])
    assert tasks == ["prices of rows", "losses"]


@pytest.mark.parametrize("kind", [Quiet, SmallTransformer])
def test_trials_of_units_are_foretold_where_no_gradient_prices_them(kind, monkeypatch):
    trials = []
    monkeypatch.setattr(widths, "damage", lambda *_: trials.append(1) or 1.0)
    data = [{"input_ids": torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(n))} for n in range(40)]
    pattern, recipe = iobs.Structured(0.3, multiple_of=1), STRUCTURED["fast"]
    request = StructuredRequest(pattern, recipe, None, None, 0.1, 0, None)
    removal = SiteRemoval(Store(kind().eval()), data, request, Callbacks([]))
    foresight = Foresight.of(removal.store, removal._solving(), data)
    (part,) = (part for part in foresight.forecast(recipe).parts if part.name == "effects of widths")
    iobs.prune(kind(), data, pattern, recipe)
    free = replace(foresight, workload=replace(foresight.workload, by_position=True, priced=True)).forecast(recipe)
    (without,) = (other for other in free.parts if other.name == part.name)
    assert (part.seconds > without.seconds) == bool(trials) == (kind is Quiet)


def test_patterns_of_fixed_counts_have_no_curves(network):
    assert foresight_of(*network, iobs.Recipe.preset("one-shot"), "2:4").prices.of_curves is None


def test_the_division_of_bits_is_foretold_as_the_task_that_it_is():
    torch.manual_seed(0)
    model, data = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 96)), [torch.randn(32, 96)]
    tasks, listener = [], iobs.Callback()
    listener.on_measure = lambda task, done, total: tasks.append((task, total))
    recipe = iobs.Recipe.preset("one-shot")
    foresight = foresight_of(model, data, recipe, iobs.Rate(6.0))
    parts = {part.name: part.units for part in foresight.forecast(recipe).parts}
    assert foresight.prices.of_curves is None  # no solve divides bits
    iobs.prune(model, data, iobs.Rate(6.0), recipe, callbacks=[listener])
    assert tasks
    assert all(parts[task] == total for task, total in tasks)


@pytest.fixture
def foretold(monkeypatch):
    """Set the forecast of all recipes: seconds of a recipe with blocks, and of one without."""

    def set_to(with_steps, without):
        def forecast(self, recipe, grown=False):
            assert all(isinstance(layer, Layer) for layer in self.request.patterns)
            return Forecast((Part("layers", 1, without if recipe.finetune is None else with_steps),))

        monkeypatch.setattr(Foresight, "forecast", forecast)

    return set_to


def test_a_run_takes_the_form_that_ends_in_time(network, foretold):
    model, data = network
    foretold(100.0, 10.0)
    report = iobs.prune(model, data, 0.5, "best", within="20s")
    assert report.settings["recipe"]["finetune"] is None
    assert report.settings["within"] == 20.0
    assert any(note.startswith("Within 20 s: ") and note.endswith("about 10 s.") for note in report.notes)
    assert sum(one.zeros for one in report.audit) * 2 == sum(one.weights for one in report.audit)


def test_a_run_that_cannot_end_in_time_changes_nothing(network, foretold, tmp_path):
    model, data = network
    before = {name: value.clone() for name, value in model.state_dict().items()}
    foretold(100.0, 10.0)
    with pytest.raises(iobs.errors.ProblemError, match="No form of this recipe ends within 5 s"):
        iobs.prune(model, data, 0.5, "best", within=5, checkpoint=tmp_path / "checkpoint")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    iobs.prune(model, data, 0.5, "best", within=15, checkpoint=tmp_path / "checkpoint")  # the same checkpoint serves


def test_a_resumed_run_keeps_its_form(network, foretold, tmp_path):
    _, data = network
    weights, reports = [], []
    for seconds in (10.0, 100.0):  # the second machine is slower
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.ReLU(), torch.nn.Linear(48, 6))
        foretold(100.0, seconds)
        reports.append(iobs.prune(model, data, 0.5, "best", within=20, checkpoint=tmp_path / "checkpoint"))
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert reports[0].settings["recipe"] == reports[1].settings["recipe"]
    assert [note for note in reports[0].notes if "Within" in note] == [
        note for note in reports[1].notes if "Within" in note
    ]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.ReLU(), torch.nn.Linear(48, 6))
    report = iobs.prune(model, data, 0.5, "best", within=200, checkpoint=tmp_path / "checkpoint")
    (note,) = [note for note in report.notes if "Within" in note]
    assert note.startswith("Within 20 s: ")
    assert note.endswith("That time was given first: a resumed run keeps its form of the recipe.")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.ReLU(), torch.nn.Linear(48, 6))
    with pytest.raises(iobs.errors.CheckpointError, match="time for the run"):
        iobs.prune(model, data, 0.5, "best", checkpoint=tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("pattern", "changes", "words"),
    [("structured:30%", {}, "whole units"), (0.5, {"solver": "chita"}, "whole network")],
)
def test_runs_whose_time_is_not_foretold_are_refused(network, monkeypatch, pattern, changes, words):
    model, data = network
    monkeypatch.setattr(driver, "run", None)
    with pytest.raises(iobs.errors.ProblemError, match=words):
        iobs.prune(model, data, pattern, "one-shot", within=10, **changes)


@pytest.mark.slow
def test_the_command_line_and_its_dry_run_take_a_time(tmp_path, foretold):
    foretold(100.0, 10.0)
    few = ["--samples", "8", "--seq-len", "32", "--recipe", "best", "--within", "20s"]
    run = CliRunner().invoke(app, ["prune", "--dry-run", "--json", *few])
    assert run.exit_code == 0, run.stderr
    assert json.loads(run.stdout)["form"].startswith("Within 20 s: ")
    run = CliRunner().invoke(app, ["prune", "--dry-run", *few[:-1], "2s"])
    assert run.exit_code == 2
    assert "No form of this recipe ends within 2 s" in run.stderr
    run = CliRunner().invoke(app, ["prune", "--dry-run", "--within", "soon"])
    assert run.exit_code == 2
    assert "30min" in run.stderr
    run = CliRunner().invoke(app, ["prune", "-o", str(tmp_path / "out"), *few[:-3], "one-shot", *few[-2:]])
    assert run.exit_code == 0, run.stderr
    assert "within: 20s" in (tmp_path / "out" / "recipe.yaml").read_text()
    assert json.loads((tmp_path / "out" / "report.json").read_text())["settings"]["within"] == 20.0
