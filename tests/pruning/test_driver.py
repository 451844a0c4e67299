"""`iobs.prune` end to end on small networks of every kind."""

import copy
import warnings

import pytest
import torch
from checks import assert_same, state_of, zeros_of
from menagerie import CASES, STEP, build
from torch import nn

import iobs
from iobs.pruning import algorithm
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.report import Report
from iobs.pruning.store import Store

# A third of them in the gate, with each solver and each network; all of them in the long set.
COUNTED = [
    pytest.param(name, solver, id=f"{solver}-{name}", marks=() if (case + place) % 3 == 0 else pytest.mark.slow)
    for place, solver in enumerate(["magnitude", "wanda", "sparsegpt", "obc", "admm"])
    for case, name in enumerate(CASES)
]


@pytest.mark.parametrize(("name", "solver"), COUNTED)
def test_prune_gives_every_layer_the_exact_count(name, solver):
    model, data = build(name)
    report = iobs.prune(model, data, iobs.Unstructured(0.6), iobs.Recipe(target="residual"), solver=solver)
    found = zeros_of(model)
    for row in report.audit:
        assert row.zeros == row.asked == found[row.name]
        assert row.zeros == row.weights - int(row.weights * 0.4 + 0.5)
    for layer in report.best.layers:
        assert 0 <= layer.error_calibration < 1
        assert layer.error_heldout is not None


