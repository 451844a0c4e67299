"""Inputs of the matrices inside recurrent modules, which torch computes in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

# Initial hidden state and, for an LSTM, initial cell state; each (directions * layers, samples, channels).
State: TypeAlias = tuple[Tensor, ...]


def matrix_inputs(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Tensor]:
    """The inputs of the matrices in one call of a recurrent module: input-hidden, hidden-hidden and projections.

    Layers and directions are run one by one, with torch's own kernels.

    Args:
        module: an LSTM, GRU or RNN, or a cell of one.
        args: its arguments in the call: the input, and the initial state unless that is zero.
        kwargs: its keyword arguments.

    Returns:
        By the name of the parameter, (samples, steps, channels); steps and samples are exchanged without `batch_first`,
        and (steps, channels) for packed sequences.
    """
    value, state = _bound(*args, **kwargs)
    if isinstance(module, nn.RNNCellBase):
        assert isinstance(value, Tensor)
        hidden = value.new_zeros(*value.shape[:-1], module.hidden_size) if state is None else _states(state)[0]
        return {"weight_ih": value, "weight_hh": hidden}
    assert isinstance(module, nn.RNNBase)
    if isinstance(value, PackedSequence):
        return _of_sequences(module, unpack_sequence(value), () if state is None else _states(state))
    assert isinstance(value, Tensor)
    single = value.ndim == 2
    steps = value.unsqueeze(1) if single else value.transpose(0, 1) if module.batch_first else value
    states = () if state is None else tuple(part.unsqueeze(1) if single else part for part in _states(state))
    inputs = dict(_layer_by_layer(module, steps, states))
    arranged = {id(value): value.transpose(0, 1) if module.batch_first else value for value in inputs.values()}
    return {name: arranged[id(value)] for name, value in inputs.items()}  # equal objects stay equal and share a Gram


def _bound(input: object, hx: object = None) -> tuple[object, object]:
    """The input and the initial state in the arguments of a recurrent module, by torch's names."""
    return input, hx


def _states(state: object) -> State:
    return (state,) if isinstance(state, Tensor) else tuple(state)  # type: ignore[arg-type]


def _of_sequences(module: nn.RNNBase, sequences: list[Tensor], state: State) -> dict[str, Tensor]:
    """The inputs for packed sequences, which are run one by one, with the steps of all of them joined."""
    runs = []
    for index, sequence in enumerate(sequences):
        first = tuple(part[:, index : index + 1].contiguous() for part in state)
        runs.append(dict(_layer_by_layer(module, sequence.unsqueeze(1), first)))
    joined: dict[int, Tensor] = {}
    for name, value in runs[0].items():
        if id(value) not in joined:
            joined[id(value)] = torch.cat([run[name].flatten(0, 1) for run in runs])
    return {name: joined[id(value)] for name, value in runs[0].items()}


def _layer_by_layer(module: nn.RNNBase, steps: Tensor, state: State) -> Iterator[tuple[str, Tensor]]:
    """Run the layers of a recurrent module; yields the input of each matrix, (steps, samples, channels).

    Args:
        module: the module.
        steps: its input, (steps, samples, channels).
        state: its initial state, or () for zeros.
    """
    directions = 2 if module.bidirectional else 1
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            suffix = f"_l{layer}" + ("_reverse" if direction else "")
            number = directions * layer + direction
            ordered = steps.flip(0) if direction else steps
            first = tuple(part[number : number + 1].contiguous() for part in state) or _zeros(module, steps)
            output = _run(module, suffix, ordered, first)
            before = torch.cat([first[0], output[:-1]])
            yield f"weight_ih{suffix}", steps
            yield f"weight_hh{suffix}", before.flip(0) if direction else before
            if module.proj_size:
                unprojected = _unprojected(module, suffix, ordered, before, first[1])
                yield f"weight_hr{suffix}", unprojected.flip(0) if direction else unprojected
            outputs.append(output.flip(0) if direction else output)
        steps = torch.cat(outputs, -1)


def _zeros(module: nn.RNNBase, steps: Tensor) -> State:
    """The initial state that torch takes by default."""
    hidden = steps.new_zeros(1, steps.shape[1], module.proj_size or module.hidden_size)
    return (hidden, steps.new_zeros(1, steps.shape[1], module.hidden_size)) if module.mode == "LSTM" else (hidden,)


def _unprojected(module: nn.RNNBase, suffix: str, steps: Tensor, before: Tensor, cell: Tensor) -> Tensor:
    """The inputs of an LSTM's projection, (steps, samples, hidden channels), which torch does not return.

    They are output gate * tanh(cell state), by the equations in torch's documentation of LSTM.

    Args:
        module: an LSTM with `proj_size`.
        suffix: of the names of the layer's parameters.
        steps: the input in the order of the direction, (steps, samples, channels).
        before: the projected hidden states before each step, (steps, samples, projected channels).
        cell: the initial cell state, (1, samples, hidden channels).
    """
    weights = [getattr(module, name + suffix) for name in ("weight_ih", "weight_hh")]
    biases = [getattr(module, name + suffix) if module.bias else None for name in ("bias_ih", "bias_hh")]
    sums = nn.functional.linear(steps, weights[0], biases[0]) + nn.functional.linear(before, weights[1], biases[1])
    enters, forgets, candidates, shown = sums.chunk(4, -1)
    added = enters.sigmoid() * candidates.tanh()
    states, state = [], cell[0]
    for step, forget in enumerate(forgets.sigmoid()):
        state = forget * state + added[step]
        states.append(state)
    return shown.sigmoid() * torch.stack(states).tanh()


def _run(module: nn.RNNBase, suffix: str, steps: Tensor, state: State) -> Tensor:
    """The hidden states of one layer in one direction, (steps, samples, channels)."""
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else [])]
    names += ["weight_hr"] if module.proj_size else []
    weights = [getattr(module, name + suffix) for name in names]
    rest = weights, module.bias, 1, 0.0, False, False, False  # one layer, no dropout, eval mode, one direction
    kernels: dict[str, Callable[..., tuple[Tensor, ...]]]
    kernels = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
    return kernels[module.mode](steps, state if module.mode == "LSTM" else state[0], *rest)[0]
