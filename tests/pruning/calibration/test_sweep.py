"""The sweep visits each layer once, in execution order, with the inputs that the network feeds it."""

import copy

import pytest
import torch
from menagerie import CASES, CHAINED, build, for_each_group
from torch import nn

from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.chains import exact_chain
from iobs.pruning.calibration.gram import Gram, draw_positions, input_rows
from iobs.pruning.calibration.replay import BEFORE, Stream
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.network.layers import find_layers
from iobs.pruning.network.selection import select
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Samples, split


def walk_of(model, data, **options):
    fit, heldout = split(Samples.of(batches.collect(data)), 0.25, 0)
    selected = select(model).layers
    return Sweep(model, fit, heldout, selected, exact_chain(model, fit.batches, selected), **options)


def calls_by_plain_hooks(model, layer, data):
    """Reference: run the whole network and keep each module that holds the layer's weight, with its input."""
    weight, kept = model.get_parameter(layer.key), []
    holders = [
        one for one in model.modules() if getattr(one, "weight", None) is weight and type(one) is not nn.Embedding
    ]
    handles = [one.register_forward_pre_hook(lambda module, args: kept.append((module, args[0]))) for one in holders]
    with torch.no_grad():
        for batch in data:
            batches.forward(model, batch)
    for handle in handles:
        handle.remove()
    return kept


def inputs_by_plain_hooks(model, layer, data):
    return [value for _, value in calls_by_plain_hooks(model, layer, data)]


def gram_by_unfold(layer, calls):
    """Reference Gram matrix over all output positions, by torch's unfold."""
    total = torch.zeros(layer.groups, layer.shape[1], layer.shape[1], dtype=torch.float64)
    for module, value in calls:
        if isinstance(module, nn.Conv2d):
            columns = nn.functional.unfold(value, module.kernel_size, module.dilation, module.padding, module.stride)
            rows = columns.transpose(1, 2).reshape(-1, layer.groups, layer.shape[1]).transpose(0, 1).double()
        else:
            rows = value.reshape(1, -1, layer.shape[1]).double()
        total += rows.transpose(1, 2) @ rows
    return total


@pytest.mark.parametrize("name", CASES)
def test_sweep_gives_grams_of_the_network_pruned_so_far(name):
    model, data = build(name)
    walk = walk_of(model, data)
    assert bool(walk.chain) == (name in CHAINED)
    seen = []

    def visit(group, statistics):
        for layer in group:
            expected = gram_by_unfold(layer, calls_by_plain_hooks(model, layer, walk.calibration.batches))
            # float32 products of at most some thousand terms, summed in float64
            found = statistics.calibration.own * statistics.calibration.count
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            seen.append(layer)
        for layer in group:  # a changed weight must change the inputs of all later layers
            layer.write(model, layer.read(model) * 0.5)

    for_each_group(walk, visit)
    assert sorted(layer.name for layer in seen) == sorted(layer.name for layer in walk.layers)


def test_sweep_groups_layers_with_one_input():
    model, data = build("transformer")
    groups = []
    for_each_group(walk_of(model, data), lambda group, _: groups.append([layer.name.split(".")[-1] for layer in group]))
    assert groups == [["q", "k", "v"], ["out"], ["up"], ["down"]] * 3


def test_sweep_uses_dense_inputs_if_asked():
    model, data = build("perceptron")
    reference = copy.deepcopy(model)
    walk = walk_of(model, data, reference=reference, dense_inputs=True)

    def visit(group, statistics):
        expected = gram_by_unfold(group[0], calls_by_plain_hooks(reference, group[0], walk.calibration.batches))
        found = statistics.calibration.own * statistics.calibration.count
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        group[0].write(model, group[0].read(model) * 0.5)

    for_each_group(walk, visit)


def test_draw_positions_covers_the_image_anew_each_time():
    generator, value = torch.Generator().manual_seed(0), torch.zeros(1, 1, 20, 20)
    first, second = (draw_positions(nn.Conv2d(1, 1, 1), value, generator) for _ in range(2))
    assert len(first.unique()) == len(second.unique()) == 64
    assert not torch.equal(first, second)
    assert int(first.max()) > 300
    assert draw_positions(nn.Linear(20, 1), value, generator) is None


