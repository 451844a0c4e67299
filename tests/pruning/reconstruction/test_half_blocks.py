"""Half-blocks: the attention and the perceptron of a block, one of them in memory at a time."""

import copy

import pytest
import torch
from families import LANGUAGE_MODELS, language_batches, saved
from safetensors.torch import load_file
from test_network_steps import gradients

import iobs
from iobs.errors import ProblemError
from iobs.models.streamed import StreamedModel
from iobs.models.streamed_store import StreamedStore
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.halving import halved
from iobs.pruning.calibration.replay import running_along_is_exact
from iobs.pruning.network.layers import find_layers
from iobs.pruning.network.modes import evaluating
from iobs.pruning.recipe import BlockFit
from iobs.pruning.store import Store

DIVIDED = ["llama", "qwen3", "gemma3", "mixtral", "gpt2", "phi3"]
FIT = BlockFit(window=1, masks=2, between=2, steps=4, lr=1e-3, network_steps=4, network_lr=1e-3, halves=True)
OPTIONS = {"solver": "sparsegpt", "target": "residual", "blocks": FIT, "holdout": 0.25}


def chain_of(model):
    """The decoder blocks of a model, found as in a run."""
    return Store(model).chain(language_batches(), tuple(find_layers(model)))


@pytest.mark.parametrize("name", DIVIDED)
def test_halves_of_blocks_give_every_layer_its_input_bit_for_bit(name):
    model = LANGUAGE_MODELS[name][0]().eval()
    data, layers = language_batches(), tuple(find_layers(model))
    with evaluating(model):
        chain = Store(model).chain(data, layers, halves=True)
        assert len(chain) == 4
        assert running_along_is_exact(model, chain, data, layers)
        inside = [layer for layer in layers if any(block.holds(layer.path) for block in chain)]
        assert all(sum(block.holds(layer.path) for block in chain) == 1 for layer in inside)
        assert len(inside) >= 8


@pytest.mark.parametrize("name", ["phi", "falcon", "gpt_neox", "bloom", "opt"])
def test_blocks_with_parallel_parts_are_refused(name):
    model = LANGUAGE_MODELS[name][0]().eval()
    with evaluating(model), pytest.raises(ProblemError, match=r"halves of blocks: .* take blocks\.halves=false"):
        halved(model, chain_of(model), language_batches()[0])


def test_gradient_by_halves_is_that_of_whole_blocks():
    torch.manual_seed(0)
    model, data = LANGUAGE_MODELS["llama"][0]().eval(), language_batches()
    dense = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * (parameter.ndim > 1))
    whole = [Block(f"model.layers.{number}", 0) for number in range(2)]
    with evaluating(model):
        halves = halved(model, whole, data[0])
    expected, found = (gradients(model, dense, data[0], chain) for chain in (whole, halves))
    assert found.keys() == expected.keys()
    assert any(bool(value.any()) for value in found.values())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_half_blocks_from_files_end_in_the_bits_of_a_run_in_memory(tmp_path, monkeypatch):
    model, data = saved("llama", tmp_path / "model", torch.float32), language_batches(count=4)
    held = set()
    most = []
    load, drop = StreamedModel.load, StreamedModel.drop

    def loading(self, block):
        held.update((id(self), name) for name in self.names(block))
        most.append(len({name for _, name in held}))
        load(self, block)

    def dropping(self, block):
        held.difference_update((id(self), name) for name in self.names(block))
        drop(self, block)

    monkeypatch.setattr(StreamedModel, "load", loading)
    monkeypatch.setattr(StreamedModel, "drop", dropping)
    with StreamedStore.open(tmp_path / "model", tmp_path / "out") as store:
        streamed = iobs.prune(store, data, 0.5, "one-shot", **OPTIONS)
        most = most[2:]  # the first block was divided
    iobs.prune(model, data, 0.5, "one-shot", include=[row.name for row in streamed.audit], **OPTIONS)
    assert streamed.zeros > 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in model.named_parameters() if name in found)
    assert max(most) <= 5  # q, k, v, o and a norm; the whole block has nine tensors


def test_half_blocks_take_less_memory_than_blocks(tmp_path, monkeypatch):
    saved("llama", tmp_path / "model")
    peaks = []
    for halves in (False, True):
        fit = BlockFit(window=1, masks=1, steps=1, lr=1e-3, halves=halves)
        recipe = iobs.Recipe(target="residual", blocks=fit)
        with StreamedStore.open(tmp_path / "model", tmp_path / "out") as store:
            store.plan(store.select(None, None, False), language_batches(), recipe, 0.0)
            blocks = store.streamed.blocks
            peaks.append(
                max(sum(store.streamed.directory.entries[n].bytes for n in store.streamed.names(b)) for b in blocks)
            )
            iobs.prune(store, language_batches(), 0.5, recipe.but(solver="magnitude"), holdout=0.0)
        for file in (tmp_path / "out").iterdir():
            file.unlink()
    assert peaks[1] < peaks[0]
