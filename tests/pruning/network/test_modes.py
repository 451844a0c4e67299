"""State of the network and the caller: training mode, autocast, inference mode, random numbers, batch norm."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from checks import assert_same, state_of
from menagerie import STEP, build, two_layers
from torch import nn

import iobs
from iobs.errors import ModelError
from iobs.pruning.network.modes import update_batch_norm
from iobs.pruning.samples.batches import Samples


def test_batch_norm_update_weighs_samples_not_batches():
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
    update_batch_norm(network, Samples.of([*values.split([32, 31, 3])]))
    assert torch.allclose(network.norm.running_mean, network.first(values).mean(0), atol=1e-5)
    assert float(network.auxiliary.running_mean.mean()) == 5.0


def test_batch_norm_update_accepts_a_smaller_last_batch():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).eval()
    data = [*torch.randn(66, 6).split(32)]
    for seed in range(4):
        iobs.prune(network, data, iobs.Unstructured(0.3), "one-shot", batch_norm="update", holdout=0.3, seed=seed)


def test_batch_norm_changes_statistics_only_if_update():
    for choice in ("keep", "update"):
        model, data = build("convolutional")
        before = model.stages[0][0].norm.running_mean.clone()
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", solver="magnitude", batch_norm=choice)
        assert torch.equal(before, model.stages[0][0].norm.running_mean) == (choice == "keep")


def pruned_alone(**options):
    model, data = two_layers()
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", **options)
    return state_of(model)


def test_prune_ignores_autocast_of_the_caller():
    model, data = two_layers()
    with torch.autocast("cpu", torch.bfloat16):
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=STEP))
    assert_same(model, pruned_alone(rounds=iobs.Rounds(2, finetune=STEP)))


def test_prune_accepts_a_compiled_network():
    model, data = two_layers()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(data)
    iobs.prune(compiled, data, iobs.Unstructured(0.5), "one-shot")
    assert_same(model, pruned_alone())


def test_prune_ignores_inference_mode_of_the_caller():
    model, data = two_layers()
    with torch.inference_mode():
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=STEP))
    assert_same(model, pruned_alone(rounds=iobs.Rounds(2, finetune=STEP)))


class Merging(nn.Linear):
    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_prune_restores_modes_by_calling_train():
    model = nn.Sequential(Merging(8, 8), nn.Dropout(), nn.Linear(8, 4))
    model[1].eval()
    iobs.prune(model, torch.randn(30, 8), iobs.Unstructured(0.5), "one-shot")
    assert model[0].training
    assert not model[0].merged
    assert not model[1].training


def test_prune_calls_train_only_on_modules_that_were_training():
    model = nn.Sequential(Merging(8, 8), nn.Sequential(Merging(8, 8), nn.Linear(8, 4)))
    model[0].eval()
    iobs.prune(model, torch.randn(30, 8), iobs.Unstructured(0.5), "one-shot")
    assert [(model[0].training, model[0].merged), (model[1][0].training, model[1][0].merged)] == [
        (False, True),
        (True, False),
    ]


def test_prune_accepts_expanded_buffers():
    model, data = two_layers()
    model.register_buffer("mask", torch.ones(1, 16).expand(3, 16))
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=STEP))


def test_prune_refuses_a_network_that_cannot_be_copied():
    model, data = two_layers()
    model.last_loss = model(data).sum()
    with pytest.raises(ModelError, match="cannot be copied"):
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", target="dense")


def test_prune_restores_the_random_state():
    model, data = two_layers()
    before = torch.get_rng_state()
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", rounds=iobs.Rounds(2, finetune=STEP))
    assert torch.equal(torch.get_rng_state(), before)


def test_prune_accepts_a_frozen_configuration():
    model, data = two_layers()
    model.config = SimpleNamespace(use_cache=True)
    model[0].config = namedtuple("Config", "use_cache")(True)
    used = []
    model.register_forward_hook(lambda *_: used.append(model.config.use_cache))
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot")
    assert not any(used)
    assert model.config.use_cache
