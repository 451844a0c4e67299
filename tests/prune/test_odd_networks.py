"""Networks and data that a plain reading of a model would trip over."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import CalibrationError, LayerSelectionError, ModelError, NonFiniteError, PatternError, ProblemError
from iobs.models import ensure_torchvision
from iobs.prune import GradientStep, batches, projection
from iobs.prune.faithful import multiplied_as_they_are
from iobs.prune.layers import select
from iobs.prune.losses import answered, kl_to, kl_to_answers, task_loss
from iobs.prune.network import update_batch_norm
from iobs.prune.parts import Part, divide, split
from iobs.prune.peers import prune_by_fisher
from iobs.prune.progress import Quiet
from iobs.prune.steps import Trainer
from iobs.prune.stream import exact_chain
from iobs.prune.walk import Walk


class Tied(nn.Module):
    """An output head that is the embedding, and two layers that are one matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.second(torch.relu(self.first(self.embedding(tokens))))))


class Unfed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


def tokens():
    return [torch.randint(32, (8, 6)) for _ in range(3)]


def test_a_shared_matrix_is_pruned_once_and_a_tied_head_on_request():
    model = Tied()
    report = iobs.prune(model, tokens(), iobs.Unstructured(0.5))
    assert [row.name for row in report.audit] == ["first"]
    assert report.skipped["second"] == "shares first.weight"
    assert report.skipped["head"] == "tied to an embedding"
    step = iobs.GradientStep(lr=1e-3, optimizer="adam", steps=2, loss="kl", parameters="all")
    iobs.prune(model, tokens(), iobs.Unstructured(0.5), include="head", rounds=2, step=step, polish=step)
    assert int((model.embedding.weight == 0).sum()) == 256


def test_weights_that_are_computed_anew_stay_dense():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4)).eval()
    report = iobs.prune(model, [torch.randn(20, 8)], iobs.Unstructured(0.5))
    assert [row.name for row in report.audit] == ["1"]


def test_layers_that_nothing_is_fed_to():
    report = iobs.prune(Unfed(), [torch.randn(20, 8)], iobs.Unstructured(0.5))
    assert [row.name for row in report.audit] == ["used"]
    assert any("unused" in note for note in report.notes)
    assert "fed it nothing" in report.skipped["unused"]
    with pytest.raises(LayerSelectionError, match=r"Nothing was pruned.*unused"):
        iobs.prune(Unfed(), [torch.randn(20, 8)], iobs.Unstructured(0.5), include="unused")


def test_name_patterns_of_another_type():
    for given in (5, [5]):
        with pytest.raises(LayerSelectionError, match="include takes a name pattern or a list of them"):
            iobs.prune(Unfed(), [torch.randn(20, 8)], iobs.Unstructured(0.5), include=given)


def test_padded_text_with_the_dense_network_as_target():
    """The dense network's blocks run several times: a key-value cache in them would grow."""
    ensure_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **shape)).eval()
    ids = torch.randint(64, (6, 12))
    mask = torch.ones_like(ids)
    mask[:3, 8:], mask[3:, :3] = 0, 0
    report = iobs.prune(model, [{"input_ids": ids, "attention_mask": mask}], iobs.Unstructured(0.5), target="dense")
    assert report.sparsity == 0.5
    assert model.config.use_cache, "put back"


def test_data_that_the_network_cannot_take_is_an_error_of_ours():
    with pytest.raises(CalibrationError, match=r"cannot take calibration batch 0.*\(20, 9\)"):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)).eval(), [torch.randn(20, 9)], iobs.Unstructured(0.5))


def test_one_pair_of_inputs_and_targets_is_no_list_of_batches():
    pair = torch.randn(20, 8), torch.randint(4, (20,))
    with pytest.raises(CalibrationError, match="goes into a list"):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)).eval(), pair, iobs.Unstructured(0.5))
    pieces = torch.randn(20, 8).split(5)  # a tuple of tensors too, and a list of batches
    iobs.prune(nn.Sequential(nn.Linear(8, 4)).eval(), pieces, iobs.Unstructured(0.5))


