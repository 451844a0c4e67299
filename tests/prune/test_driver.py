"""`iobs.prune` end to end on small networks of every kind."""

import copy
import warnings

import pytest
import torch
from networks import CASES, build, perceptron_batches
from torch import nn

import iobs
from iobs.errors import (
    CalibrationError,
    DampingWarning,
    LayerSelectionError,
    ModelError,
    NonFiniteError,
    PatternError,
    ProblemError,
)
from iobs.prune import batches as data_batches
from iobs.prune import run
from iobs.prune.layers import find_layers
from iobs.prune.parts import Part, split
from iobs.prune.record import Report
from iobs.prune.walk import Walk

STEP = iobs.GradientStep(lr=1e-3, optimizer="adam", steps=2, loss="kl")


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(model, state):
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def zeros_of(model):
    return {layer.name: int((layer.read(model) == 0).sum()) for layer in find_layers(model)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("solver", ["magnitude", "wanda", "sparsegpt", "obc", "admm"])
def test_every_layer_gets_exactly_what_was_asked(name, solver):
    model, data = build(name)
    report = iobs.prune(model, data, iobs.Unstructured(0.6), solver=solver)
    found = zeros_of(model)
    for row in report.audit:
        assert row.zeros == row.asked == found[row.name]
        assert row.zeros == row.weights - int(row.weights * 0.4 + 0.5)
    for layer in report.best.layers:
        assert 0 <= layer.error_calibration < 1
        assert layer.error_heldout is not None


@pytest.mark.parametrize("pattern", [iobs.NM(2, 4), iobs.NM(4, 8)], ids=str)
def test_n_of_m_holds_in_every_group(pattern):
    model, data = build("transformer")
    iobs.prune(model, data, pattern)
    for layer in find_layers(model):
        if layer.name != "head":
            kept = (layer.read(model).reshape(-1, pattern.of) != 0).sum(1)
            assert int(kept.max()) <= pattern.keep


def test_defaults_leave_depthwise_and_tied_layers_dense():
    model, data = build("convolutional")
    report = iobs.prune(model, data, iobs.Unstructured(0.5))
    assert report.skipped == {"depthwise": "depthwise convolution"}
    model, data = build("transformer")
    report = iobs.prune(model, data, iobs.Unstructured(0.5))
    assert report.skipped["head"] == "tied to an embedding"


def test_depthwise_and_included_layers_are_pruned_on_request():
    model, data = build("convolutional")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), depthwise=True)
    assert not report.skipped
    assert zeros_of(model)["depthwise"] == 36
    model, data = build("convolutional")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), include=["stages.*", "re:head"], skip="*.short")
    assert {row.name.split(".")[-1] for row in report.audit} == {"conv1", "conv2", "head"}
    assert report.skipped["stem"] == "not among the included names"
    assert report.skipped["stages.0.0.short"] == "skipped by name"


@pytest.mark.parametrize("target", ["current", "dense"])
@pytest.mark.parametrize("inputs", ["pruned", "dense"])
def test_targets_and_inputs(target, inputs):
    model, data = build("perceptron")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), target=target, inputs=inputs, holdout=0)
    assert report.best.layers[0].error_heldout is None
    assert report.sparsity >= 0.5


@pytest.mark.parametrize(("target", "inputs"), [("network", "pruned"), ("current", "dense")])
def test_every_sweep_is_given_the_network_that_its_targets_or_inputs_are_of(target, inputs, monkeypatch):
    seen = []

    class Recorded(Walk):
        def sweep(self, *arguments):
            seen.append((self.reference.fc1.weight.clone(), self.dense_inputs))
            return super().sweep(*arguments)

    monkeypatch.setattr(run, "Walk", Recorded)
    model, data = build("perceptron")
    dense = model.fc1.weight.detach().clone()
    iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=STEP, target=target, inputs=inputs, holdout=0)
    (first, asked), (second, again) = seen
    assert asked is again is (inputs == "dense")
    assert torch.equal(first, dense)
    assert torch.equal(second, dense) is (target == "current"), "the network as it is when the second sweep begins"


