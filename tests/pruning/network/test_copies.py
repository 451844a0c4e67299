"""A copy of a model runs its own modules, whatever functions a user set on the model."""

import functools
import types

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import ModelError
from iobs.pruning.network.copies import copied


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.relu(self.inner(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting:
    """An object that is called in place of a forward, as mixed precision of accelerate sets it."""

    def __init__(self, forward):
        self.forward, self.calls = forward, 0

    def __call__(self, x):
        self.calls += 1
        return self.forward(x)


def without_gradients(model):
    model.forward = torch.no_grad()(model.forward)


def wrapped_twice(model):
    inner = model.blocks[1].forward
    outer = functools.wraps(inner)(lambda x: inner(x))
    model.blocks[1].forward = lambda x, call=outer: call(x)


def named_globally(model):
    global whole
    whole = model
    model.forward = lambda x: Network.forward(whole, x)


def calling_itself(model):
    def forward(x, again=True):
        return forward(x, False) if again else Network.forward(model, x)

    model.forward = forward


def bound_to_an_object(model):
    counting = Counting(model.forward)
    model.forward = lambda x: counting(x)


def partly_applied(model):
    model.forward = functools.partial(torch.no_grad()(model.forward))


def method_of_the_class(model):
    model.forward = types.MethodType(Network.forward, model)


def with_a_hook(model):
    model.head.register_forward_pre_hook(lambda head, args: (args[0] + model.blocks[0].inner.bias,))


CHANGES = (
    without_gradients,
    wrapped_twice,
    named_globally,
    calling_itself,
    bound_to_an_object,
    partly_applied,
    method_of_the_class,
    with_a_hook,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_keeps_its_outputs_when_the_original_changes(change):
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(5, 6)
    change(model)
    expected, duplicate = model(x), copied(model)
    again = copied(duplicate)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(duplicate(x), expected)
    assert torch.equal(again(x), expected)
    assert not bool(model(x).any())


@pytest.mark.parametrize("change", [without_gradients, wrapped_twice])
def test_a_wrapped_forward_changes_no_result(change):
    results, data = [], [torch.randn(12, 6) for _ in range(2)]
    for changes in ([], [change]):
        torch.manual_seed(0)
        model = Network()
        for each in changes:
            each(model)
        iobs.prune(model, data, 0.5, "one-shot", solver="sparsegpt")
        results.append([value.detach().clone() for value in model.parameters()])
    assert all(map(torch.equal, *results))


class Holder:
    def __init__(self, model):
        self.model = model


def test_a_forward_that_hides_the_original_is_refused_before_any_work():
    model = Network()
    holder, dense = Holder(model), [value.detach().clone() for value in model.parameters()]
    model.forward = lambda x: Network.forward(holder.model, x)
    with pytest.raises(ModelError, match=r"runs the module 'blocks\.0' of the original"):
        iobs.prune(model, [torch.randn(12, 6)], 0.5, "one-shot")
    assert all(map(torch.equal, model.parameters(), dense))