POLISH = GradientStep(lr=3e-3, optimizer="adam", steps=60, loss="kl", parameters="all", decay=True, batch_size="auto")


def trained(network, inputs, targets, loss):
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss(network(inputs), targets).backward()
        optimizer.step()
    return network.eval()


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
def test_outputs_that_are_numbers_are_compared_as_numbers(shape):
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
    # Evenly spread, so that the projection leaves the polish something to do.
    for name, choices in {"fast": {}, "polished": {"polish": POLISH}}.items():
        pruned = copy.deepcopy(network)
        iobs.prune(pruned, data, iobs.Unstructured(0.6), recipe="fast", allocation="uniform", **choices)
        with torch.no_grad():
            errors[name] = float((pruned(inputs) - targets).square().mean())
    assert errors["polished"] < 0.9 * errors["fast"]


class Squeezed(nn.Module):
    def forward(self, x):
        return x.squeeze(-1)


def test_integer_targets_show_which_dimension_holds_the_classes():
    scores = torch.randn(4, 3, 7)
    assert batches.class_axis(scores, (torch.randn(4, 2, 7), torch.zeros(4, 7, dtype=torch.int64))) == 1
    assert batches.class_axis(scores, (torch.randn(4, 2, 7), torch.zeros(4, 3, dtype=torch.int64))) == 2
    assert batches.class_axis(scores, {"input_ids": torch.zeros(4, 3, dtype=torch.int64)}) == 2
    pixels = torch.randn(2, 8, 9, 5)
    assert batches.class_axis(pixels, (torch.randn(2, 8, 9, 3), torch.zeros(2, 8, 9, dtype=torch.int64))) == 3
    assert batches.class_axis(pixels, torch.randn(2, 3, 9, 5)) == 1
    assert batches.class_axis(torch.randn(4, 9), torch.randn(4, 9)) is None  # a reconstruction
    assert batches.class_axis(torch.randn(4, 1), (torch.randn(4, 9), torch.zeros(4, dtype=torch.int64))) is None


class SkipsABlock(nn.Module):
    """Three blocks; the middle one only where a batch says so."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.blocks[0](x)
        if x.shape[0] == 10:
            x = self.blocks[1](x)
        return self.head(self.blocks[2](x))


@pytest.mark.parametrize("sizes", [(10, 9, 10), (9, 10, 10), (10, 10, 10)])
def test_batches_that_take_different_ways(sizes):
    torch.manual_seed(0)
    network = SkipsABlock().eval()
    data = [torch.randn(size, 6) for size in sizes]
    selected = select(network).layers
    chain = exact_chain(network, data, selected)
    assert bool(chain) == (len(set(sizes)) == 1)
    fed = []
    handle = network.blocks[2][0].register_forward_pre_hook(lambda module, args: fed.append(args[0].double()))
    with torch.no_grad():
        for batch in data:
            network(batch)
    handle.remove()
    found = {}
    Walk(network, Part.of(data), Part(), selected, chain).sweep(
        lambda group, stats: found.update({group[0].name: stats})
    )
    expected = torch.cat(fed).T @ torch.cat(fed) / sum(sizes)
    assert torch.allclose(found["blocks.2.0"].calibration.own[0], expected, atol=1e-6)


class WorksInPlace(nn.Module):
    """Changes its input, and adds to what it has fed to a layer that it calls twice."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x.sub_(0.5).div_(2)
        for _ in range(2):
            x += torch.tanh(self.shared(x))
        return self.head(x)


def test_a_network_that_works_in_place():
    torch.manual_seed(0)
    network = WorksInPlace().eval()
    inputs = torch.randn(30, 6)
    data = [inputs.clone()]
    fed = []
    handle = network.shared.register_forward_pre_hook(lambda module, args: fed.append(args[0].double().clone()))
    with torch.no_grad():
        network(inputs.clone())
    handle.remove()
    found = {}
    walk = Walk(network, Part.of(data), Part(), select(network).layers, [])
    walk.sweep(lambda group, statistics: found.update({group[0].name: statistics}))
    expected = torch.cat(fed).T @ torch.cat(fed) / 60
    assert torch.allclose(found["shared"].calibration.own[0], expected, atol=1e-6)
    iobs.prune(network, data, iobs.Unstructured(0.5), recipe="fast", holdout=0.0)
    assert torch.equal(data[0], inputs), "the caller's samples are as they were"


