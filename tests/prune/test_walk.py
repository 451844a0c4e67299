"""Layers are seen once each, in execution order, with exactly the inputs that the network really feeds them."""

import copy

import pytest
import torch
from networks import CASES, build

from iobs.prune import batches, layers
from iobs.prune.gram import input_rows
from iobs.prune.stream import exact_chain
from iobs.prune.walk import Walk


def walk_of(model, data, **options):
    fit, heldout = batches.split(batches.Part.of(batches.collect(data)), 0.25, 0)
    selected = layers.select(model).layers
    return Walk(model, fit, heldout, selected, exact_chain(model, fit.batches, selected), **options)


def inputs_by_plain_hooks(model, layer, data):
    """Reference: run the whole network, keep what the layer is called with."""
    kept = []
    handle = model.get_submodule(layer.path).register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
    with torch.no_grad():
        for batch in data:
            batches.forward(model, batch)
    handle.remove()
    return kept


def gram_by_unfold(model, layer, values):
    """Reference Gram of every output position, by torch's own unfold."""
    module = model.get_submodule(layer.path)
    total = torch.zeros(layer.groups, layer.shape[1], layer.shape[1], dtype=torch.float64)
    for value in values:
        if isinstance(module, torch.nn.Conv2d):
            columns = torch.nn.functional.unfold(
                value, module.kernel_size, module.dilation, module.padding, module.stride
            )
            rows = columns.transpose(1, 2).reshape(-1, layer.groups, layer.shape[1]).transpose(0, 1).double()
        else:
            rows = value.reshape(1, -1, layer.shape[1]).double()
        total += rows.transpose(1, 2) @ rows
    return total


@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_the_network_pruned_so_far(name):
    model, data = build(name)
    walk = walk_of(model, data)
    assert bool(walk.chain) == (name != "perceptron")
    seen = []

    def visit(group, statistics):
        for layer in group:
            values = inputs_by_plain_hooks(model, layer, walk.calibration.batches)
            expected = gram_by_unfold(model, layer, values)
            # float32 products of at most some thousand terms, summed in float64
            found = statistics.calibration.own * statistics.calibration.count
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            seen.append(layer)
        for layer in group:  # what is written must be felt by all that follows
            layer.write(model, layer.read(model) * 0.5)

    walk.sweep(visit)
    assert sorted(layer.name for layer in seen) == sorted(layer.name for layer in walk.layers)


def test_layers_with_one_input_share_a_gram():
    model, data = build("transformer")
    groups = []
    walk_of(model, data).sweep(lambda group, _: groups.append([layer.name.split(".")[-1] for layer in group]))
    assert groups == [["q", "k", "v"], ["out"], ["up"], ["down"]] * 3


def test_dense_stream_is_paired_sample_by_sample():
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

    walk.sweep(visit)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
@pytest.mark.parametrize("settings", [{}, {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": "same"}])
def test_convolution_rows_reproduce_the_convolution(settings, padding_mode):
    settings = {"padding": 1, **settings}
    conv = torch.nn.Conv2d(4, 6, 3, bias=False, padding_mode=padding_mode, **settings)
    value = torch.randn(3, 4, 9, 7)
    output = conv(value)
    (layer,) = layers.find_layers(torch.nn.Sequential(conv))
    positions = torch.arange(output.shape[2] * output.shape[3])
    rows = input_rows(layer, conv, value, positions)
    weight = conv.weight.flatten(1).reshape(layer.groups, -1, layer.shape[1])
    found = (rows @ weight.transpose(1, 2)).transpose(0, 1).flatten(1)
    expected = output.flatten(2).transpose(1, 2).reshape(-1, 6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
