"""Memory and time of a run on other machines, from a configuration without weights."""

from dataclasses import replace

import families
import pytest
import torch

import iobs
from iobs.errors import ModelError
from iobs.models.skeleton import shapes_of
from iobs.models.streamed import StreamedModel, StreamedStore
from iobs.pruning.cost.machines import GPUS, Machine, Rates, need
from iobs.pruning.recipe import BlockFit

ONE_SHOT = iobs.Recipe.preset("one-shot")
LONG = ONE_SHOT.but(target="residual", blocks=BlockFit(network_steps=300))


@pytest.fixture
def directory(tmp_path):
    families.saved("llama", tmp_path / "model")
    return tmp_path / "model"


def test_shapes_of_a_configuration_equal_those_of_the_files(directory, tmp_path):
    store = StreamedStore(StreamedModel.open(directory), tmp_path / "out")
    layers = store.select(None, None, False).layers
    plan = store.plan(families.request_of(store, ONE_SHOT), families.language_batches())
    (directory / "model.safetensors").unlink()
    found = shapes_of(directory)
    assert [layer.shape for layer in found.layers] == [layer.shape for layer in layers]
    assert found.weights * found.itemsize == plan.model_bytes


def test_configuration_of_no_language_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        shapes_of(tmp_path)


def test_eight_gpus_take_less_time_and_the_same_memory(directory):
    network = shapes_of(directory)
    for recipe in (ONE_SHOT, LONG):
        one, eight = (need(network, recipe, 128, 2048, 8, replace(GPUS[1], count=count)) for count in (1, 8))
        assert one.peak_bytes == eight.peak_bytes
        assert eight.phases["Grams"] == pytest.approx(one.phases["Grams"] / 8)
        assert one.phases["solves"] / 8 <= eight.phases["solves"] < one.phases["solves"]
        assert sum(eight.phases.values()) < sum(one.phases.values())


def test_residual_stream_of_experts_has_the_width_of_the_model(tmp_path):
    families.saved("qwen3_moe", tmp_path / "model")  # 16 wide; its experts have 12 columns
    network = shapes_of(tmp_path / "model")
    assert (network.width, network.blocks) == (16, 2)
    assert min(layer.shape[1] for layer in network.layers) == 12
    narrow = replace(network, width=12)
    alone = ONE_SHOT.but(curvature="layer")  # nothing but hidden states is kept
    found, wrong = (need(one, alone, 128, 2048, 8, GPUS[0]) for one in (network, narrow))
    assert found.streams_bytes == wrong.streams_bytes * 16 // 12


def test_network_that_is_too_large_for_a_gpu_does_not_fit(directory):
    small = need(shapes_of(directory), LONG, 128, 2048, 8, GPUS[0])
    assert small.fits
    assert small.streams == "device"
    large = replace(GPUS[0], memory=max(small.peak_bytes.values()))
    assert not need(shapes_of(directory), LONG, 128, 2048, 8, large).fits


@pytest.mark.parametrize("blocks", [None, BlockFit(batch_size=2, network_steps=2)])
def test_directory_and_configuration_have_the_same_phases_and_streams(directory, tmp_path, blocks):
    recipe = ONE_SHOT.but(allocation="fisher", blocks=blocks)
    data = [{"input_ids": torch.zeros(4, 8, dtype=torch.int64)}] * 3
    store = StreamedStore(StreamedModel.open(directory), tmp_path / "out")
    plan = store.plan(families.request_of(store, recipe, 0.25), data)
    network = shapes_of(directory)
    machine = Machine("", 10**9, Rates(1e6, 1e6, 1e5))
    found = need(network, recipe, 12, 8, 4, machine, 0.25, store.arithmetic.itemsize)
    assert found.phases.keys() == plan.phases.keys()
    assert network.blocks == len(store.streamed.blocks)
    assert found.streams_bytes == plan.streams_bytes


def test_steps_take_the_tokens_of_the_settings(directory):
    network = replace(shapes_of(directory), context=None)

    def steps(length, batch=8, **settings):
        recipe = ONE_SHOT.but(blocks=BlockFit(lr=1e-3, **settings))
        found = need(network, recipe, 128, length, batch, GPUS[0])
        return found.phases["steps of blocks"], found.peak_bytes

    one, two = steps(1024), steps(2048)  # a step takes a whole sample
    assert 1.0 < two[0] / one[0] < 2.0  # the calls of modules and the update of the optimizer stay
    assert steps(2048, epochs=1.0, steps=200)[0] == pytest.approx(steps(2048, steps=128)[0])
    assert steps(1024, batch_size=4)[1]["steps of blocks"] > one[1]["steps of blocks"]
    assert steps(1024, batch=2)[1]["Grams"] == one[1]["Grams"]  # passes of a reconstruction have the size of a step
    assert need(network, LONG, 128, 1024, 2, GPUS[0], itemsize=4).peak_bytes["Grams"] > one[1]["Grams"]
    assert need(shapes_of(directory), LONG, 128, 1024, 2, GPUS[0]) == need(network, LONG, 128, 64, 2, GPUS[0])