def sparse_inside():
    """A network whose middle layer is pruned, its data, and where that layer is zero."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    data = [torch.randn(30, 8) for _ in range(4)]
    iobs.prune(network, data, iobs.Unstructured(0.5), include="2")
    zeros = network[2].weight == 0
    return network, data, zeros


def test_what_was_frozen_or_zero_stays_so_in_a_polish():
    network, data, zeros = sparse_inside()
    network[4].bias.requires_grad_(False)
    bias = network[4].bias.clone()
    iobs.prune(network, data, iobs.Unstructured(0.5), skip="2", polish=POLISH, keep_zeros=True)
    assert bool((network[2].weight[zeros] == 0).all())
    assert torch.equal(network[4].bias, bias)
    assert not network[4].bias.requires_grad


def test_a_forward_of_its_own_survives():
    torch.manual_seed(0)
    network = SkipsABlock().eval()
    plain = network.blocks[1].forward
    network.blocks[1].forward = lambda x: plain(x) + 1
    expected = network(torch.ones(10, 6))
    iobs.prune(network, [torch.randn(10, 6) for _ in range(3)], iobs.Unstructured(0.0))
    assert torch.equal(network(torch.ones(10, 6)), expected)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        self.last = torch.relu(self.first(x))
        return self.second(self.last)


def test_a_network_that_keeps_an_activation():
    step = GradientStep(lr=1e-3, loss="kl", support="fixed")
    data = [torch.randn(30, 8) for _ in range(3)]
    iobs.prune(Remembers().eval(), data, iobs.Unstructured(0.5), rounds=3, step=step, target="network")


def test_a_matrix_that_two_modules_share_is_pruned_once_whatever_is_included():
    network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    network[2].weight = network[0].weight
    data = [(torch.randn(30, 8), torch.randint(4, (30,)))]
    report = iobs.prune(network, data, iobs.Unstructured(0.7), include="*", allocation="error")
    assert [row.name for row in report.audit] == ["0", "4"]
    assert report.zeros == round(0.7 * 96)


def test_hardly_any_weight_is_left():
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    report = iobs.prune(network, [torch.randn(60, 8)], iobs.Unstructured(0.999), recipe="fast")
    assert report.weights - report.zeros == round(0.001 * 448)


def test_bounds_where_nothing_is_allocated():
    network = nn.Sequential(nn.Linear(8, 4)).eval()
    for bounds in ({"bounds": {"0": (0.0, 0.1)}}, {"most": 0.2}, {"least": 0.6}):
        for pattern, criterion in ((iobs.NM(2, 4), "auto"), (iobs.Unstructured(0.5), "uniform")):
            with pytest.raises(ProblemError, match="Bounds"):
                iobs.prune(network, [torch.randn(60, 8)], pattern, allocation=iobs.Allocation(criterion, **bounds))


@pytest.mark.parametrize(
    ("width", "targets", "expected"),
    [
        (1, torch.tensor([0, 1, 1]), nn.functional.binary_cross_entropy_with_logits),
        (4, torch.tensor([0, 3, 1], dtype=torch.int32), nn.functional.cross_entropy),
        (1, torch.tensor([0, 3, 1]), None),
        (4, torch.tensor([[0, 3]] * 3), None),
    ],
)
def test_task_losses(width, targets, expected):
    network, inputs = nn.Linear(5, width), torch.randn(3, 5)
    if expected is None:
        with pytest.raises(CalibrationError, match="have no task loss"):
            task_loss(network, (inputs, targets))
        return
    wanted = targets[:, None].float() if width == 1 else targets.long()
    with torch.no_grad():
        assert float(task_loss(network, (inputs, targets))) == pytest.approx(float(expected(network(inputs), wanted)))


def test_peers_on_doubles():
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().eval()
    data = [(torch.randn(30, 8).double(), torch.randint(4, (30,)))]
    for method in ("cbs", "chita"):
        assert prune_by_fisher(network, data, 0.5, method=method).sparsity == pytest.approx(0.5, abs=0.01)


def test_classes_of_pixels():
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
    iobs.prune(pruned, [(images, labels)], iobs.Unstructured(0.5), allocation="fisher")
    assert iobs.audit(pruned)[0].sparsity + iobs.audit(pruned)[1].sparsity > 0.5


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ({"solver": "adm"}, ProblemError),
        ({"refine": "polish"}, ProblemError),
        ({"budget": "slow"}, ProblemError),
        ({"damping": -1.0}, ProblemError),
        ({"pattern": iobs.NM(2, 4), "allocation": "kl"}, PatternError),
        ({"allocation": iobs.Allocation("kl", most=0.4)}, PatternError),
        ({"allocation": iobs.Allocation("kl", bounds={"none": (0.0, 0.5)})}, LayerSelectionError),
    ],
)
def test_impossible_choices_are_found_before_the_data_is_touched(choice, error):
    def untouched():
        raise AssertionError("the data was read")
        yield

    with pytest.raises(error):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)), untouched(), **{"pattern": iobs.Unstructured(0.5), **choice})


def test_a_gradient_that_is_not_finite_names_its_layer():
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    step = iobs.GradientStep(loss=lambda network, batch: network(batch).square().sum().sqrt())  # 0 / 0 at zero
    trainer = Trainer(model, dict(model.named_parameters()), step, step.loss, 1, 0)
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        trainer.run(Part([torch.randn(3, 4)], [0]), lambda *_: None)


@pytest.mark.parametrize("loss", ["task", "kl"])
def test_a_network_with_one_output(loss):
    """Its softmax is always 1: a divergence of distributions would call every round perfect."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
    data = [(torch.randn(20, 8), torch.randn(20, 1))]
    step = iobs.GradientStep(lr=1e-3, loss=loss)
    report = iobs.prune(model, data, iobs.Unstructured(0.5), rounds=2, step=step)
    assert all(record.loss_heldout > 1e-6 for record in report.rounds)


