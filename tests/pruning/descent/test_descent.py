"""Gradient steps: learning rates, masks, precision, batches of the steps."""

import numpy as np
import pytest
import torch
from checks import assert_same, state_of
from menagerie import STEP, build
from torch import nn

import iobs
from iobs.errors import NonFiniteError, ProblemError
from iobs.pruning import FineTune
from iobs.pruning.calibration.losses import kl_to
from iobs.pruning.descent import Descent, share_of_rate
from iobs.pruning.descent.augment import FlipShift, copies
from iobs.pruning.descent.batches import drawn_batches
from iobs.pruning.descent.gradients import LossGradient, Masters, ModelLoss
from iobs.pruning.runtime.ranks import ALONE
from iobs.pruning.samples.batches import Samples, rebatched, size
from iobs.pruning.store import Store


def steps_on(model, part, step, loss, masks=None):
    """Take steps on all parameters; returns the losses before them, and the descent."""
    names = [name for name, _ in model.named_parameters()]
    masters = Masters.of(Store(model), names, masks or {}, zero_outside=True)
    descent = Descent(
        LossGradient(ModelLoss(model, loss), masters, ALONE),
        step.optimizer,
        lambda taken: drawn_batches(step, part, None, torch.device("cpu"), taken),
        lambda: 0.0,
        ALONE,
    )
    return descent.run(step.steps, step.lr, "linear" if step.decay else "constant"), descent


def test_steps_keeps_masked_entries_zero_and_lowers_the_loss():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    reference = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).requires_grad_(False)
    mask = (torch.rand(5, 6) < 0.5).float()
    with torch.no_grad():
        model[0].weight *= mask
    step = FineTune(lr=0.01, optimizer="adam", steps=30, loss="kl", decay=True, batch_size=16)
    part = Samples([torch.randn(64, 6)], [0])
    losses, _ = steps_on(model, part, step, kl_to(reference), {"0.weight": mask})
    assert int((model[0].weight * (1 - mask) != 0).sum()) == 0
    assert losses[-1] < losses[0]


def mean_output(model, batch):
    return model(batch).float().mean()


def test_rates_warm_up_and_decay():
    linear = [(1 - taken / 20) * min(1, (taken + 1) / 2) for taken in range(20)]
    assert [share_of_rate("linear", taken, 20) for taken in range(20)] == pytest.approx(linear)
    cosine = [share_of_rate("cosine", taken, 20) for taken in range(20)]
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine[2:] == sorted(cosine[2:], reverse=True)
    assert 0 < cosine[-1] < 0.01


def test_steps_can_be_undone_and_repeated():
    model = nn.Linear(3, 1).half()
    step = FineTune(lr=0.01, optimizer="adam", steps=3, loss=mean_output)
    part = Samples([torch.ones(2, 3).half()], [0])
    masters = Masters.of(Store(model), ["weight"], {})
    gradient = LossGradient(ModelLoss(model, mean_output), masters, ALONE)
    descent = Descent(
        gradient, "adam", lambda taken: drawn_batches(step, part, None, torch.device("cpu"), 0), lambda: 0.0, ALONE
    )
    before = model.weight.detach().clone()
    descent.mark()
    losses = descent.run(3, 0.01)
    after = masters.values["weight"].clone()
    descent.undo()
    assert torch.equal(model.weight, before)
    assert descent.run(3, 0.01) == losses
    assert torch.equal(masters.values["weight"], after)


def test_run_that_does_not_lower_the_loss_is_repeated_with_the_next_rate_then_undone():
    model, judged = nn.Linear(1, 1), [2.0, 1.0, 2.0, 2.0]
    step = FineTune(steps=1, loss=mean_output)
    masters = Masters.of(Store(model), ["weight"], {})
    gradient = LossGradient(ModelLoss(model, mean_output), masters, ALONE)
    part = Samples([torch.ones(2, 1)], [0])
    descent = Descent(
        gradient,
        "sgd",
        lambda taken: drawn_batches(step, part, None, torch.device("cpu"), 0),
        lambda: judged.pop(0),
        ALONE,
    )
    before = float(model.weight.detach())
    descent.mark()
    assert descent.lowers(1.5, 1, (0.5, 0.25))
    assert float(model.weight.detach()) == pytest.approx(before - 0.25)
    descent.undo()
    assert not descent.lowers(1.5, 1, (0.5, 0.25))
    assert float(model.weight.detach()) == before


def test_steps_accumulates_small_steps_in_bfloat16():
    model = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    step = FineTune(lr=1e-3, steps=20, loss=mean_output)
    steps_on(model, Samples([torch.ones(2, 4).bfloat16()], [0]), step, mean_output)
    assert float(model.weight[0, 0].detach()) == pytest.approx(0.98, abs=4e-3)  # a step of 1e-3 alone rounds to 1.0


def test_small_gradients_in_float16_are_no_zeros():
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.ones_(model.weight)

    def loss(model, batch):
        return (model(batch).float() - 1 - 2**-10).square().mean()  # a gradient of 2**-25 for every output

    step = FineTune(lr=1.0, steps=1, loss=loss)
    steps_on(model, Samples([torch.ones(2**16, 1).half()], [0]), step, loss)
    assert float(model.weight.detach()) == pytest.approx(1 + 2**-9, abs=2**-11)


