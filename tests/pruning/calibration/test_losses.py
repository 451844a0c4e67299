"""Losses of a network on a batch: task losses, divergence from the dense network, batches without a loss."""

import copy
import math

import families
import pytest
import torch
from menagerie import POLISH, Squeezed
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import iobs
from iobs.errors import CalibrationError
from iobs.pruning.calibration import losses
from iobs.pruning.calibration.losses import answered, divergence, kl_to, kl_to_answers, metric, task_loss
from iobs.pruning.samples.batches import Samples
from iobs.pruning.samples.outputs import returns_states


def trained(network, inputs, targets, loss):
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss(network(inputs), targets).backward()
        optimizer.step()
    return network.eval()


def test_hidden_states_are_compared_by_squared_distance_without_padding():
    """A softmax over their dimensions would see little but the largest one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertModel(BertConfig(**sizes, vocab_size=48)).eval()
    pruned = copy.deepcopy(model)
    mask = torch.ones(6, 9, dtype=torch.long)
    mask[::2, 5:] = 0
    batch = {"input_ids": torch.randint(0, 48, (6, 9)), "attention_mask": mask}
    report = iobs.prune(pruned, [batch] * 4, 0.5, "one-shot")
    with torch.no_grad():
        before, after = (one(**batch).last_hidden_state[mask > 0] for one in (model, pruned))
        expected = float((after - before).square().sum() / before.square().sum())
        assert float(kl_to(model)(pruned, batch)) == pytest.approx(expected, rel=1e-5)
    assert "hidden states" in report.loss_name


def test_distance_of_numbers_is_not_called_a_divergence_in_nats():
    torch.manual_seed(0)
    data = [(torch.randn(16, 6), torch.randn(16, 3)) for _ in range(4)]
    for batches, name in ((data, "squared distance to"), ([(x, y.argmax(1)) for x, y in data], "KL to")):
        network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        rounds = iobs.pruning.recipe.Rounds(3, "auto")
        report = iobs.prune(network, batches, 0.5, iobs.Recipe(rounds=rounds))
        assert report.loss_name == f"{name} the dense model"
        assert any("nats" in note for note in report.notes) == (name == "KL to")


T5 = T5Config(d_model=16, d_kv=4, d_ff=24, num_heads=2, num_layers=1, vocab_size=48)
LLAMA = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=48)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (LlamaModel(LLAMA), True),
        (LlamaForCausalLM(LLAMA), False),
        (T5EncoderModel(T5), True),
        (T5ForConditionalGeneration(T5), False),  # is the base model of itself
        (nn.Linear(2, 2), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_models_without_a_head_return_states(model, expected):
    assert returns_states(model) is expected


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_kl_to_compares_real_outputs_by_squared_error(shape):
    torch.manual_seed(0)
    inputs = torch.randn(240, 12)
    targets = (inputs @ torch.randn(12, 5) + 3)[:, : math.prod(shape)].reshape(240, *shape)
    last = nn.Identity() if shape else Squeezed()
    network = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, math.prod(shape)), last)
    network = trained(network, inputs, targets, nn.functional.mse_loss)
    moved, errors = copy.deepcopy(network), {}
    with torch.no_grad():
        moved[2].bias += 1.0  # which a softmax over five outputs is blind to
        expected = (moved(inputs) - network(inputs)).square().sum() / network(inputs).square().sum()
        assert float(kl_to(network)(moved, (inputs, targets))) == pytest.approx(float(expected), rel=1e-4)
    data = [*zip(inputs.split(40), targets.split(40), strict=True)]
    # A uniform allocation leaves an error that fine-tuning can remove.
    for name, choices in {"fast": {}, "finetuned": {"finetune": POLISH}}.items():
        pruned = copy.deepcopy(network)
        iobs.prune(pruned, data, iobs.Unstructured(0.6), iobs.Recipe(target="dense", solver="sparsegpt"), **choices)
        with torch.no_grad():
            errors[name] = float((pruned(inputs) - targets).square().mean())
    assert errors["finetuned"] < 0.9 * errors["fast"]


@pytest.mark.parametrize(
    ("width", "targets", "expected"),
    [
        (1, torch.tensor([0, 1, 1]), nn.functional.binary_cross_entropy_with_logits),
        (4, torch.tensor([0, 3, 1], dtype=torch.int32), nn.functional.cross_entropy),
        (1, torch.tensor([0, 3, 1]), None),
        (4, torch.tensor([[0, 3]] * 3), None),
    ],
)
def test_task_loss_follows_the_type_of_the_targets(width, targets, expected):
    network, inputs = nn.Linear(5, width), torch.randn(3, 5)
    if expected is None:
        with pytest.raises(CalibrationError, match="have no task loss"):
            task_loss(network, (inputs, targets))
        return
    wanted = targets[:, None].float() if width == 1 else targets.long()
    with torch.no_grad():
        assert float(task_loss(network, (inputs, targets))) == pytest.approx(float(expected(network(inputs), wanted)))


def test_losses_of_pixel_classes_average_over_pixels():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 5, 1)).eval()
    pruned = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 5, 1)).eval()
    images = torch.randn(6, 3, 7, 9)
    with torch.no_grad():
        answers = [network(images).permute(0, 2, 3, 1).reshape(-1, 5).log_softmax(1) for network in (dense, pruned)]
        expected = (answers[0].exp() * (answers[0] - answers[1])).sum(1).mean()
        assert float(kl_to(dense)(pruned, images)) == pytest.approx(float(expected), rel=1e-5)
        labels = torch.randint(5, (6, 7, 9))
        likelihood = -answers[1].gather(1, labels.reshape(-1, 1)).mean()
        assert float(task_loss(pruned, (images, labels))) == pytest.approx(float(likelihood), rel=1e-5)
    iobs.prune(pruned, [(images, labels)], iobs.Unstructured(0.5), "one-shot", allocation="fisher")
    assert iobs.audit(pruned)[0].sparsity + iobs.audit(pruned)[1].sparsity > 0.5


@pytest.mark.parametrize("loss", ["task", "kl"])
def test_losses_of_a_single_output_are_not_zero(loss):
    """The softmax of one output is always 1, so a divergence of distributions would be zero in every round."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
    data = [(torch.randn(20, 8), torch.randn(20, 1))]
    step = iobs.FineTune(lr=1e-3, loss=loss)
    report = iobs.prune(
        model, data, iobs.Unstructured(0.5), "one-shot", solver="magnitude", rounds=iobs.Rounds(2, finetune=step)
    )
    assert all(record.loss_heldout > 1e-6 for record in report.rounds)