def test_a_polish_by_the_task_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    data = [(torch.randn(20, 8), torch.randint(4, (20,)))]
    report = iobs.prune(model, data, iobs.Unstructured(0.5), polish=iobs.GradientStep(lr=1e-3, loss="task"))
    assert [record.kind for record in report.rounds] == ["projection", "polish"]


class Routed(nn.Module):
    """A mixture whose experts are modules of their own; few tokens go to the last."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.body = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        with torch.no_grad():
            for layer in (self.body, *self.experts):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / 3)
                layer.bias.zero_()

    def forward(self, inputs):
        hidden = self.body(inputs)
        chosen = (hidden[:, 0] > 0).int() + (hidden[:, 0] > 1.5)
        output = torch.zeros(len(inputs), 4)
        for number, expert in enumerate(self.experts):
            if bool((chosen == number).any()):
                output[chosen == number] = expert(hidden[chosen == number])
        return output


@pytest.mark.parametrize("target", ["current", "dense"])
def test_experts_that_are_modules(target):
    """Not every batch feeds each of them, and the dense network feeds them other samples."""
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(6, 8, generator=generator) for _ in range(30)]
    model = Routed()
    with torch.no_grad():
        first = float(model.body(data[0])[:, 0].max())
    assert first <= 1.5, "the first batch alone must not tell of the last expert"
    report = iobs.prune(model, data, iobs.Unstructured(0.5), target=target)
    assert [row.name for row in report.audit] == ["body", "experts.0", "experts.1", "experts.2"]
    assert report.sparsity == 0.5


def test_padding_is_no_data():
    """Neither in a layer's Hessian nor in the divergence from the dense network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).eval()

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids)

    network = Language().eval()
    ids, mask = torch.randint(16, (5, 12)), torch.ones(5, 12, dtype=torch.int64)
    mask[:, 7:] = 0
    other = torch.where(mask == 1, ids, (ids + 1) % 16)
    batches = [{"input_ids": tokens, "attention_mask": mask} for tokens in (ids, other)]
    layers = select(network).layers
    found = []
    Walk(network, Part.of(batches[:1]), Part(), layers, []).sweep(lambda group, statistics: found.append(statistics))
    Walk(network, Part.of(batches[1:]), Part(), layers, []).sweep(lambda group, statistics: found.append(statistics))
    assert [statistics.calibration.count for statistics in found] == [35, 35]
    assert torch.equal(found[0].calibration.own, found[1].calibration.own)
    changed = copy.deepcopy(network)
    with torch.no_grad():
        changed.model[1].weight *= 0.5
    losses = [float(kl_to(network)(changed, batch).detach()) for batch in batches]
    assert losses[0] > 0
    assert losses[0] == pytest.approx(losses[1])


