"""Steps of the whole network, block by block: their gradient is that of ordinary back-propagation."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import LANGUAGE_MODELS, language_batches

import iobs
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.losses import kl_to
from iobs.pruning.calibration.replay import BEFORE, Residency, Stream
from iobs.pruning.descent import Factored
from iobs.pruning.descent.gradients import BlockwiseGradient, LossGradient, Masters, Streams, scaled_gradients
from iobs.pruning.network.modes import evaluating
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.pruning.runtime.ranks import ALONE
from iobs.pruning.store import Store


def gradients(model, dense, batch, chain):
    """The gradients of the whole network's divergence along a chain of blocks, by parameter."""
    with evaluating(model), evaluating(dense):
        streams = [Stream(network, [batch], chain) for network in (model, dense)]
        with torch.no_grad():
            streams[0].advance(BEFORE)
            for stage in (BEFORE, *range(len(chain))):
                streams[1].advance(stage)
        names = [[name for name, _ in model.named_parameters() if block.holds(name)] for block in chain]
        masters = [Masters.of(Store(model), group, {}) for group in [*names, ["model.norm.weight"]]]
        step = BlockwiseGradient(Streams(*streams, [0], []), masters, Residency()).of(0)
        return {
            name: value
            for number, values in step.groups
            for name, value in zip(masters[number].values, values, strict=True)
        }


def llama():
    torch.manual_seed(0)
    model = LANGUAGE_MODELS["llama"][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model, language_batches(count=6, length=64)  # the whole context: shorter windows would be joined


def test_gradient_block_by_block_equals_back_propagation():
    model, data = llama()
    dense = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) * (parameter.ndim > 1))
    chain = [Block(f"model.layers.{number}", 0) for number in range(2)]
    found = gradients(model, dense, data[0], chain)
    with evaluating(model), evaluating(dense):
        loss = kl_to(dense)(model, data[0])
        expected = torch.autograd.grad(loss, [model.get_parameter(name) for name in found])
    assert len(found) > 10
    for value, right in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-3, atol=1e-6 + 1e-4 * float(right.abs().max()))


def test_gradient_in_float16_is_not_rounded_to_zero():
    model, data = llama()
    wanted = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter) * (parameter.ndim > 1))
    chain, found = [Block(f"model.layers.{number}", 0) for number in range(2)], {}
    for dtype in (torch.float32, torch.float16):
        found[dtype] = gradients(copy.deepcopy(model).to(dtype), copy.deepcopy(wanted).to(dtype), data[0], chain)
    for name, value in found[torch.float32].items():
        half = found[torch.float16][name]
        assert half.dtype is torch.float32
        assert (half == 0).float().mean() < 0.02 + (value == 0).float().mean(), name


def test_gradient_of_a_fit_in_float16_is_that_of_float32():
    """The denominator of the loss is that of 1,024 tokens of width 4,096: 2 / denominator is zero in float16."""
    torch.manual_seed(0)
    inputs, found = torch.randn(64, 16), {}
    layer = torch.nn.Linear(16, 16, bias=False)
    wanted = (inputs @ layer.weight.T).detach() + 0.01 * torch.randn(64, 16)
    for dtype in (torch.float32, torch.float16):
        model = copy.deepcopy(layer).to(dtype)
        window = SimpleNamespace(
            loss=lambda index, model=model, dtype=dtype: (
                (model(inputs.to(dtype)).float() - wanted).square().sum() / (1024 * 4096 * 10)
            ),
            denominator=lambda index: 1024.0 * 4096 * 10,
        )
        step = LossGradient(window, Masters.of(Store(model), ["weight"], {}), ALONE).of([0])
        ((_, (found[dtype],)),) = step.groups
    torch.testing.assert_close(found[torch.float16], found[torch.float32], rtol=0.1, atol=1e-8)
    assert not (found[torch.float16] == 0).any()


def test_scale_is_halved_until_gradients_are_finite():
    weight = torch.tensor([3.0, 0.0], dtype=torch.float16, requires_grad=True)
    value, found, scale = scaled_gradients(lambda: (weight * 1000).float().sum(), [weight], 2.0**20)
    assert (float(value), scale) == (3000.0, 2.0**6)
    assert (found[0] / scale).tolist() == [1000.0, 1000.0]


def test_judged_hidden_states_are_stored_between_the_blocks():
    model, data = llama()
    chain, kept = [Block(f"model.layers.{number}", 0) for number in range(2)], {}

    def keep(index, hidden):
        kept.setdefault(index, []).append(hidden)
        return hidden

    with evaluating(model), torch.no_grad():
        streams = [Stream(model, data, chain, keep=one) for one in (keep, lambda _, hidden: hidden)]
        for stage in (BEFORE, 0, 1):
            streams[1].advance(stage)
        streams[0].advance(BEFORE)
        kept.clear()
        masters = [Masters.of(Store(model), [], {}) for _ in range(3)]
        loss = BlockwiseGradient(Streams(*streams, [0], [1, 3]), masters, Residency()).judged_loss(ALONE)
    assert {index: len(hidden) for index, hidden in kept.items()} == {1: 2, 3: 2}
    assert loss == 0


def test_factored_moment_is_exact_for_squares_of_rank_one():
    rows, columns = torch.rand(5) + 0.5, torch.rand(7) + 0.5
    gradient = rows[:, None] * columns[None] * torch.where(torch.rand(5, 7) > 0.5, 1.0, -1.0)
    master = torch.zeros(5, 7)
    optimizer = Factored({"x": master})
    optimizer.step({"x": gradient}, 0.1)
    torch.testing.assert_close(master, -0.1 * gradient.sign(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_rows_and_columns_of_zero_gradients_change_nothing(size):
    gradient = torch.full((4, 5), size)
    gradient[0], gradient[:, 0] = 0, 0
    master = torch.ones(4, 5)
    Factored({"x": master}).step({"x": gradient}, 0.1)
    torch.testing.assert_close(master, 1 - 0.1 * (gradient != 0))


def test_network_steps_lower_the_divergence_and_keep_the_zeros():
    model, data = llama()
    dense, fitted = copy.deepcopy(model), copy.deepcopy(model)
    short = BlockFit(steps=8, between=0, masks=1, lr=3e-3)
    recipe = Recipe(target="residual", solver="sparsegpt", blocks=short)
    iobs.prune(fitted, data, 0.6, recipe)
    long = replace(short, network_steps=20, network_lr=3e-4)
    report = iobs.prune(model, data, 0.6, recipe.but(blocks=long))
    assert report.zeros == sum(round(0.6 * row.weights) for row in report.audit)
    with evaluating(model), evaluating(dense), evaluating(fitted), torch.no_grad():
        before, after = (sum(float(kl_to(dense)(one, batch)) for batch in data) for one in (fitted, model))
    assert after < before