class Named(nn.Module):
    """Takes its input by keyword, and real numbers as labels."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.linear, self.shift = nn.Linear(6, 3), shift

    def forward(self, values, labels=None):
        return self.linear(values) + self.shift


def test_kl_to_reads_real_labels_in_a_mapping():
    torch.manual_seed(0)
    dense = Named()
    shifted = copy.deepcopy(dense)
    shifted.shift = 100.0
    batch = {"values": torch.randn(10, 6), "labels": torch.randn(10, 3)}
    stored = answered(dense, Samples.of([batch]), 1000)
    expected = kl_to(dense)(shifted, batch).detach()
    assert float(expected) > 1
    assert torch.equal(kl_to_answers(shifted, stored.batches[0]), expected)


def test_kl_to_ignores_classes_with_logit_minus_infinity():
    torch.manual_seed(0)
    allowed = torch.tensor([0.0, 0.0, -math.inf, 0.0])

    class Masked(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + allowed

    data = [torch.randn(40, 6)]
    network = Masked(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    short = {"finetune": None, "solver": "sparsegpt", "allocation": iobs.Allocation("search", generations=3)}
    report = iobs.prune(network, data, iobs.Unstructured(0.5), "best", **short)
    assert math.isfinite(report.best.loss_heldout)


def test_task_loss_refuses_tokens_without_vocabulary_logits():
    tagger = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 3))

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = tagger

        def forward(self, input_ids):
            return self.layers(input_ids)

    with pytest.raises(CalibrationError, match="needs targets"):
        iobs.prune(Tagger(), [{"input_ids": torch.arange(20).reshape(2, 10)}], iobs.Unstructured(0.5), "paper")


@pytest.mark.parametrize("holdout", [0.0, 0.1])
def test_missing_targets_raise_before_any_projection(holdout):
    visited = []

    class Watching(iobs.Callback):
        def on_layer(self, *_):
            visited.append(1)

    network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    with pytest.raises(CalibrationError, match="needs targets"):
        iobs.prune(
            network, [torch.randn(40, 6)], iobs.Unstructured(0.5), "paper", holdout=holdout, callbacks=[Watching()]
        )
    assert not visited


@pytest.mark.parametrize("targets", [None, {"labels": torch.zeros(40, dtype=torch.long)}])
def test_targets_that_are_not_a_tensor_count_as_missing(targets):
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    step = iobs.FineTune(loss="task")
    with pytest.raises(CalibrationError, match="needs targets"):
        iobs.prune(
            network,
            [(torch.randn(40, 8), targets)],
            iobs.Unstructured(0.5),
            "one-shot",
            rounds=iobs.Rounds(2, finetune=step),
        )


@pytest.mark.parametrize("padded", [False, True])
def test_divergence_in_pieces_equals_the_divergence_at_once(padded, monkeypatch):
    torch.manual_seed(0)
    dense, sparse = torch.randn(2, 3, 7, 11).unbind()
    batch = {"input_ids": torch.zeros(3, 7, dtype=torch.int64)}
    if padded:
        batch["attention_mask"] = torch.ones(3, 7).index_fill(1, torch.tensor([5]), 0)
    found = []
    for whole in (10**9, 0):
        monkeypatch.setattr(losses, "WHOLE", whole)
        monkeypatch.setattr(losses, "PIECE", 40)
        given = sparse.clone().requires_grad_(True)
        loss = divergence(nn.Identity(), batch, dense, given)
        found.append((loss.detach(), *torch.autograd.grad(loss, given)))
    for one, pieces in zip(*found, strict=True):
        assert torch.allclose(one, pieces, rtol=1e-5, atol=1e-8)


def tiny_llama():
    torch.manual_seed(0)
    return families.LANGUAGE_MODELS["llama"][0]().eval()


def labelled(count=3):
    tokens = families.language_batches(batch=count)[0]["input_ids"]
    return {"input_ids": tokens, "labels": tokens.clone().index_fill_(1, torch.tensor([5]), losses.IGNORED)}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_loss_in_pieces_equals_the_loss_at_once(reduction, monkeypatch):
    torch.manual_seed(0)
    values, found = torch.randn(3, 7, 11), []
    labels = torch.randint(11, (3, 7)).index_fill_(1, torch.tensor([4]), losses.IGNORED)
    monkeypatch.setattr(losses, "PIECE", 40)
    for whole in (10**9, 0):
        monkeypatch.setattr(losses, "WHOLE", whole)
        given = values.clone().requires_grad_(True)
        loss = losses.next_token_loss(given, labels, reduction)
        found.append((loss.detach(), *torch.autograd.grad(loss, given)))
    for one, pieces in zip(*found, strict=True):
        assert torch.allclose(one, pieces, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("batch", [labelled(), families.language_batches()[0]], ids=["own loss", "tokens"])
def test_task_loss_of_a_language_model_needs_no_float32_copy_of_all_scores(batch, monkeypatch):
    model, found, rows = tiny_llama(), [], []
    usual = torch.nn.functional.cross_entropy

    def counted(scores, *args, **kwargs):
        rows.append(len(scores))
        return usual(scores, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", counted)
    monkeypatch.setattr(losses, "PIECE", 48 * 5)
    for whole in (10**9, 0):
        monkeypatch.setattr(losses, "WHOLE", whole)
        rows.clear()
        found.append(torch.autograd.grad(task_loss(model, batch), model.lm_head.weight)[0])
    assert max(rows) == 5
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)
    assert "_loss_function" not in vars(model)


@pytest.mark.parametrize("batch", [labelled(), families.language_batches()[0]], ids=["labels", "tokens"])
def test_metric_in_pieces_equals_the_metric_at_once(batch, monkeypatch):
    model, found = tiny_llama(), []
    monkeypatch.setattr(losses, "PIECE", 48 * 5)
    for whole in (10**9, 0):
        monkeypatch.setattr(losses, "WHOLE", whole)
        found.append(metric(model, Samples.of([batch])))
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"], rel=1e-6)


class Counting(nn.Module):
    """Records the number of samples of each call."""

    def __init__(self):
        super().__init__()
        self.linear, self.samples = nn.Linear(6, 10), []

    def forward(self, value):
        self.samples.append(len(value))
        return self.linear(value)


def test_answers_are_computed_for_the_samples_that_are_kept():
    model, data = Counting(), [torch.randn(8, 6), torch.randn(8, 6), torch.randn(2, 6)]
    stored = answered(model, Samples.of(data), 110)
    assert model.samples == [1, 8, 3]  # a first sample shows the size of the outputs
    assert [len(answer) for _, answer in stored.batches] == [8, 3]
    expected = answered(model, Samples.of([data[0], data[1][:3]]), 10**6)
    for one, other in zip(stored.batches, expected.batches, strict=True):
        assert all(map(torch.equal, one, other))


def test_distance_of_block_outputs_takes_a_block_without_output():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    loss = losses.block_distance_to(copy.deepcopy(model), ["0", "1"])
    assert float(loss(model, torch.ones(3, 4)).detach()) == 0.0


class Returning(nn.Module):
    """A linear layer whose output another function changes."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(16, 8), change

    def forward(self, x):
        return self.change(self.layer(x))


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_a_model_that_returns_its_loss_is_told_so(recipe):
    model = Returning(lambda y: y.pow(2).sum())
    with pytest.raises(CalibrationError, match=r"Returning returns a single number .* such as a loss"):
        iobs.prune(model, [torch.randn(32, 16) for _ in range(2)], 0.5, recipe)


@pytest.mark.parametrize(
    "change", [lambda y: {"out": {"logits": y}}, lambda y: ([y], {"more": y}), lambda y: {"loss": y.sum(), "out": [y]}]
)
def test_outputs_inside_others_are_found(change):
    batch = torch.randn(64, 16)
    assert iobs.prune(Returning(change), [batch], 0.5, "one-shot").sparsity > 0.4


def test_numbers_of_classes_as_floats_are_refused_and_counts_are_no_classes():
    torch.manual_seed(0)
    inputs, classes = torch.randn(12, 4), torch.arange(12) % 3
    with pytest.raises(CalibrationError, match=r"give labels.long\(\)"):
        iobs.prune(nn.Linear(4, 3), [(inputs, classes.float())], 0.5, "one-shot")
    assert iobs.prune(nn.Linear(4, 1), [(inputs, classes)], 0.5, "one-shot").scores == {}
    assert iobs.prune(nn.Linear(4, 3), [(inputs, torch.randn(12, 3))], 0.5, "one-shot").scores == {}