def test_tensors_in_a_tuple_within_a_tuple_are_an_error():
    data = [((torch.randn(4, 8), torch.randn(4, 8)), torch.zeros(4))]
    with pytest.raises(CalibrationError, match="tuple within a tuple"):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)), data, iobs.Unstructured(0.5))


def test_peers_leave_what_the_network_never_uses():
    model = Unfed()
    model.used.weight.requires_grad_(False)
    report = prune_by_fisher(model, [(torch.randn(20, 8), torch.randint(4, (20,)))], 0.5, method="cbs")
    assert report.sparsity == 0.5


class Squeezes(nn.Module):
    """A regression that gives one number a sample, and of one sample a number alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x):
        return self.layers(x).squeeze()


@pytest.mark.parametrize("recipe", ["fast", "best"])
def test_a_single_sample_may_be_squeezed(recipe):
    torch.manual_seed(0)
    network, data = Squeezes(), [(torch.randn(8, 6), torch.randn(8)) for _ in range(4)]
    report = iobs.prune(network, data, iobs.Unstructured(0.5), recipe=recipe, polish=False)
    assert report.sparsity == pytest.approx(0.5, abs=0.02)


class Named(nn.Module):
    """Takes its input by name, and numbers as labels."""

    def __init__(self, shift=0.0):
        super().__init__()
        self.linear, self.shift = nn.Linear(6, 3), shift

    def forward(self, values, labels=None):
        return self.linear(values) + self.shift


def test_labels_in_a_mapping_say_that_answers_are_numbers():
    torch.manual_seed(0)
    dense = Named()
    shifted = copy.deepcopy(dense)
    shifted.shift = 100.0
    batch = {"values": torch.randn(10, 6), "labels": torch.randn(10, 3)}
    stored = answered(dense, Part.of([batch]), 1000)
    expected = kl_to(dense)(shifted, batch).detach()
    assert float(expected) > 1
    assert torch.equal(kl_to_answers(shifted, stored.batches[0]), expected)


def test_impossible_classes_have_no_part_in_the_divergence():
    torch.manual_seed(0)
    allowed = torch.tensor([0.0, 0.0, -math.inf, 0.0])

    class Masked(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + allowed

    data = [torch.randn(40, 6)]
    network = Masked(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    report = iobs.prune(network, data, iobs.Unstructured(0.5), recipe="best", polish=False)
    assert math.isfinite(report.best.loss_heldout)


def test_zeros_that_stay_survive_steps_on_dense_weights():
    network, data, zeros = sparse_inside()
    step = replace(POLISH, support="dense", parameters="all")
    iobs.prune(network, data, iobs.Unstructured(0.5), skip="2", rounds=2, step=step, holdout=0.0, keep_zeros=True)
    assert bool((network[2].weight[zeros] == 0).all())


def test_batch_norm_update_averages_samples_and_leaves_what_is_not_reached():
    torch.manual_seed(0)

    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
            self.auxiliary = nn.BatchNorm1d(16)

        def forward(self, x):
            value = self.first(x)
            return self.last(self.norm(self.auxiliary(value) if self.training else value))

    network = Auxiliary().eval()
    network.auxiliary.running_mean.fill_(5.0)
    values = torch.cat([torch.randn(32, 6), torch.randn(31, 6), torch.randn(3, 6) + 4])
    update_batch_norm(network, Part.of([*values.split([32, 31, 3])]))
    assert torch.allclose(network.norm.running_mean, network.first(values).mean(0), atol=1e-5)
    assert float(network.auxiliary.running_mean.mean()) == 5.0


def test_batch_norm_update_needs_no_whole_batches():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).eval()
    data = [*torch.randn(66, 6).split(32)]
    for seed in range(4):
        iobs.prune(network, data, iobs.Unstructured(0.3), batch_norm="update", holdout=0.3, seed=seed)


def test_tokens_without_a_vocabulary_of_outputs_have_no_task_loss():
    tagger = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 3))

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = tagger

        def forward(self, input_ids):
            return self.layers(input_ids)

    with pytest.raises(CalibrationError, match="needs targets"):
        iobs.prune(Tagger(), [{"input_ids": torch.arange(20).reshape(2, 10)}], iobs.Unstructured(0.5), recipe="paper")


@pytest.mark.parametrize("holdout", [0.0, 0.1])
def test_missing_targets_are_known_before_any_projection(holdout):
    visited = []

    class Watching(Quiet):
        def layer(self, *_):
            visited.append(1)

    network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    with pytest.raises(CalibrationError, match="needs targets"):
        iobs.prune(
            network, [torch.randn(40, 6)], iobs.Unstructured(0.5), recipe="paper", holdout=holdout, progress=Watching()
        )
    assert not visited


class Standardised(nn.Conv2d):
    """Its zeros are none in what multiplies."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, weight, self.bias, self.stride, self.padding)