def test_sweep_pairs_dense_and_pruned_inputs_by_sample():
    model, data = build("transformer")
    reference = copy.deepcopy(model)
    walk = walk_of(model, data, reference=reference)

    def visit(group, statistics):
        layer = group[0]
        own = torch.cat([v.flatten(0, 1) for v in inputs_by_plain_hooks(model, layer, walk.calibration.batches)])
        dense = torch.cat([v.flatten(0, 1) for v in inputs_by_plain_hooks(reference, layer, walk.calibration.batches)])
        gram = statistics.calibration
        cross, energy = gram.cross[0] * gram.count, gram.dense[0] * gram.count
        torch.testing.assert_close(cross, (dense.T @ own).double(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(energy, (dense.T @ dense).double(), rtol=1e-4, atol=1e-4)
        for one in group:
            one.write(model, one.read(model) * 0.7)

    for_each_group(walk, visit)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
@pytest.mark.parametrize("settings", [{}, {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": "same"}])
def test_input_rows_reproduce_the_convolution(settings, padding_mode):
    settings = {"padding": 1, **settings}
    conv = nn.Conv2d(4, 6, 3, bias=False, padding_mode=padding_mode, **settings)
    value = torch.randn(3, 4, 9, 7)
    output = conv(value)
    (layer,) = find_layers(nn.Sequential(conv))
    positions = torch.arange(output.shape[2] * output.shape[3])
    rows = input_rows(layer, conv, value, positions)
    weight = conv.weight.flatten(1).reshape(layer.groups, -1, layer.shape[1])
    found = (rows @ weight.transpose(1, 2)).transpose(0, 1).flatten(1)
    expected = output.flatten(2).transpose(1, 2).reshape(-1, 6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def only_gram(model, data, name):
    """The Gram matrix of one layer on all data, by forward passes of the whole network."""
    found = {}
    walk = Sweep(model, Samples.of(data), Samples(), select(model).layers, [])
    for_each_group(
        walk, lambda group, statistics: found.update({layer.name: statistics.calibration for layer in group})
    )
    return found[name]


class Graph(nn.Module):
    """Multiplies by a sparse matrix, and by matrices under torch.vmap."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("adjacency", torch.eye(10).to_sparse())

    def forward(self, x):
        hidden = self.adjacency @ self.first(x[0])
        return self.second(torch.vmap(lambda matrix: hidden @ matrix)(torch.eye(8).expand(3, 8, 8)).mean(0))[None]


def test_sweep_accepts_sparse_and_vmapped_tensors():
    torch.manual_seed(0)
    model, x = Graph().eval(), torch.randn(1, 10, 8)
    hidden = model.first(x[0]).detach().double()
    torch.testing.assert_close(only_gram(model, [x], "second").own[0], hidden.T @ hidden / 10, rtol=1e-5, atol=1e-6)


class Padded(nn.Module):
    """Attention whose padded positions attend to nothing, so that their rows are NaN."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids, attention_mask):
        hidden = self.embed(input_ids)
        seen = attention_mask.bool()[:, None, :] & torch.ones(hidden.shape[1], hidden.shape[1]).tril().bool()
        weights = (hidden @ hidden.mT).masked_fill(~seen, -torch.inf).softmax(-1)
        return self.out(weights @ hidden)


def test_sweep_ignores_nan_at_padded_positions():
    torch.manual_seed(0)
    mask = torch.ones(6, 10, dtype=torch.int64)
    mask[:, :3] = 0
    batch = {"input_ids": torch.randint(20, (6, 10)), "attention_mask": mask}
    found = only_gram(Padded().eval(), [batch], "out")
    assert found.count == 42
    assert found.own.isfinite().all()


def test_gram_is_exact_under_autocast():
    rows = torch.randn(1, 100, 12)
    (layer,) = find_layers(nn.Sequential(nn.Linear(12, 3)))
    found = Gram.empty(layer, rows.device, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.add(rows)
    torch.testing.assert_close(found.own, (rows.mT @ rows).double())


def test_stream_offloads_hidden_states_batch_by_batch():
    events: list[object] = []
    model, data = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [torch.randn(5, 4) for _ in range(3)]
    model[0].register_forward_hook(lambda *called: events.append("computed"))

    def keep(index, hidden):
        events.append(index)
        return 2 * hidden

    stream = Stream(model, data, [Block("0", 0), Block("1", 0)], keep=keep)
    stream.advance(BEFORE)
    assert [*filter(lambda event: event != "computed", events)] == [0, 1, 2]
    events.clear()
    stream.advance(0)
    assert events == ["computed", 0, "computed", 1, "computed", 2]
    assert torch.equal(stream.hidden[2], 2 * model[0](2 * data[2]))
