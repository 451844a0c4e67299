"""Shared weights, in-place operations, kept activations and replaced forward methods."""

import pytest
import torch
from menagerie import SkipsABlock, Tied, for_each_group
from torch import nn

import iobs
from iobs.pruning import FineTune
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.network.selection import select
from iobs.pruning.samples.batches import Samples


def tokens():
    return [torch.randint(32, (8, 6)) for _ in range(3)]


def test_shared_weight_is_pruned_once_and_tied_head_on_request():
    model = Tied()
    report = iobs.prune(model, tokens(), iobs.Unstructured(0.5), "one-shot")
    assert [row.name for row in report.audit] == ["first"]
    assert report.skipped["second"] == "shares first.weight"
    assert report.skipped["head"] == "tied to an embedding"
    step = iobs.FineTune(lr=1e-3, optimizer="adam", steps=2, loss="kl", parameters="all")
    iobs.prune(
        model,
        tokens(),
        iobs.Unstructured(0.5),
        "one-shot",
        include="head",
        rounds=iobs.Rounds(2, finetune=step),
        finetune=step,
    )
    assert int((model.embedding.weight == 0).sum()) == 256


class WorksInPlace(nn.Module):
    """Overwrites its input, and adds in place to the input of a layer that it calls twice."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x.sub_(0.5).div_(2)
        for _ in range(2):
            x += torch.tanh(self.shared(x))
        return self.head(x)


def test_in_place_operations_do_not_spoil_the_gram():
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
    walk = Sweep(network, Samples.of(data), Samples(), select(network).layers, [])
    for_each_group(walk, lambda group, statistics: found.update({group[0].name: statistics}))
    expected = torch.cat(fed).T @ torch.cat(fed) / 60
    assert torch.allclose(found["shared"].calibration.own[0], expected, atol=1e-6)
    iobs.prune(network, data, iobs.Unstructured(0.5), "fast", holdout=0.0)
    assert torch.equal(data[0], inputs), "the caller's samples are unchanged"


def test_replaced_forward_method_survives_pruning():
    torch.manual_seed(0)
    network = SkipsABlock().eval()
    plain = network.blocks[1].forward
    network.blocks[1].forward = lambda x: plain(x) + 1
    expected = network(torch.ones(10, 6))
    iobs.prune(network, [torch.randn(10, 6) for _ in range(3)], iobs.Unstructured(0.0), "one-shot")
    assert torch.equal(network(torch.ones(10, 6)), expected)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        self.last = torch.relu(self.first(x))
        return self.second(self.last)


def test_network_that_stores_an_activation_is_pruned():
    step = FineTune(lr=1e-3, loss="kl", support="fixed")
    data = [torch.randn(30, 8) for _ in range(3)]
    iobs.prune(
        Remembers().eval(),
        data,
        iobs.Unstructured(0.5),
        "one-shot",
        rounds=iobs.Rounds(3, finetune=step),
        target="model",
    )


def test_shared_weight_is_counted_once_if_all_are_included():
    network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    network[2].weight = network[0].weight
    data = [(torch.randn(30, 8), torch.randint(4, (30,)))]
    report = iobs.prune(network, data, iobs.Unstructured(0.7), "one-shot", include="*", allocation="auto")
    assert [row.name for row in report.audit] == ["0", "4"]
    assert report.zeros == round(0.7 * 96)


class SharesInside(nn.Module):
    """Two modules of a kind that holds several matrices in one parameter; they share such a parameter."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        if kind == "attention":
            self.a, self.b = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
            self.b.in_proj_weight = self.a.in_proj_weight
        else:
            self.a, self.b = (nn.LSTM(8, 8, batch_first=True) for _ in range(2))
            self.b.weight_hh_l0 = self.a.weight_hh_l0
        self.head = nn.Linear(8, 3)

    def forward(self, value):
        for one in (self.a, self.b):
            found, _ = one(value, value, value) if isinstance(one, nn.MultiheadAttention) else one(value)
            value = value + found
        return self.head(value.mean(1))


@pytest.mark.parametrize(("kind", "name"), [("attention", "in_proj_weight.q"), ("recurrence", "weight_hh_l0.i")])
def test_shared_parameters_of_several_matrices_are_pruned_once_on_the_inputs_of_both_modules(kind, name):
    model = SharesInside(kind).eval()
    report = iobs.prune(model, [torch.randn(30, 5, 8)], 0.5, iobs.Recipe(solver="magnitude"), holdout=0)
    records = {one.name: one for one in report.layers}
    assert records[f"a.{name}"].inputs == 2 * 16 * 5
    assert f"b.{name}" not in records
    assert "shares a." in report.skipped[f"b.{name}"]
    assert report.coverage.parameters == sum(one.numel() for one in model.parameters())
    assert len({row.name for row in iobs.audit(model, 0.5)}) == len(records) + len(report.skipped)


def test_parts_of_a_shared_parameter_are_chosen_by_name():
    names = ["a.in_proj_weight.q", "b.in_proj_weight.k", "b.in_proj_weight.q"]
    selection = select(SharesInside("attention"), names)
    assert [layer.name for layer in selection.layers] == names[:2]


class Transposed(nn.Module):
    """An encoder whose decoder is the transpose of the same memory, in a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 24), nn.Linear(24, 16)
        self.decode.weight = nn.Parameter(self.encode.weight.data.t())

    def forward(self, x):
        return self.decode(self.encode(x).relu())


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_memory_behind_two_parameters_is_pruned_and_counted_once(recipe):
    model = Transposed()
    report = iobs.prune(model, [torch.randn(32, 16) for _ in range(3)], 0.5, recipe)
    assert [row.name for row in report.audit] == ["encode"]
    assert report.skipped == {"decode": "shares the memory of encode.weight"}
    assert report.coverage.parameters == 16 * 24 + 24 + 16
    assert int((model.encode.weight == 0).sum()) == 16 * 24 // 2
    assert torch.equal(model.decode.weight, model.encode.weight.T)


def test_neighbours_in_one_storage_are_two_matrices():
    flat = torch.randn(2, 8, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4))
    for layer, part in zip(model, (*flat, flat[0, :4].repeat(1, 2)), strict=True):
        layer.weight = nn.Parameter(part)
    assert len(select(model).layers) == 3