IMPOSSIBLE = [
    {"lr": 0},
    {"lr": -1.0},
    {"lr": "x"},
    {"steps": 0},
    {"steps": 2.5},
    {"optimizer": "lion"},
    {"loss": "mse"},
    {"batch_size": 0},
    {"batch_size": "32"},
    {"augment": "flip"},
]


@pytest.mark.parametrize("settings", IMPOSSIBLE)
def test_gradient_step_refuses_impossible_settings(settings):
    with pytest.raises(ProblemError, match=next(iter(settings))):
        FineTune(**settings)


def test_rebatched_joins_only_samples_of_one_shape():
    part = Samples([{"pixel_values": torch.rand(2, 3, 8, side)} for side in (8, 9)], [0, 1])
    assert copies(FlipShift(True, 0), part, seed=0).samples == 16
    assert rebatched(part, 64) is part
    joined = rebatched(Samples([{"a": torch.ones(3), "b": "text"}] * 3, [0, 1, 2]), 4)
    assert [size(batch) for batch in joined.batches] == [4, 4, 1]


def seen_by(part, step):
    """The sample numbers of each step; the value of a sample is its number."""
    model, seen = nn.Linear(1, 1), []

    def loss(network, batch):
        seen.append(batch[:, 0].int().tolist())
        return network(batch).mean()

    steps_on(model, part, step, loss)
    return seen


def test_steps_draws_from_all_batches_of_any_size():
    numbers = torch.arange(20.0)[:, None]
    step = FineTune(lr=1e-3, optimizer="sgd", steps=7, loss=lambda model, batch: model(batch).mean(), batch_size=8)
    found = seen_by(Samples.of([numbers]), step)
    assert [len(batch) for batch in found] == [8] * 7  # the last 4 of each epoch are left out
    assert len(set(found[0]) | set(found[1])) == 16
    pieces = seen_by(Samples.of(list(numbers.split(3))), step)
    assert [set(batch) for batch in pieces] == [set(batch) for batch in found]


def test_steps_uses_all_samples_if_fewer_than_a_batch():
    step = FineTune(lr=1e-3, optimizer="sgd", steps=2, loss=lambda model, batch: model(batch).mean(), batch_size=8)
    assert [sorted(batch) for batch in seen_by(Samples.of([torch.arange(5.0)[:, None]]), step)] == [[0, 1, 2, 3, 4]] * 2


def test_part_first_takes_the_first_samples():
    part = Samples.of([torch.arange(3.0), torch.arange(3.0, 7.0)])
    assert [batch.tolist() for batch in part.first(5).batches] == [[0, 1, 2], [3, 4]]
    assert part.first(99).samples == 7


def test_gradient_step_accepts_numpy_numbers():
    FineTune(lr=np.float32(0.1), steps=np.int64(3), batch_size=np.int32(8))


def test_steps_names_the_layer_of_a_nonfinite_gradient():
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    step = iobs.FineTune(loss=lambda network, batch: network(batch).square().sum().sqrt())  # 0 / 0 at zero
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        steps_on(model, Samples([torch.randn(3, 4)], [0]), step, step.loss)


def test_finetuning_with_the_task_loss_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    data = [(torch.randn(20, 8), torch.randint(4, (20,)))]
    report = iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", finetune=iobs.FineTune(lr=1e-3, loss="task"))
    assert [record.kind for record in report.rounds] == ["projection", "finetune"]


def test_finetuning_keeps_the_support():
    model, data = build("transformer")
    last = iobs.FineTune(lr=1e-3, optimizer="adam", steps=3, loss="kl", parameters="all", decay=True)
    report = iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", solver="magnitude", finetune=last)
    assert [record.kind for record in report.rounds] == ["projection", "finetune"]
    assert all(row.zeros >= row.asked for row in report.audit)


def test_rounds_of_a_bfloat16_model_keep_its_dtype():
    model, data = build("perceptron")
    model = model.to(torch.bfloat16)
    data = [(inputs.bfloat16(), targets) for inputs, targets in data]
    report = iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(3, finetune=STEP))
    assert model.fc1.weight.dtype == torch.bfloat16
    assert report.sparsity >= 0.5


def test_steps_keep_double_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    last = iobs.FineTune(lr=1e-3, steps=2, loss="kl", support="fixed", parameters="all")
    iobs.prune(model, torch.randn(60, 8, dtype=torch.float64), iobs.Unstructured(0.5), "one-shot", finetune=last)
    weights = model[0].weight.detach()
    assert not torch.equal(weights, weights.float().double())


def test_steps_refuse_a_network_without_gradients():
    class Closed(nn.Sequential):
        @torch.no_grad()
        def forward(self, inputs):
            return super().forward(inputs)

    model = Closed(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    before = state_of(model)
    with pytest.raises(ProblemError, match="loss has no gradient"):
        iobs.prune(model, torch.randn(60, 8), iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=STEP))
    assert_same(model, before)
