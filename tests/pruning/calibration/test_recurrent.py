"""Recurrent modules: the inputs of their matrices, and pruning of the gates."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import iobs
from iobs.pruning.calibration.hooks import captured_inputs, matrix_inputs
from iobs.pruning.network.layers import find_layers

KINDS = [nn.LSTM, nn.GRU, nn.RNN]


def made(kind, **options):
    torch.manual_seed(0)
    return kind(5, 4, **options)


def by_steps(module, cell, value, suffix, reverse=False):
    """The hidden states of one layer before and after each step, by a loop over a cell with the same weights."""
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).data.copy_(getattr(module, name + suffix))
    zeros = torch.zeros(value.shape[1], 4)
    state, before = ((zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros), []
    for step in reversed(value) if reverse else value:
        before.append(state[0] if isinstance(state, tuple) else state)
        state = cell(step, state)
    after = [*before[1:], state[0] if isinstance(state, tuple) else state]
    found = torch.stack(before), torch.stack(after)
    return tuple(one.flip(0) for one in found) if reverse else found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_inputs_of_matrices_equal_a_loop_over_steps(kind, batch_first):
    module = made(kind, num_layers=2, bidirectional=True, batch_first=batch_first)
    value = torch.randn(7, 3, 5)  # (steps, samples, channels)
    found = matrix_inputs(module, (value.transpose(0, 1) if batch_first else value,), {})
    if batch_first:
        found = {name: one.transpose(0, 1) for name, one in found.items()}
    steps = value
    for layer in range(2):
        outputs = []
        for suffix in (f"_l{layer}", f"_l{layer}_reverse"):
            cell = {nn.LSTM: nn.LSTMCell, nn.GRU: nn.GRUCell, nn.RNN: nn.RNNCell}[kind](steps.shape[2], 4)
            before, after = by_steps(module, cell, steps, suffix, suffix.endswith("reverse"))
            torch.testing.assert_close(found[f"weight_ih{suffix}"], steps)
            torch.testing.assert_close(found[f"weight_hh{suffix}"], before)
            outputs.append(after)
        steps = torch.cat(outputs, -1)
    torch.testing.assert_close(
        steps, module(value.transpose(0, 1))[0].transpose(0, 1) if batch_first else module(value)[0]
    )


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_inputs_of_packed_sequences_are_those_of_each_sequence(kind):
    module = made(kind, num_layers=2)
    sequences = [torch.randn(length, 5) for length in (3, 6, 4)]
    packed = matrix_inputs(module, (pack_sequence(sequences, enforce_sorted=False),), {})
    single = [matrix_inputs(module, (one.unsqueeze(1),), {}) for one in sequences]
    for name, value in packed.items():
        torch.testing.assert_close(value, torch.cat([one[name].flatten(0, 1) for one in single]))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@torch.no_grad()
def test_initial_states_are_used():
    module, value = made(nn.LSTM, proj_size=2), torch.randn(6, 3, 5)
    state = torch.randn(1, 3, 2), torch.randn(1, 3, 4)
    found = matrix_inputs(module, (value, state), {})["weight_hh_l0"]
    torch.testing.assert_close(found, torch.cat([state[0], module(value, state)[0][:-1]]))


class Tagger(nn.Module):
    def __init__(self, kind, **options) -> None:
        super().__init__()
        self.body = made(kind, batch_first=True, **options)
        self.head = nn.Linear(4 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        return self.head(self.body(x)[0])


class WithCell(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.cell, self.head = made(kind), nn.Linear(4, 3)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


DATA = [torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*((kind, "one-shot") for kind in KINDS), (nn.LSTM, "fast"), pytest.param(nn.GRU, "best", marks=pytest.mark.slow)],
)
def test_every_gate_is_pruned(kind, recipe):
    model = Tagger(kind, bidirectional=True)
    report = iobs.prune(model, DATA, 0.5, recipe, solver="sparsegpt")
    names = {row.name for row in report.audit}
    assert names == {layer.name for layer in find_layers(model)}
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    assert len(names) == 2 * 2 * gates + 1
    assert report.zeros == sum(row.shape[0] * row.shape[1] for row in report.audit) // 2
    assert not report.skipped


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_pruned(kind):
    report = iobs.prune(WithCell(kind), DATA, 0.5, solver="sparsegpt")
    assert {row.name.split(".")[0] for row in report.audit} == {"cell", "head"}
    assert not report.skipped


def test_second_order_pruning_of_an_lstm_changes_its_outputs_less_than_magnitude():
    changes = {}
    for solver in ("magnitude", "admm"):
        model = Tagger(nn.LSTM)
        with torch.no_grad():
            dense = model(torch.cat(DATA))
        iobs.prune(model, DATA, 0.6, iobs.Recipe(solver=solver))
        with torch.no_grad():
            changes[solver] = float((model(torch.cat(DATA)) - dense).norm())
    assert changes["admm"] < 0.8 * changes["magnitude"]


PROJECTED = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@PROJECTED
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_inputs_of_projections_give_the_outputs_of_the_lstm(bias, packed):
    module = made(nn.LSTM, num_layers=2, bidirectional=True, proj_size=2, bias=bias)
    value, state = torch.randn(7, 3, 5), (torch.randn(4, 3, 2), torch.randn(4, 3, 4))
    if packed:
        sequences = [value[:length, index] for index, length in enumerate((7, 5, 3))]
        found = matrix_inputs(module, (pack_sequence(sequences), state), {})
        singles = [
            module(one, tuple(part[:, index].contiguous() for part in state))[0] for index, one in enumerate(sequences)
        ]
        outputs = torch.cat(singles)
    else:
        found, outputs = matrix_inputs(module, (value, state), {}), module(value, state)[0]
    last = [found[f"weight_hr_l1{side}"] @ getattr(module, f"weight_hr_l1{side}").T for side in ("", "_reverse")]
    torch.testing.assert_close(torch.cat(last, -1), outputs)
    if not packed:  # the outputs of the first layer are the inputs of the second
        first = [found[f"weight_hr_l0{side}"] @ getattr(module, f"weight_hr_l0{side}").T for side in ("", "_reverse")]
        torch.testing.assert_close(torch.cat(first, -1), found["weight_ih_l1"])


@PROJECTED
@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_projections_of_an_lstm_are_pruned(recipe):
    model = nn.Sequential(made(nn.LSTM, batch_first=True, proj_size=2, num_layers=2), First(), nn.Linear(2, 3))
    report = iobs.prune(model, DATA, 0.5, recipe, solver="sparsegpt")
    zeros = {row.name: row.zeros for row in report.audit}
    assert {name for name in zeros if "weight_hr" in name} == {"0.weight_hr_l0", "0.weight_hr_l1"}
    for number in (0, 1):
        assert zeros[f"0.weight_hr_l{number}"] == int((getattr(model[0], f"weight_hr_l{number}") == 0).sum())
    assert report.coverage.share == 1.0
    assert not report.skipped


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_directions_that_share_a_matrix_both_give_inputs():
    torch.manual_seed(0)
    model = nn.LSTM(4, 4, bidirectional=True)
    model.weight_hh_l0_reverse = model.weight_hh_l0
    layers = [layer for layer in find_layers(model) if layer.parameter == "weight_hh_l0"]
    value, found = torch.randn(6, 2, 4), []
    with captured_inputs(model, layers[:1], lambda layer, module, given: found.append(given)):
        model(value)
    expected = matrix_inputs(model, (value,), {})
    for given, name in zip(found, ("weight_hh_l0", "weight_hh_l0_reverse"), strict=True):
        torch.testing.assert_close(given, expected[name])