def test_dense_target_lowers_the_error_of_the_network_output():
    """What the layer before has spoilt, the next one makes good: the last layer's output is nearer to the dense one."""
    distance = {}
    for target in ("current", "dense"):
        model, data = build("perceptron")
        dense = copy.deepcopy(model)
        iobs.prune(model, data, iobs.Unstructured(0.6), target=target, holdout=0)
        inputs = torch.cat([batch[0] for batch in data])
        with torch.no_grad():
            distance[target] = float((model(inputs) - dense(inputs)).square().mean())
    assert distance["dense"] < distance["current"]


@pytest.mark.parametrize("loss", ["task", "kl", "block", lambda model, batch: model(batch[0]).square().mean()])
@pytest.mark.parametrize("data", ["fixed", "fresh"])
def test_rounds_keep_the_best_projection(loss, data):
    model, batches = build("perceptron")
    step = iobs.GradientStep(lr=1e-2, steps=2, loss=loss)
    report = iobs.prune(model, batches, iobs.Unstructured(0.6), rounds=4, step=step, data=data)
    losses = [record.loss_heldout for record in report.rounds]
    assert report.best_round == losses.index(min(losses))
    assert all(len(record.step_losses) == (2 if record.index < 3 else 0) for record in report.rounds)
    assert all(row.zeros == row.asked for row in report.audit), "the answer is a projection, never the stepped weights"


def test_task_step_is_the_papers_line_nine():
    """W_1 = W^ - lr * gradient of the mean loss over the whole round's data, taken at the projected weights."""
    model, data = build("perceptron")
    step = iobs.GradientStep(lr=0.05, optimizer="sgd", steps=1, loss="task")
    projected = copy.deepcopy(model)
    iobs.prune(projected, data, iobs.Unstructured(0.5), holdout=0)
    inputs, targets = torch.cat([b[0] for b in data]), torch.cat([b[1] for b in data])
    nn.functional.cross_entropy(projected(inputs), targets).backward()
    expected = projected.fc1.weight - 0.05 * projected.fc1.weight.grad
    seen = []

    class Spy:
        def __call__(self, problem, pattern):
            seen.append(problem.anchor)
            return iobs.solve(problem, pattern)

    iobs.prune(model, data, iobs.Unstructured(0.5), holdout=0, rounds=2, step=step, solver=Spy())
    torch.testing.assert_close(seen[3].float(), expected.detach(), rtol=1e-4, atol=1e-6)


def test_polish_keeps_the_support():
    model, data = build("transformer")
    polish = iobs.GradientStep(lr=1e-3, optimizer="adam", steps=3, loss="kl", parameters="all", decay=True)
    report = iobs.prune(model, data, iobs.Unstructured(0.5), polish=polish)
    assert [record.kind for record in report.rounds] == ["projection", "polish"]
    assert all(row.zeros >= row.asked for row in report.audit)


def test_cubic_schedule_grows_to_the_asked_sparsity():
    """The first projection is to the asked sparsity and stays a candidate; then it starts low and grows."""
    model, data = build("perceptron")
    report = iobs.prune(model, data, iobs.Unstructured(0.8), rounds=4, step=STEP, schedule="cubic")
    first, *shares = (record.sparsity for record in report.rounds)
    assert shares == sorted(shares)
    assert shares[0] < 0.6
    assert first == shares[-1] == pytest.approx(0.8, abs=0.01)
    assert report.best_round in (0, 3), "the others are not at the asked sparsity"


def test_bfloat16_masters_move_where_bfloat16_would_not():
    model, data = build("perceptron")
    model = model.to(torch.bfloat16)
    data = [(inputs.bfloat16(), targets) for inputs, targets in data]
    report = iobs.prune(model, data, iobs.Unstructured(0.5), rounds=3, step=STEP)
    assert model.fc1.weight.dtype == torch.bfloat16
    assert report.sparsity >= 0.5


def test_batch_norm_update_changes_statistics_and_keep_does_not():
    for choice in ("keep", "update"):
        model, data = build("convolutional")
        before = model.stages[0][0].norm.running_mean.clone()
        iobs.prune(model, data, iobs.Unstructured(0.5), batch_norm=choice)
        assert torch.equal(before, model.stages[0][0].norm.running_mean) == (choice == "keep")