class Padded(nn.Conv2d):
    """Multiplies another input than it is fed, which the class below cannot take at all where a picture is small."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (3, 3, 3, 3)))


class Scaled(nn.Linear):
    """Takes another argument than the class below, and scales the product."""

    def forward(self, x, scale):
        return super().forward(x) * scale


class Same(nn.Linear):
    """Multiplies as the class below, adding up in another order, and works on its input in place."""

    def forward(self, x):
        product = x @ self.weight.T + self.bias
        x.zero_()
        return product


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.standardised, self.padded = Standardised(3, 8, 3), Padded(8, 4, 7)
        self.same, self.scaled, self.head = Same(4 * 36, 8), Scaled(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.padded(torch.relu(self.standardised(x))).flatten(1)
        return self.head(self.scaled(self.same(hidden), scale=2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_whose_class_multiplies_something_else_stay_dense(dtype):
    torch.manual_seed(0)
    network = Unusual().eval().to(dtype)
    selection = multiplied_as_they_are(network, select(network), torch.randn(6, 3, 8, 8, dtype=dtype))
    assert [layer.name for layer in selection.layers] == ["same", "scaled", "head"]
    assert {name: reason.split(" ")[0] for name, reason in selection.skipped.items()} == dict.fromkeys(
        ("standardised", "padded"), "its"
    )
    data = [(torch.randn(6, 3, 8, 8, dtype=dtype), torch.randint(3, (6,)))]
    report = prune_by_fisher(network, data, 0.5, method="magnitude")
    assert [row.name for row in report.audit] == ["same", "scaled", "head"]
    alone = select(network, include=["standardised", "padded"])
    with pytest.raises(LayerSelectionError, match=r"standardised, padded"):
        multiplied_as_they_are(network, alone, torch.randn(6, 3, 8, 8, dtype=dtype))


def test_plain_layers_cost_no_forward_pass():
    network = nn.Sequential(nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    network.register_forward_pre_hook(lambda *_: pytest.fail("called"))
    selection = select(network)
    assert multiplied_as_they_are(network, selection, torch.randn(4, 8)) is selection


@pytest.mark.parametrize("kind", ["StdConv2d", "ScaledStdConv2d", "Conv2dSame"])
def test_convolutions_of_timm_that_multiply_something_else(kind):
    ensure_torchvision()
    from timm import layers

    network = nn.Sequential(getattr(layers, kind)(3, 8, 3, stride=2), nn.Flatten(), nn.LazyLinear(4)).eval()
    images = torch.randn(4, 3, 8, 8)
    network(images)
    selection = multiplied_as_they_are(network, select(network), images)
    assert [layer.name for layer in selection.layers] == ["2"]
    assert "changes the weight" in selection.skipped["0"]


def test_projections_that_are_computed_anew_stay_dense():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.attention = nn.utils.parametrizations.weight_norm(attention, "in_proj_weight")
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0])

    report = iobs.prune(Attention(), [torch.randn(20, 5, 8)], iobs.Unstructured(0.5))
    assert [row.name for row in report.audit] == ["attention.out_proj", "head"]
    assert any("in_proj_weight" in name for name in report.skipped)


@pytest.mark.parametrize("targets", [None, {"labels": torch.zeros(40, dtype=torch.long)}])
def test_targets_that_are_no_tensor_are_none(targets):
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    step = iobs.GradientStep(loss="task")
    with pytest.raises(CalibrationError, match="needs targets"):
        iobs.prune(network, [(torch.randn(40, 8), targets)], iobs.Unstructured(0.5), rounds=2, step=step)


class Asserts(nn.Linear):
    def forward(self, x):
        assert x.shape[1] == 8, "the width is wrong"
        return super().forward(x.of_images if x.ndim > 2 else x)


@pytest.mark.parametrize(("shape", "cause"), [((40, 9), AssertionError), ((40, 8, 2), AttributeError)])
def test_a_network_that_asserts(shape, cause):
    with pytest.raises(CalibrationError, match=r"batch 0.*(the width is wrong|of_images)") as found:
        iobs.prune(nn.Sequential(Asserts(8, 4)), [torch.randn(shape)], iobs.Unstructured(0.5))
    assert isinstance(found.value.__cause__, cause)


@pytest.mark.parametrize("odd", [torch.randn(10, 9), torch.randn(10, 8).double()])
def test_the_batch_that_does_not_fit_is_named(odd):
    network = nn.Sequential(nn.Linear(8, 4))
    calls = []
    network.register_forward_pre_hook(lambda *_: calls.append(1))
    good = [torch.randn(10, 8) for _ in range(3)]
    with pytest.raises(CalibrationError, match=r"batch 3\b"):
        batches.require_all_accepted(network, batches.collect([*good, odd]))
    assert len(calls) <= 2, "one of a kind is enough"


def test_a_layer_without_weights_is_left_out():
    with pytest.warns(UserWarning, match="zero-element"):
        network = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 4), nn.Linear(4, 4))
    report = iobs.prune(network, [torch.randn(20, 8)], iobs.Unstructured(0.5), damping=0.01)
    assert [row.name for row in report.audit] == ["2"]
    assert report.skipped["0"] == report.skipped["1"] == "without entries"


def test_a_number_is_no_pattern():
    with pytest.raises(PatternError, match=r"0\.5 is no pattern.*Unstructured\(0\.5\)"):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)), [torch.randn(20, 8)], 0.5)


class Rare(nn.Module):
    """A layer that only samples of one kind are sent to."""

    def __init__(self):
        super().__init__()
        self.common, self.rare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.common(x)
        rare = x.new_zeros(len(x), dtype=torch.bool) if not (found := x[:, 0] > 50).any() else found
        return torch.where(rare[:, None], self.rare(x[rare].mean(0)), x) if rare.any() else x


def one_rare_sample(place):
    """Twelve samples for `Rare`, and the network; the one at a place is sent to the rare layer."""
    torch.manual_seed(0)
    model, data = Rare(), torch.randn(12, 8)
    data[place] = 1000 * torch.linalg.pinv(model.common.weight.detach())[:, 0]
    return model, list(data.split(3))


def test_a_layer_that_a_later_round_feeds_nothing_keeps_its_zeros():
    seed = 0
    portions = divide(Part.of([torch.arange(12.0)[:, None]]), 3, seed)
    model, data = one_rare_sample(int(portions[0].batches[0][0, 0]))
    step = GradientStep(lr=1e-3, steps=2, loss="kl", support="dense")
    pattern = iobs.Unstructured(0.5)
    report = iobs.prune(model, data, pattern, rounds=3, step=step, data="fresh", holdout=0.0, seed=seed)
    assert not report.skipped
    assert all(len(record.layers) == 2 for record in report.rounds)
    assert [row.zeros for row in report.audit] == [32, 32]
    assert int((model.rare.weight == 0).sum()) == 32
    assert sum("rare: pruned by magnitude" in note for note in report.notes) == 2


@pytest.mark.parametrize("reached", ["calibrated on", "held out"])
def test_a_layer_is_judged_by_what_reaches_it(reached):
    _, heldout = split(Part.of([torch.arange(12.0)[:, None]]), 0.25, 0)
    held = {int(value) for batch in heldout.batches for value in batch[:, 0]}
    model, data = one_rare_sample(next(place for place in range(12) if (place in held) == (reached == "held out")))
    report = iobs.prune(model, data, iobs.Unstructured(0.5), holdout=0.25)
    common, rare = report.best.layers
    assert common.error_heldout is not None
    assert (rare.error_heldout is None) == (reached == "calibrated on")
    assert ("no sample that is calibrated on reaches it" in rare.stats.get("rule", "")) == (reached == "held out")


def test_a_solution_that_is_not_finite_names_its_layer(monkeypatch):
    model, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), [torch.randn(20, 8)]
    before = copy.deepcopy(model.state_dict())
    solve = projection.solve_layer

    def broken(layer, *arguments):
        solutions = solve(layer, *arguments)
        for solution in solutions if layer.name == "2" else ():
            solution.weight[0, 0] = torch.nan
        return solutions

    monkeypatch.setattr(projection, "solve_layer", broken)
    with pytest.raises(NonFiniteError, match=r"pruned weight of layer '2' holds NaN or infinity in torch.float32"):
        iobs.prune(model, data, iobs.Unstructured(0.5))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Counts(Quiet):
    def __init__(self):
        self.layers = 0

    def layer(self, index, record):
        self.layers += 1


def test_what_a_polish_cannot_do_is_known_before_any_work():
    model, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), [torch.randn(20, 8)]
    told = Counts()
    with pytest.raises(CalibrationError, match="target"):
        iobs.prune(model, data, iobs.Unstructured(0.5), polish=GradientStep(steps=3), progress=told)
    detached = GradientStep(steps=3, loss=lambda module, batch: module(batch).detach().square().mean())
    with pytest.raises(ProblemError, match="no gradient"):
        iobs.prune(model, data, iobs.Unstructured(0.5), polish=detached, progress=told)
    assert told.layers == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": nn.Linear}, ModelError, "got the class Linear"),
        ({"model": {"weight": torch.ones(2)}}, ModelError, "got an object of dict"),
        ({"batches": None}, CalibrationError, "got NoneType"),
        ({"seed": "a"}, ProblemError, "seed must be a whole number, got 'a'"),
        ({"damping": "big"}, ProblemError, "damping must be a number, got 'big'"),
        ({"holdout": "big"}, ProblemError, "holdout must be a number, got 'big'"),
        ({"rounds": 2.0}, ProblemError, "rounds must be a whole number, got 2.0"),
    ],
)
def test_arguments_of_another_type_are_one_clear_error(change, error, message):
    given = {"model": nn.Linear(8, 8), "batches": [torch.randn(8, 8)], "pattern": iobs.Unstructured(0.5), **change}
    with pytest.raises(error, match=message):
        iobs.prune(**given)
