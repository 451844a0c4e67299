"""Forward passes of a sweep, counted at the query projection of every block."""

import copy

import families
import pytest
import torch
from menagerie import for_each_group
from torch import nn

import iobs
from iobs.pruning.calibration.bypasses import Bypass
from iobs.pruning.calibration.replay import exact_chain
from iobs.pruning.calibration.shortcuts import Shortcuts
from iobs.pruning.calibration.sweep import Moments, Sweep
from iobs.pruning.network.layers import Layer
from iobs.pruning.network.selection import select
from iobs.pruning.samples import batches
from iobs.pruning.samples.subsets import Samples


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
    monkeypatch.setattr("iobs.pruning.calibration.inputs.find_shortcuts", lambda *_: [])
    more, expected, _ = swept(with_reference)
    assert more > seen
    assert all(torch.equal(one, other) for one, other in zip(grams, expected, strict=True))


class Block(nn.Module):
    """A block whose attention is a function, with rotary factors; `reads` uses an output of q behind attention."""

    def __init__(self, width=8, reads=""):
        super().__init__()
        self.reads = reads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        factors = torch.linspace(0.5, 1.5, x.shape[-1])
        if self.reads == "in place":
            x = x.clone()
            x += 0.1 * q
        if self.reads == "branch" and bool((q > 0).any()):
            x = x + 1
        mixed = nn.functional.scaled_dot_product_attention(q * factors, k * factors, v)
        x = self.norm1(x + self.proj(mixed))
        if self.reads == "value":
            x = x + 0.1 * q
        return self.norm2(x + self.fc2(torch.relu(self.fc1(x))))


def pruned(reads, monkeypatch=None, recipe="fast", **settings):
    """Samples through qkv of the last block per sample, and the pruned weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(reads=reads) for _ in range(3))).eval()
    data = [torch.randn(10, 5, 8) for _ in range(6)]
    if monkeypatch is not None:
        monkeypatch.setattr("iobs.pruning.calibration.inputs.bypasses", lambda *_: [])
    seen = 0

    def count(module, args, output):
        nonlocal seen
        seen += 0 if output.is_meta else len(output)

    model[-1].qkv.register_forward_hook(count)
    iobs.prune(model, data, "50%", recipe, holdout=0.0, solver="sparsegpt", **settings)
    return seen / 60, model.state_dict()


@pytest.mark.parametrize("target", ["layer", pytest.param("residual", marks=pytest.mark.slow)])
def test_attention_that_is_a_function_runs_once(target, monkeypatch):
    settings = {"target": target, "allocation": "block", "blocks": None}
    fewer, found = pruned("", **settings)
    more, expected = pruned("", monkeypatch, **settings)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    # Of every model, qkv runs for the inputs of proj, and no longer for those of fc1 and fc2, and the block's output.
    models = 2 if target == "residual" else 1
    assert more - fewer > 2.5 * models


@pytest.mark.parametrize("reads", ["value", "in place", "branch"])
def test_no_bypass_is_taken_if_the_rest_of_the_block_reads_a_skipped_output(reads, monkeypatch):
    _, found = pruned(reads, recipe="one-shot", target="residual")
    _, expected = pruned(reads, monkeypatch, "one-shot", target="residual")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Reduced(nn.Module):
    """Attention as a module of its own, whose keys and values come from a reduction that runs after the queries."""

    def __init__(self, width=8):
        super().__init__()
        self.q, self.reduction = nn.Linear(width, width), nn.Linear(2 * width, width)
        self.kv, self.proj = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x):
        q = self.q(x)
        k, v = self.kv(self.reduction(x.unflatten(1, (-1, 2)).flatten(2))).chunk(2, -1)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v))


class WithReduction(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.fc, self.norm = Reduced(), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        x = self.norm(x + self.attention(x))
        return x + self.fc(x)


def assert_same_weights_without(monkeypatch, finder, network):
    """Prune a network twice, the second time with a function that finds nothing."""

    def weights():
        torch.manual_seed(0)
        model = network().eval()
        data = [torch.randn(10, 6, 8) for _ in range(4)]
        iobs.prune(model, data, "50%", "one-shot", holdout=0.0, solver="sparsegpt")
        return model.state_dict()

    found = weights()
    monkeypatch.setattr(f"iobs.pruning.calibration.inputs.{finder}", lambda *_: [])
    expected = weights()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_bypass_does_not_rely_on_shortcuts_whose_inputs_are_known_later(monkeypatch):
    def network():
        return nn.Sequential(*(WithReduction() for _ in range(3)))

    assert_same_weights_without(monkeypatch, "bypasses", network)


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
    def network():
        return nn.Sequential(*(WithNeck() for _ in range(3)), nn.Linear(8, 4))

    assert_same_weights_without(monkeypatch, "find_shortcuts", network)


def test_a_bypass_gives_hooks_the_known_input_and_restores_the_modules():
    torch.manual_seed(0)
    block = Block().eval()
    x, seen, computed = torch.randn(2, 5, 8), [], []
    handles = [
        block.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0])),
        block.qkv.register_forward_hook(lambda _, args, output: computed.append(not output.is_meta)),
    ]
    layer = Layer("proj", (8, 8))
    with torch.no_grad():
        expected = block(x)
        shortcuts = Shortcuts([Bypass(layer, ("proj",), ("qkv",))], lambda place, index, value: value)
        shortcuts.note([layer], 0, seen[0], x)
        with shortcuts.taken(block, 0):
            assert torch.equal(block(x), expected)
        assert torch.equal(block(x), expected)
    assert computed == [True, False, True]
    assert all(torch.equal(one, seen[0]) for one in seen)
    assert len(block.proj._forward_pre_hooks) == 1
    assert "forward" not in vars(block.qkv)
    for handle in handles:
        handle.remove()