def test_same_seed_same_bits():
    states = []
    for _ in range(2):
        model, data = build("convolutional")
        iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=STEP, seed=5)
        states.append(state_of(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_report_survives_json():
    import json

    model, data = build("perceptron")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=STEP)
    assert Report.from_dict(json.loads(json.dumps(report.as_dict()))) == report


def test_singular_gram_and_dead_columns_go_on():
    """Fewer samples than inputs, and inputs that never fire: their weights go, the count stays exact."""
    model = nn.Sequential(nn.Linear(40, 10), nn.ReLU(), nn.Linear(10, 4)).eval()
    inputs = torch.randn(12, 40)
    inputs[:, :6] = 0
    report = iobs.prune(model, [inputs], iobs.Unstructured(0.5), holdout=0)
    assert report.best.layers[0].dead_columns == 6
    assert not model[0].weight[:, :6].any()
    assert report.audit[0].zeros == report.audit[0].asked


def test_a_hessian_that_cannot_be_factorised_is_damped_with_a_warning():
    model = nn.Sequential(nn.Linear(40, 10)).eval()
    with pytest.warns(DampingWarning, match="layer_name_0|'0'|^0"):
        iobs.prune(model, [torch.randn(8, 40)], iobs.Unstructured(0.5), damping=0.0, holdout=0)


def nan_weight():
    model, data = build("perceptron")
    with torch.no_grad():
        model.fc2.weight[0, 0] = torch.nan
    return model, data, {}


def nan_input():
    model, data = build("perceptron")
    data[3][0][0, 0] = torch.nan
    return model, data, {}


def nan_activation():
    class Logarithm(nn.Module):
        def forward(self, x):
            return x.sum(1, keepdim=True).log() + x

    model = nn.Sequential(nn.Linear(4, 4), Logarithm(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    data = [torch.rand(4, 4) + 1 for _ in range(4)]
    data[3][0] = -1.0
    return model, data, {"holdout": 0}


BAD = {
    "nan weight": (nan_weight, NonFiniteError, "fc2"),
    "nan input": (nan_input, NonFiniteError, "batch 3"),
    "nan activation": (nan_activation, NonFiniteError, r"layer '2'.*batch 3"),
    "no data": (lambda: (build("perceptron")[0], [], {}), CalibrationError, "no calibration data"),
    "empty batch": (lambda: (build("perceptron")[0], [torch.zeros(0, 12)], {}), CalibrationError, "batch 0 is empty"),
    "odd batch": (lambda: (build("perceptron")[0], ["text"], {}), CalibrationError, "is a str"),
    "unmatched": (lambda: (*build("perceptron"), {"include": "*.mlp"}), LayerSelectionError, "matches none"),
    "unmatched skip": (lambda: (*build("perceptron"), {"skip": "head"}), LayerSelectionError, "matches none"),
    "bad expression": (lambda: (*build("perceptron"), {"skip": "re:("}), LayerSelectionError, "regular expression"),
    "nothing left": (lambda: (*build("perceptron"), {"skip": "fc*"}), LayerSelectionError, "Nothing is left"),
    "solver": (lambda: (*build("perceptron"), {"solver": "adm"}), ProblemError, "no solver 'adm'"),
    "recipe": (lambda: (*build("perceptron"), {"recipe": "finest"}), ProblemError, "no recipe"),
    "rounds": (lambda: (*build("perceptron"), {"rounds": 0}), ProblemError, "at least 1"),
    "holdout": (lambda: (*build("perceptron"), {"holdout": 1.0}), ProblemError, "holdout"),
    "target": (lambda: (*build("perceptron"), {"target": "sparse"}), ProblemError, '"current"'),
    "fresh": (
        lambda: (build("perceptron")[0], perceptron_batches(1, 3), {"rounds": 9, "step": STEP, "data": "fresh"}),
        CalibrationError,
        "needs a sample for each",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_and_nothing_changes(case):
    make, error, message = BAD[case]
    model, data, options = make()
    before = state_of(model)
    with pytest.raises(error, match=message):
        iobs.prune(model, data, iobs.Unstructured(0.5), **options)
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(9.0), before[name].nan_to_num(9.0))


@pytest.mark.parametrize("sparsity", [1.0, -0.1, float("nan")])
def test_impossible_sparsity(sparsity):
    with pytest.raises(PatternError, match=r"\[0, 1\)"):
        iobs.Unstructured(sparsity)


def test_two_of_four_on_seven_columns_names_every_misfit():
    model = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 8), nn.Linear(8, 3)).eval()
    with pytest.raises(PatternError, match=r"divisible by 4, got 7.*0 \(8 x 7\)"):
        iobs.prune(model, [torch.randn(30, 7)], iobs.NM(2, 4))


def test_interruption_gives_the_weights_back():
    class Impatient:
        def __init__(self):
            self.seen = 0

        def begin(self, rounds, layers):
            pass

        def note(self, text):
            pass

        def layer(self, round_index, record):
            self.seen += 1
            if self.seen == 2:
                raise KeyboardInterrupt

    model, data = build("perceptron")
    model.train()
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        iobs.prune(model, data, iobs.Unstructured(0.5), progress=Impatient())
    assert_same(model, before)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_held_out_samples_are_not_fitted_on():
    fit, heldout = split(Part.of(data_batches.collect(perceptron_batches())), 0.25, 3)
    assert (fit.samples, heldout.samples) == (48, 16)
    rows = torch.cat([batch[0] for batch in fit.batches + heldout.batches])
    assert len(rows.unique(dim=0)) == 64


def test_warnings_are_not_made_on_the_happy_path():
    model, data = build("transformer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=STEP)


# ---- what the caller's program is in the middle of
def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(60, 8)


def pruned_alone(**options):
    model, data = small()
    iobs.prune(model, data, iobs.Unstructured(0.5), **options)
    return state_of(model)


def test_autocast_outside_does_not_round_what_is_measured():
    model, data = small()
    with torch.autocast("cpu", torch.bfloat16):
        iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=STEP)
    assert_same(model, pruned_alone(rounds=2, step=STEP))


def test_a_compiled_network_that_has_run_is_looked_into():
    model, data = small()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(data)
    iobs.prune(compiled, data, iobs.Unstructured(0.5))
    assert_same(model, pruned_alone())


def test_inference_mode_outside_does_not_matter():
    model, data = small()
    with torch.inference_mode():
        iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=STEP)
    assert_same(model, pruned_alone(rounds=2, step=STEP))


class Merging(nn.Linear):
    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_a_module_that_acts_on_its_mode_is_told_of_it():
    model = nn.Sequential(Merging(8, 8), nn.Dropout(), nn.Linear(8, 4))
    model[1].eval()
    iobs.prune(model, torch.randn(30, 8), iobs.Unstructured(0.5))
    assert model[0].training
    assert not model[0].merged
    assert not model[1].training


def test_only_modules_that_were_training_are_told_to_train():
    model = nn.Sequential(Merging(8, 8), nn.Sequential(Merging(8, 8), nn.Linear(8, 4)))
    model[0].eval()
    iobs.prune(model, torch.randn(30, 8), iobs.Unstructured(0.5))
    assert [(model[0].training, model[0].merged), (model[1][0].training, model[1][0].merged)] == [
        (False, True),
        (True, False),
    ]


def test_buffers_that_cannot_be_written_to_do_no_harm():
    model, data = small()
    model.register_buffer("mask", torch.ones(1, 16).expand(3, 16))
    iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=STEP)


