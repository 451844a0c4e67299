"""Epochs of block reconstruction that a CPU affords."""

import pytest
import torch

import iobs
from iobs.pruning.cost.affordable import with_affordable_epochs
from iobs.pruning.network.layers import Layer

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def layers(count, side):
    return [Layer(f"block.{number}", (side, side)) for number in range(count)]


def text(windows, length):
    return [{"input_ids": torch.zeros(windows, length, dtype=torch.long)}]


def affordable(recipe, *arguments):
    return with_affordable_epochs(iobs.Recipe.preset(recipe) if isinstance(recipe, str) else recipe, *arguments)


@pytest.mark.parametrize(
    ("model", "data", "device", "epochs", "sampled"),
    [
        (layers(20, 64), text(64, 512), CPU, 10.0, "auto"),  # a small model
        (layers(200, 700), text(64, 512), CPU, 2.4, 0),  # about a hundred million weights
        (layers(200, 700), text(256, 512), CPU, 1.0, 0),  # never less than one
        (layers(200, 700), text(64, 512), GPU, 10.0, "auto"),
        (layers(200, 700), [torch.zeros(4, 3, 32, 32)], CPU, 10.0, "auto"),  # pictures
    ],
)
def test_best_takes_as_many_epochs_as_a_cpu_affords(model, data, device, epochs, sampled):
    blocks = affordable("best", model, data, device).blocks
    assert (blocks.epochs, blocks.sampled) == (epochs, sampled)
    assert blocks.between == (50 if epochs == 10 else max(1, round(5 * epochs)))


def test_given_epochs_stay():
    recipe = iobs.Recipe(target="residual", blocks=iobs.pruning.recipe.BlockFit(epochs=3.0))
    assert affordable(recipe, layers(200, 700), text(256, 512), CPU) == recipe
    assert affordable("one-shot", layers(200, 700), text(256, 512), CPU) == iobs.Recipe.preset("one-shot")
