"""Capture the inputs of layers: by hooks on their modules, or where torch multiplies with their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, unpack_sequence

from iobs.pruning.calibration.products import outside_vmap
from iobs.pruning.calibration.uses import Note, captured_products
from iobs.pruning.network.calls import Args, Function, Kwargs, Observer, factors, first_argument
from iobs.pruning.network.layers import CONVOLUTIONS, RECURRENT, Layer, projections
from iobs.pruning.network.modes import keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch

_MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)


@contextmanager
def captured_inputs(
    model: nn.Module, layers: Sequence[Layer], note: Note, used: dict[Layer, bool] | None = None
) -> Iterator[None]:
    """Call `note(layer, module, input)` for every input of the layers, and mark layers that torch functions use.

    Layers that are called as modules get a hook, and so do recurrent modules. Slices of fused experts, projections of
    nn.MultiheadAttention, and weights that the model multiplies itself are recognised in the calls of torch functions.

    Args:
        model: the model.
        layers: layers whose inputs are captured.
        note: called with every input.
        used: set to True for layers whose weight is an argument of any torch function, also without a product; None:
            not recorded.
    """
    with ExitStack() as stack:
        stack.enter_context(captured_products(model, [layer for layer in layers if layer.view is not None], note))
        layers = [layer for layer in layers if layer.view is None]
        uses = _WeightUses(model, layers, note, used)
        for layer in layers:
            if layer.is_called:
                for module in _modules_of(model, layer):
                    before = partial(uses.begin_call, layer)
                    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(partial(uses.end_call, layer)).remove)
        for recurrence, matrices in _recurrences(model, layers):
            before = partial(_note_recurrence, matrices, note)
            stack.callback(recurrence.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.enter_context(Observer(uses))
        yield


@torch.no_grad()
def reached(model: nn.Module, layers: Iterable[Layer], data: Sequence[Batch]) -> set[Layer]:
    """The layers that receive an input on some batch; an expert that is called without a token receives none.

    Args:
        model: in eval mode.
        layers: candidates.
        data: calibration data; batches are run until every layer has received an input.
    """
    without_input = set(layers)
    with_input: set[Layer] = set()

    def note(layer: Layer, module: nn.Module, value: Tensor) -> None:
        if value.numel():
            with_input.add(layer)

    with keeping_buffers(model):
        for piece in (piece for batch in data for piece in batches.pieces(batch)):
            if not without_input:
                break
            with captured_inputs(model, sorted(without_input, key=lambda layer: layer.name), note):
                batches.forward(model, piece)
            without_input -= with_input
    return with_input


def _modules_of(model: nn.Module, layer: Layer) -> list[nn.Module]:
    """The layer's module, and other convolutions with the same kernel.

    Other modules that share a matrix are covered by `_WeightUses`.
    """
    module = model.get_submodule(layer.path)
    if not isinstance(module, CONVOLUTIONS):
        return [module]
    kernel = layer.stored(model)
    convolutions = [other for other in model.modules() if isinstance(other, CONVOLUTIONS)]
    return [
        other for other in convolutions if other._parameters.get("weight") is kernel and other.groups == module.groups
    ]


def _recurrences(model: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[nn.Module, list[tuple[Layer, str]]]]:
    """The recurrent modules with matrices of the layers: each layer with the name of its parameter there.

    Modules, and the directions of one module, may share a parameter.
    """
    by_parameter: dict[int, list[Layer]] = {}
    for layer in layers:
        if isinstance(model.get_submodule(layer.path), RECURRENT):
            by_parameter.setdefault(id(layer.stored(model)), []).append(layer)
    for module in model.modules() if by_parameter else ():
        if isinstance(module, RECURRENT):
            parameters = module._parameters.items()
            matrices = [(layer, name) for name, value in parameters for layer in by_parameter.get(id(value), ())]
            if matrices:
                yield module, matrices


def _note_recurrence(
    matrices: Sequence[tuple[Layer, str]], note: Note, module: nn.Module, args: Args, kwargs: Kwargs
) -> None:
    """Note the inputs of the matrices of a recurrent module before its call."""
    inputs = matrix_inputs(module, args, kwargs)
    for layer, name in matrices:
        note(layer, module, inputs[name])


class _WeightUses:
    """A subscriber that captures the inputs of products of torch functions with weights of layers.

    A weight is recognised by its address in memory, since its slices and transposes share its storage.

    Attributes:
        running: names of the layers whose module is running: a hook has already captured their input.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], note: Note, used: dict[Layer, bool] | None = None
    ) -> None:
        self.model, self.note, self.used = model, note, used
        self.running: set[str] = set()
        self._layers: dict[tuple[int, int] | None, list[Layer]] = {}  # of each parameter, by address
        self._matrices: dict[tuple[int, int] | None, tuple[Layer, Tensor]] = {}  # (rows, columns), by address
        for layer in layers:
            tensor = layer.tensor(model)
            self._layers.setdefault(_address(layer.stored(model)), []).append(layer)
            if tensor.ndim == 2:
                self._matrices[_address(tensor)] = layer, tensor.mT if layer.transposed else tensor

    def begin_call(self, layer: Layer, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note the input of a layer that is called as a module."""
        self.running.add(layer.name)
        self.note(layer, module, outside_vmap(first_argument(args, kwargs)))

    def end_call(self, layer: Layer, module: nn.Module, args: Args, output: object) -> None:
        """Watch for other uses of the layer's weight again."""
        self.running.discard(layer.name)

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> Callable[[object], None] | None:
        """Capture the factors of a product before it is computed."""
        if func is nn.functional.linear:
            value, weight = factors(args, kwargs)
            self._capture(weight, value)
        elif func is nn.functional.multi_head_attention_forward:
            self._capture_attention(func, signature(func).bind(*args, **kwargs).arguments)
        elif func in _MATMULS:
            first, second = factors(args, kwargs)
            if isinstance(first, Tensor) and isinstance(second, Tensor):
                self._capture(_transposed(second), first)
                self._capture(first, _transposed(second))
        if (used := self.used) is None:
            return None

        def mark(result: object) -> None:
            if isinstance(result, (Tensor, list, tuple)) and not isinstance(result, torch.Size):
                self._mark([*args, *kwargs.values()], used)

        return mark

    def _mark(self, arguments: Iterable[object], used: dict[Layer, bool]) -> None:
        """Mark the layers whose parameter is among the arguments of a function, also within a list."""
        for value in arguments:
            if isinstance(value, (list, tuple)):
                self._mark(value, used)
            elif isinstance(value, Tensor):
                used.update(dict.fromkeys(self._layers.get(_address(value), ()), True))

    def _capture_attention(self, func: Function, arguments: Kwargs) -> None:
        """Capture the inputs of the projections of torch's attention, (samples, positions, channels)."""

        def samples_first(value: Tensor) -> Tensor:
            return value.transpose(0, 1) if value.ndim == 3 else value

        if arguments.get("use_separate_proj_weight"):
            weights = [arguments[f"{name}_proj_weight"] for name in ("q", "k", "v")]
        else:
            weights = [*projections(arguments["in_proj_weight"]).values()]
        values = [arguments[name] for name in ("query", "key", "value")]
        inputs = {id(value): samples_first(value) for value in values}  # equal objects stay equal and share a Gram
        for weight, value in zip(weights, values, strict=True):
            self._capture(weight, inputs[id(value)])
        output = arguments["out_proj_weight"]
        if _address(output) in self._matrices:
            # The input of the output projection is internal to torch; an identity as projection returns it.
            identity = torch.eye(len(output), dtype=output.dtype, device=output.device)
            heads, _ = func(**{**arguments, "out_proj_weight": identity, "out_proj_bias": None})
            self._capture(output, samples_first(heads))

    def _capture(self, factor: object, value: Tensor) -> None:
        """Note the input of the product value @ factor.T if the factor is a layer's matrix, in the same orientation."""
        if not isinstance(factor, Tensor) or factor.ndim != 2:
            return
        layer, matrix = self._matrices.get(_address(factor), (None, factor))
        if layer is None or layer.name in self.running:
            return
        if factor.shape != matrix.shape or factor.stride() != matrix.stride():
            return
        # A new object only if necessary, because layers with the same input are recognised by its identity.
        value = outside_vmap(value.detach() if value.requires_grad else value)
        self.note(layer, self.model.get_submodule(layer.path), value)


def _transposed(value: Tensor) -> Tensor:
    return value.mT if value.ndim > 1 else value


def _address(weight: Tensor) -> tuple[int, int] | None:
    """Storage and offset of a tensor; None if it has no storage of its own."""
    try:
        return weight.untyped_storage().data_ptr(), int(weight.storage_offset())
    except NotImplementedError:  # a sparse tensor, or a tensor inside vmap
        return None


# ---- inputs of the matrices inside recurrent modules, which torch computes in one call
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