def test_steps_on_double_precision_keep_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    polish = iobs.GradientStep(lr=1e-3, steps=2, loss="kl", support="fixed", parameters="all")
    iobs.prune(model, torch.randn(60, 8, dtype=torch.float64), iobs.Unstructured(0.5), polish=polish)
    weights = model[0].weight.detach()
    assert not torch.equal(weights, weights.float().double())


def test_a_network_without_gradients_takes_no_steps():
    class Closed(nn.Sequential):
        @torch.no_grad()
        def forward(self, inputs):
            return super().forward(inputs)

    model = Closed(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    before = state_of(model)
    with pytest.raises(ProblemError, match="loss has no gradient"):
        iobs.prune(model, torch.randn(60, 8), iobs.Unstructured(0.5), rounds=2, step=STEP)
    assert_same(model, before)


def test_a_network_that_cannot_be_copied_is_one_clear_error():
    model, data = small()
    model.last_loss = model(data).sum()
    with pytest.raises(ModelError, match="cannot be copied"):
        iobs.prune(model, data, iobs.Unstructured(0.5), target="dense")


def test_draws_of_the_caller_go_on_as_if_nothing_had_been_drawn():
    model, data = small()
    before = torch.get_rng_state()
    iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=STEP)
    assert torch.equal(torch.get_rng_state(), before)