def test_magnitude_costs_no_pass_beyond_the_losses():
    passed = {}
    for solver in ("magnitude", "wanda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
        dense, data = copy.deepcopy(model), torch.randn(400, 12)
        data[:, 0] = 0  # a column of inputs without any values
        counts = []
        model[0].register_forward_hook(lambda module, args, output, counts=counts: counts.append(len(output)))
        iobs.prune(model, data.split(40), 0.5, iobs.Recipe(solver=solver))
        passed[solver] = sum(counts)
        kept = model[0].weight != 0
        if solver == "magnitude":
            assert torch.equal(model[0].weight[kept], dense[0].weight[kept])
            assert dense[0].weight[kept].abs().min() >= dense[0].weight[~kept].abs().max()
            assert kept[:, 0].any()
    assert passed["magnitude"] <= passed["wanda"] - 400 + 32


@pytest.mark.parametrize("target", ["layer", "dense"])
@pytest.mark.parametrize("inputs", ["pruned", "dense"])
def test_prune_accepts_every_target_and_input(target, inputs):
    model, data = build("perceptron")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", target=target, inputs=inputs, holdout=0)
    assert report.best.layers[0].error_heldout is None
    assert report.sparsity >= 0.5


@pytest.mark.parametrize(("target", "inputs"), [("model", "pruned"), ("layer", "dense")])
def test_sweeps_get_the_reference_of_target_and_inputs(target, inputs, monkeypatch):
    seen = []

    class Recorded(Sweep):
        def groups(self):
            seen.append((self.reference.fc1.weight.clone(), self.dense_inputs))
            return super().groups()

    monkeypatch.setattr(algorithm, "Sweep", Recorded)
    model, data = build("perceptron")
    dense = model.fc1.weight.detach().clone()
    iobs.prune(
        model,
        data,
        iobs.Unstructured(0.5),
        "one-shot",
        rounds=iobs.Rounds(2, finetune=STEP),
        target=target,
        inputs=inputs,
        holdout=0,
    )
    (first, asked), (second, again) = seen
    assert asked is again is (inputs == "dense")
    assert torch.equal(first, dense)
    assert torch.equal(second, dense) is (target == "layer"), "otherwise the network at the start of the second sweep"


def test_dense_target_lowers_the_error_of_the_output():
    """Each layer compensates for the error of the layers before it, so the last output is nearer to the dense one."""
    distance = {}
    for target in ("layer", "dense"):
        model, data = build("perceptron")
        dense = copy.deepcopy(model)
        iobs.prune(model, data, iobs.Unstructured(0.6), "one-shot", target=target, holdout=0)
        inputs = torch.cat([batch[0] for batch in data])
        with torch.no_grad():
            distance[target] = float((model(inputs) - dense(inputs)).square().mean())
    assert distance["dense"] < distance["layer"]


@pytest.mark.parametrize("loss", ["task", "kl", "block", lambda model, batch: model(batch[0]).square().mean()])
@pytest.mark.parametrize("data", ["fixed", "fresh"])
def test_rounds_return_the_best_projection(loss, data):
    model, batches = build("perceptron")
    step = iobs.FineTune(lr=1e-2, steps=2, loss=loss)
    report = iobs.prune(
        model, batches, iobs.Unstructured(0.6), "one-shot", rounds=iobs.Rounds(4, finetune=step, data=data)
    )
    losses = [record.loss_heldout for record in report.rounds]
    assert report.best_round == losses.index(min(losses))
    assert all(len(record.step_losses) == (2 if record.index < 3 else 0) for record in report.rounds)
    assert all(row.zeros == row.asked for row in report.audit), (
        "the result is a projection, not the weights after a step"
    )


def test_task_step_is_line_9_of_algorithm_2():
    """W_1 = W^ - lr * gradient of the mean loss over the data of the round, at the projected weights W^."""
    model, data = build("perceptron")
    step = iobs.FineTune(lr=0.05, optimizer="sgd", steps=1, loss="task")
    projected = copy.deepcopy(model)
    iobs.prune(projected, data, iobs.Unstructured(0.5), iobs.Recipe(), holdout=0)
    inputs, targets = torch.cat([b[0] for b in data]), torch.cat([b[1] for b in data])
    nn.functional.cross_entropy(projected(inputs), targets).backward()
    expected = projected.fc1.weight - 0.05 * projected.fc1.weight.grad
    seen = []

    class Spy:
        def __call__(self, problem, pattern):
            seen.append(problem.anchor)
            return iobs.solve(problem, pattern)

    recipe = iobs.Recipe(rounds=iobs.Rounds(2, finetune=step), solver=Spy())
    iobs.prune(model, data, iobs.Unstructured(0.5), recipe, holdout=0)
    torch.testing.assert_close(seen[3].float(), expected.detach(), rtol=1e-4, atol=1e-6)


def test_cubic_schedule_grows_to_the_final_sparsity():
    """The first projection has the final sparsity and stays a candidate; the next ones start low and grow."""
    model, data = build("perceptron")
    report = iobs.prune(model, data, iobs.Unstructured(0.8), "one-shot", rounds=iobs.Rounds(4, "cubic", finetune=STEP))
    first, *shares = (record.sparsity for record in report.rounds)
    assert shares == sorted(shares)
    assert shares[0] < 0.6
    assert first == shares[-1] == pytest.approx(0.8, abs=0.01)
    assert report.best_round in (0, 3), "the others do not have the final sparsity"


@pytest.mark.slow
def test_prune_gives_the_same_bits_for_the_same_seed():
    states = []
    for _ in range(2):
        model, data = build("convolutional")
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=STEP), seed=5)
        states.append(state_of(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_report_round_trips_through_json():
    import json

    model, data = build("perceptron")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=STEP))
    assert Report.from_dict(json.loads(json.dumps(report.as_dict()))) == report


def test_interruption_restores_the_weights():
    class Impatient(iobs.Callback):
        seen = 0

        def on_layer(self, record, round_index):
            self.seen += 1
            if self.seen == 2:
                raise KeyboardInterrupt

    model, data = build("perceptron")
    model.train()
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", callbacks=[Impatient()])
    assert_same(model, before)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
def test_prune_warns_of_nothing_on_a_good_network():
    model, data = build("transformer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=STEP))


def test_a_store_that_is_used_again_forgets_the_weights_of_its_first_run():
    model = nn.Sequential(nn.Linear(3, 2))
    store = Store(model)
    store.remember(None)
    with torch.no_grad():
        model[0].bias.fill_(1.0)
    store.remember({"0.weight"})
    store.reset()
    assert model[0].bias.tolist() == [1.0, 1.0]
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    with pytest.raises(KeyError), store.unchanged_by_failure():
        raise KeyError
    assert bool((model[0].weight == 2.0).all())
