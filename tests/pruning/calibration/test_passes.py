"""Forward passes of a sweep, counted at the query projection of every block."""

import copy

import families
import pytest
import torch
from menagerie import for_each_group
from torch import nn

import iobs
from iobs.pruning.calibration.chains import exact_chain
from iobs.pruning.calibration.gram import layer_outputs
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.network.selection import select
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Samples


def swept(with_reference):
    """Samples through q of the last block per sample, and all Grams, in a sweep that halves every weight."""
    torch.manual_seed(0)
    model = families.LANGUAGE_MODELS["llama"][0]().eval()
    fit = Samples.of(batches.collect(families.language_batches()))
    layers = select(model).layers
    reference = copy.deepcopy(model) if with_reference else None
    chain = exact_chain(model, fit.batches, layers)
    sweep = Sweep(model, fit, Samples(), layers, chain, reference, moments=Moments(drift=with_reference))
    seen, grams = 0, []

    def count(module, args, output):
        nonlocal seen
        seen += len(output)

    for one in [model, reference] if with_reference else [model]:
        one.model.layers[-1].self_attn.q_proj.register_forward_hook(count)

    def visit(group, statistics):
        grams.extend(one for one in (statistics.calibration.own, statistics.calibration.cross) if one is not None)
        for layer in group:
            layer.write(model, layer.read(model) * 0.5)

    seen = 0
    for_each_group(sweep, visit)
    return seen, grams, fit


@pytest.mark.parametrize("with_reference", [False, True])
def test_sweep_runs_attention_once_per_model(with_reference, monkeypatch):
    seen, grams, fit = swept(with_reference)
    # One pass of each model, the search for the order, and the check of the shortcut (one batch each).
    most = max(batches.size(batch) for batch in fit.batches)
    assert seen <= (1 + with_reference) * fit.samples + 2 * most
    monkeypatch.setattr("iobs.pruning.calibration.replay.find_shortcuts", lambda *_: [])
    more, expected, _ = swept(with_reference)
    assert more > seen
    assert all(torch.equal(one, other) for one, other in zip(grams, expected, strict=True))


class Neck(nn.Module):
    """Two narrow forms of a hidden state, of which the second is the residual, as in MobileBERT."""

    def __init__(self):
        super().__init__()
        self.shared, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.shared(x)), self.narrow(x)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, value, residual):
        mixed = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(value))
        return self.proj(mixed) + residual


class WithNeck(nn.Module):
    def __init__(self):
        super().__init__()
        self.neck, self.attention, self.fc = Neck(), Mixed(), nn.Linear(8, 8)

    def forward(self, x):
        shared, narrow = self.neck(x)
        return x + self.fc(self.attention(shared, x, narrow))


def test_a_shortcut_does_not_rely_on_shortcuts_whose_inputs_are_known_later(monkeypatch):
    def weights():
        torch.manual_seed(0)
        model = nn.Sequential(*(WithNeck() for _ in range(3)), nn.Linear(8, 4)).eval()
        data = [torch.randn(10, 6, 8) for _ in range(4)]
        iobs.prune(model, data, "50%", "one-shot", holdout=0.0, solver="sparsegpt")
        return model.state_dict()

    found = weights()
    monkeypatch.setattr("iobs.pruning.calibration.replay.find_shortcuts", lambda *_: [])
    expected = weights()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_target_outputs_need_no_second_product_behind_a_shortcut(monkeypatch):
    products = []

    def counted(*args):
        products.append(args)
        return layer_outputs(*args)

    monkeypatch.setattr("iobs.pruning.calibration.sweep.layer_outputs", counted)
    _, grams, _ = swept(True)
    few = len(products)
    monkeypatch.setattr("iobs.pruning.calibration.replay.find_shortcuts", lambda *_: [])
    _, expected, _ = swept(True)
    assert len(products) - few >= 2 * few  # without them also those of attention
    assert all(torch.equal(one, other) for one, other in zip(grams, expected, strict=True))


def _with_hook(linear):
    linear.register_forward_hook(lambda module, args, output: 3 * output)


def _with_forward(linear):
    linear.forward = lambda x: 3 * nn.functional.linear(x, linear.weight, linear.bias)


@pytest.mark.parametrize("change", [_with_hook, _with_forward])
def test_target_outputs_are_those_of_the_weights_where_a_function_changes_the_output(change, monkeypatch):
    def weights():
        torch.manual_seed(0)
        model = families.LANGUAGE_MODELS["llama"][0]().eval()
        for block in model.model.layers:
            change(block.self_attn.o_proj)
        iobs.prune(model, families.language_batches(), 0.5, "one-shot", allocation="uniform")
        return model.state_dict()

    found = weights()
    monkeypatch.setattr("iobs.pruning.calibration.sweep._float32_outputs", lambda *_: None)
    expected = weights()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
