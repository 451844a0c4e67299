"""Removal: biases, modules that follow their parameters, and errors before any change."""

import copy

import torch
from torch import nn
from traced_sites import find_sites

from iobs.pruning.structure.units import remove

PICTURES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.GroupNorm(4, 8),
        nn.SiLU(),
        nn.Conv2d(8, 6, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.PReLU(6),
        nn.Flatten(),
        nn.Linear(6 * 16, 5, bias=False),
    ).eval()


def test_modules_follow_their_parameters():
    model = network()
    sites = find_sites(model, PICTURES)
    assert {site.name: site.count for site in sites} == {"6": 4, "10": 6}
    remove(model, sites, {"6": [0, 2, 3], "10": [1, 5]})
    assert (model[0].out_channels, model[1].num_features) == (6, 6)
    assert (model[3].in_channels, model[3].out_channels, model[3].groups) == (6, 6, 3)
    assert (model[4].num_groups, model[4].num_channels) == (3, 6)
    assert (model[6].in_channels, model[6].out_channels, model[10].in_features) == (6, 2, 32)
    assert (model[7].num_features, model[8].num_parameters) == (2, 2)
    assert model(PICTURES).shape == (2, 5)


def test_a_network_is_narrowed_twice():
    model = network()
    remove(model, find_sites(model, PICTURES), {"6": [1, 3]})
    sites = find_sites(model, PICTURES)
    assert sites[0].count == 2
    remove(model, sites, {"6": [1]})
    assert model[3].groups == 1
    assert model(PICTURES).shape == (2, 5)


def test_biases_go_to_the_batch_norm_that_follows_or_to_the_layer():
    model = network()
    sites = find_sites(model, PICTURES)
    assert [site.can_bias for site in sites] == [True, False]
    biased = copy.deepcopy(model)
    biases = {"6": torch.linspace(-1, 1, 6), "10": torch.arange(5.0)}
    remove(biased, sites, {}, biases)
    hidden = model[:7](PICTURES) + biases["6"].view(6, 1, 1)
    expected = model[7:](hidden) + biases["10"]
    torch.testing.assert_close(biased(PICTURES), expected)
    assert biased[6].bias is None
    assert torch.equal(biased[10].bias, biases["10"])


def test_bias_of_a_reader_loses_the_rows_that_write_removed_units():
    model = network()
    together, apart = copy.deepcopy(model), copy.deepcopy(model)
    biases = {"6": torch.linspace(-1, 1, 6), "10": torch.arange(5.0)}
    kept = {"6": [0, 2], "10": [1, 3, 4]}
    remove(together, find_sites(model, PICTURES), kept, biases)
    remove(apart, find_sites(model, PICTURES), {}, biases)
    remove(apart, find_sites(model, PICTURES), kept)
    torch.testing.assert_close(together(PICTURES), apart(PICTURES))


def test_gradients_and_state_follow():
    model = network()
    model[0].weight.requires_grad_(False)
    remove(model, find_sites(model, PICTURES), {"6": [0, 1]})
    assert not model[0].weight.requires_grad
    assert model[6].weight.requires_grad
    assert model.state_dict()["1.running_mean"].shape == (4,)


def test_step_aligns_channels():
    site = find_sites(network(), PICTURES)[0]
    assert [site.step(multiple) for multiple in (1, 2, 3, 8)] == [1, 1, 3, 4]


def test_step_aligns_channels_that_a_linear_layer_reads_at_several_positions():
    site = find_sites(network(), PICTURES)[1]
    assert (site.name, len(site.columns[0]), site.step(8)) == ("10", 16, 8)


def test_attributes_of_parameters_are_kept():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight.no_decay = True
    model[0].weight.mask = torch.ones(8, 5)  # of the old shape
    (site,) = find_sites(model, torch.randn(4, 5))
    remove(model, [site], {site.name: range(3)})
    assert vars(model[0].weight) == {"no_decay": True}


def test_kernels_keep_their_memory_format():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    model.to(memory_format=torch.channels_last)
    (site,) = find_sites(model, torch.randn(2, 3, 8, 8))
    remove(model, [site], {site.name: range(8)})
    assert all(model[at].weight.is_contiguous(memory_format=torch.channels_last) for at in (0, 2))
    assert not model[2].weight.is_contiguous()
