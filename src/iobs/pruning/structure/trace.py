"""Trace of forward passes: which layers mix channels, and which tensors lie between them.

The outputs of all layers that mix channels (linear maps, convolutions, embeddings) are replaced by noise. Each output
is a leaf of the autograd graph. A backward pass from the input of a layer therefore ends at the layers that wrote this
input. The regions between layers are independent of each other. Layers are not computed, so a trace costs the
element-wise operations and the attention products alone.

Parameters and buffers outside of these layers are replaced by noise too. Zeros would hide dependencies, such as the
zero scales of a new residual branch. Functions with flat parts become smooth functions for the same reason.

The entries of a very large parameter outside of these layers, such as all experts in one parameter, belong to no unit.
The noise in its place is no leaf, and is stored once for all equal shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from iobs.errors import ModelError, first_line, unless_out_of_memory
from iobs.pruning.network.calls import Args, Argument, Function, Interceptor, Kwargs, before_calls, factors
from iobs.pruning.network.layers import joined
from iobs.pruning.network.modes import evaluating, keeping_attributes, keeping_buffers
from iobs.pruning.samples import batches
from iobs.pruning.samples.batches import Batch
from iobs.pruning.samples.outputs import logits, tensors_of
from iobs.pruning.structure import smooth

_MOST_PASSES = 8  # of every batch with new noise
_MOST_ENTRIES = 2**24  # of a parameter between layers whose entries are told apart
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_SETTINGS: dict[Callable[..., Tensor], tuple[str, ...]] = {  # arguments of convolutions after input and weight
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), ("bias", "stride", "padding", "dilation", "groups")),
    **dict.fromkeys(_TRANSPOSED, ("bias", "stride", "padding", "output_padding", "groups", "dilation")),
}
_DETACHED: tuple[object, ...] = (torch.detach, Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_NUMBERS: tuple[object, ...] = (
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__float__,
    Tensor.__int__,
)
_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_VIEWS = ("__get__", "t", "transpose")
TOKENS = 8  # positions of text in a traced batch: softmax needs more than one
_FIRST, _FURTHER = 2, 32  # samples of the first traced batch, and of further ones


@dataclass
class Source:
    """Tensors that a forward pass starts from: the noise output of a layer, or a parameter between layers.

    Attributes:
        path: of the module.
        parameter: name in the module.
        axis: of the parameter, along which the output's channels lie; None for a parameter between layers.
        leaves: the noise, one tensor for each call.
        channels: dimension of the channels in each leaf.
    """

    path: str
    parameter: str
    axis: int | None = None
    leaves: list[Tensor] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)


@dataclass
class Read:
    """The inputs of a layer that mixes channels.

    Attributes:
        path: of the module.
        parameter: name of its weight.
        axis: of the weight, along which the input's channels lie.
        width: number of matrix columns for one input channel.
        place: number of calls of layers before the first call of this one, in its forward pass.
        norm: path of the batch norm that alone takes the outputs of all calls, and nothing else; or None.
        inputs: tensors in the autograd graph, one for each call.
        channels: dimension of the channels in each input.
    """

    path: str
    parameter: str
    axis: int
    width: int
    place: int = 0
    norm: str | None = None
    inputs: list[Tensor] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """Number of input channels."""
        return self.inputs[0].shape[self.channels[0]]

    @property
    def positions(self) -> int:
        """Number of input vectors over all calls."""
        return sum(value.numel() for value in self.inputs) // self.columns


@dataclass
class Trace:
    """Sources and reads of some forward passes, in the order of their first calls, and the model's outputs.

    Attributes:
        sources: by full name of the parameter.
        reads: by full name of the weight; with "@" and the axis for a second axis of the same weight.
        outputs: floating-point tensors that the model returned, or whose values it took out of torch.
        samples: number of samples in the passes.
        unreached: paths of modules that the batches reach, and the noise does not.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    reads: dict[str, Read] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    samples: int = 0
    unreached: list[str] = field(default_factory=list)


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """Say why units cannot be found if the model fails inside, and what to do.

    Raises:
        ModelError: the model failed, but not for want of memory.
    """
    try:
        yield
    except unless_out_of_memory(*batches.REFUSALS) as error:
        raise ModelError(
            f"Units cannot be found: {reason} ({type(error).__name__}: {first_line(error)}). Prune entries instead: "
            "Unstructured or NM."
        ) from error


def trace(model: nn.Module, short_batches: Sequence[batches.Batch]) -> Trace:
    """Trace the forward passes of some short batches; the model is unchanged.

    Noise may choose other experts than data do, so passes are repeated until they call the modules that data call.

    Raises:
        ModelError: the model takes the batch, but not noise in place of the outputs of its layers.
    """
    recorder, paths = _Recorder(model), callable_modules(model)
    called = called_modules(model, short_batches, paths)
    reached: set[str] = set()
    outputs: list[Tensor] = []
    reason = f"{type(model).__name__} does not take noise in place of the outputs of its layers"
    with (
        evaluating(model),
        keeping_buffers(model),
        keeping_attributes(model),
        before_calls(model, paths, lambda path, *_: reached.add(path)),
        torch.enable_grad(),
        Interceptor(recorder.compute),
        refused(reason),
    ):
        for _ in range(_MOST_PASSES):
            for batch in short_batches:
                recorder.calls = 0
                outputs += tensors_of(batches.forward(model, batch))
            recorder.trace.samples += sum(map(batches.size, short_batches))
            if reached >= called:
                break
    recorder.trace.unreached = [path for path in paths if path in called - reached]
    recorder.settle_norms(outputs)
    recorder.trace.outputs = [
        value for value in (*outputs, *recorder.shown) if value.is_floating_point() and value.requires_grad
    ]
    return recorder.trace


class _Recorder:
    """Replace layers and parameters by noise where torch functions use them, and record what they read."""

    def __init__(self, model: nn.Module) -> None:
        self.trace = Trace()
        self.names: dict[int, tuple[str, str]] = {}  # (path, name) of every floating parameter and buffer, by identity
        self.noise: dict[int, Tensor] = {}  # of parameters between layers, by identity
        self.large: dict[object, Tensor] = {}  # noise of parameters that are no leaves, by shape, dtype and device
        self.transposes: dict[int, tuple[Tensor, Tensor]] = {}  # views of weight matrices and the matrices
        self.outputs: dict[int, tuple[Tensor, str]] = {}  # outputs of layers and the weight's name, by identity
        # Layers' inputs, with their versions and copies.
        self.copies: MutableMapping[Tensor, tuple[int, Tensor]] = WeakTensorKeyDictionary()
        self.takers: dict[str, set[str | None]] = {}  # batch norms that take a layer's outputs; None: anything else
        self.normed: dict[str, set[str | None]] = {}  # layers whose outputs a batch norm takes; None: anything else
        self.calls = 0  # of layers in this forward pass
        self.shown: list[Tensor] = []  # tensors whose values the model took out of torch
        self.random = torch.Generator().manual_seed(0)
        for path, module in model.named_modules():
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is not None and value.is_floating_point():
                    self.names.setdefault(id(value), (path, name))

    def compute(self, func: Function, args: Args, kwargs: Kwargs) -> Argument:
        """Run a torch function on noise in place of the model's own values."""
        with torch.enable_grad():  # parts that need no gradients, such as an index of the keys, read units too
            result = self._result(func, args, kwargs)
        # Shapes and dtypes are no use of an output.
        if func is not F.batch_norm and any(isinstance(value, Tensor) for value in tree_leaves(result)):
            self._note_taker((args, kwargs), None)
        return result

    def _note_taker(self, values: Argument, taker: str | None) -> None:
        """Note who takes the outputs of layers among some arguments, also inside tuples and lists."""
        for value in tree_leaves(values):
            if id(value) in self.outputs:
                self.takers.setdefault(self.outputs[id(value)][1], set()).add(taker)

    def settle_norms(self, outputs: Iterable[Argument]) -> None:
        """Give each layer the batch norm that takes all of its outputs, if nothing else does, the model included."""
        self._note_taker([*outputs], None)
        for key, takers in self.takers.items():
            norm = next(iter(takers))
            if len(takers) == 1 and norm is not None and self.normed[norm] == {key} and key in self.trace.reads:
                self.trace.reads[key].norm = norm

    def _result(self, func: Function, args: Args, kwargs: Kwargs) -> Argument:
        first = args[0] if args else kwargs.get("input")
        if func in _DETACHED:  # parts that pass no gradient read units too
            return smooth.passing(self._replaced(first))
        if func in _NUMBERS and isinstance(first, Tensor):  # the model may do anything with them
            self.shown += [first] if first.grad_fn is not None else []
            return func(first.detach(), *args[1:], **kwargs)
        if func in smooth.OF_ONE and isinstance(first, Tensor) and first.is_floating_point():
            return smooth.OF_ONE[func](self._replaced(first))
        if func in smooth.OF_SEVERAL:
            return smooth.OF_SEVERAL[func](*self._replaced(args), **self._replaced(kwargs))
        if func.__name__ in _VIEWS:  # also shapes, dtypes and the like
            return self._viewed(func, *args, **kwargs)
        if func in _PRODUCTS and len(args) + len(kwargs) == 2:
            return self._product(func, *factors(args, kwargs))
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in _SETTINGS:
            return self._convolution(func, *args, **kwargs)
        if func is torch.addmm and kwargs.keys() <= {"input", "mat1", "mat2"}:
            return self._added_product(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(func, *args, **kwargs)
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return func(*self._replaced(args), **self._replaced(kwargs))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) not in self.names:
            return F.linear(input, weight, self._replaced(bias))
        return self._biased(self._layer(input, weight, 1, input.ndim - 1, F.linear), weight, bias)

    def _added_product(self, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
        """A product of an input and a weight matrix, or of two tensors, that is added to another tensor."""
        if id(mat2) in self.transposes or id(mat2) in self.names:
            weight = self.transposes[id(mat2)][1] if id(mat2) in self.transposes else mat2
            return self._biased(self._product(torch.mm, mat1, mat2), weight, input)
        return torch.addmm(*self._replaced((input, mat1, mat2)))

    def _biased(self, output: Tensor, weight: Tensor, bias: Tensor | None, behind: int = 0) -> Tensor:
        """Add a bias that is not the layer's own, such as the joined biases of queries and values.

        Args:
            output: noise.
            weight: a parameter of the model.
            bias: the bias; one of the layer itself belongs to the layer's rows and is not added.
            behind: dimensions of the output behind the channels.
        """
        if bias is None or self.names.get(id(bias)) == (self.names[id(weight)][0], "bias"):
            return output
        added: Tensor = self._replaced(bias).to(output.dtype)
        return output + (added.view(-1, *(1,) * behind) if behind else added)

    def _viewed(self, func: Callable[..., Argument], input: Argument, *args: Argument, **kwargs: Argument) -> Argument:
        """Remember transposes of weight matrices, and let other attributes of tensors through."""
        view = func(input, *args, **kwargs)
        if id(input) in self.names and isinstance(view, Tensor):
            if input.ndim == 2 and view.shape == input.shape[::-1] and view.stride() == input.stride()[::-1]:
                self.transposes[id(view)] = (view, input)
            else:
                return func(self._noise(input), *args, **kwargs)
        return view

    def _product(self, func: Callable[..., Tensor], input: Tensor, other: Tensor) -> Tensor:
        """A product of an input and a weight matrix, or of two tensors."""
        if id(other) in self.transposes:
            return self._layer(input, self.transposes[id(other)][1], 1, input.ndim - 1, F.linear)
        if id(other) in self.names and other.ndim == 2:
            return self._layer(input, other, 0, input.ndim - 1, torch.matmul)
        return func(*self._replaced((input, other)))

    def _convolution(
        self, func: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Argument, **kwargs: Argument
    ) -> Tensor:
        """A convolution, or a transposed convolution, whose weight has its inputs first."""
        settings = {**dict(zip(_SETTINGS[func], args, strict=False)), **kwargs}
        bias, groups = settings.pop("bias", None), settings.get("groups", 1)
        if id(weight) not in self.names or groups > 1:
            return func(input, *self._replaced((weight, bias)), **settings)
        columns = 0 if func in _TRANSPOSED else 1
        channel = input.ndim - weight.ndim + 1
        output = self._layer(input, weight, columns, channel, lambda x, w: func(x, w, **settings))
        return self._biased(output, weight, bias, weight.ndim - 2)

    def _layer(
        self, input: Tensor, weight: Tensor, columns: int, channel: int, compute: Callable[..., Tensor]
    ) -> Tensor:
        """Record a layer's input and return noise of its output's shape.

        Args:
            input: of the layer.
            weight: a parameter of the model.
            columns: axis of the weight for the input's channels; that of the output's channels is 0 or 1, too.
            channel: dimension of the channels in the input and in the output.
            compute: the layer, as a function of input and weight; called without data for the output's shape.
        """
        path, name = self.names[id(weight)]
        key = joined(path, name)
        if self.trace.reads.get(key, Read(path, name, columns, 1)).axis != columns:
            key = f"{key}@{columns}"  # a matrix that is read along its other axis too
        width = weight[0, 0].numel() if weight.ndim > 2 else 1
        read = self.trace.reads.setdefault(key, Read(path, name, columns, width, self.calls))
        self.calls += 1
        if input.requires_grad:
            read.inputs.append(self._kept(input))
            read.channels.append(channel)
        shape = compute(input.detach().to("meta"), weight.detach().to("meta", input.dtype)).shape
        return self._output(key, shape, input, Source(path, name, 1 - columns), channel)

    def _kept(self, input: Tensor) -> Tensor:
        """A copy of a layer's input, which the model may write into; layers that read the same values share it."""
        if input not in self.copies or self.copies[input][0] != input._version:
            self.copies[input] = (input._version, input.clone())
        return self.copies[input][1]

    def _embedding(
        self, func: Callable[..., Tensor], input: Tensor, weight: Tensor, *args: Argument, **kwargs: Argument
    ) -> Argument:
        if id(weight) not in self.names:
            return func(input, weight, *args, **kwargs)
        path, name = self.names[id(weight)]
        shape = (*input.shape, weight.shape[1])
        return self._output(joined(path, name), shape, weight, Source(path, name, 1), input.ndim)

    def _output(self, key: str, shape: tuple[int, ...], like: Tensor, source: Source, channel: int) -> Tensor:
        leaf = torch.randn(shape, generator=self.random).to(like.device, like.dtype).requires_grad_()
        source = self.trace.sources.setdefault(f"{key}@{source.axis}", source)
        source.leaves.append(leaf)
        source.channels.append(channel)
        output = leaf.clone()  # a leaf must not be changed in place
        self.outputs[id(output)] = (output, key)
        return output

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *_args: Argument,
        **_kwargs: Argument,
    ) -> Tensor:
        """Batch norm as an affine map of every channel, so that gradients reach the running statistics."""
        norm = self.names[id(running_mean)][0] if id(running_mean) in self.names else None
        self._note_taker(input, norm)
        if norm is not None:
            self.normed.setdefault(norm, set()).add(self.outputs[id(input)][1] if id(input) in self.outputs else None)
        shape = (1, -1, *(1,) * (input.ndim - 2))
        output = input
        for index, value in enumerate((running_mean, running_var, weight, bias)):
            if value is not None:
                entries = self._replaced(value).view(shape).to(input.dtype)
                output = output * entries if index in (1, 2) else output + entries
        return output

    def _replaced(self, values: Argument) -> Argument:
        """Values with the model's own parameters and buffers replaced by noise, also inside tuples, lists and dicts."""
        return tree_map_only(Tensor, lambda value: self._noise(value) if id(value) in self.names else value, values)

    def _noise(self, value: Tensor) -> Tensor:
        """Positive noise in place of a parameter between layers, a leaf of the graph unless it is very large."""
        if value.numel() > _MOST_ENTRIES:
            kind = value.shape, value.dtype, value.device
            if kind not in self.large:
                row = torch.rand((1, *value.shape[1:]), generator=self.random).add_(0.5)
                self.large[kind] = row.to(value.device, value.dtype).expand(value.shape)
            return self.large[kind]
        if id(value) not in self.noise:
            path, name = self.names[id(value)]
            leaf = torch.rand(value.shape, generator=self.random).add_(0.5).to(value.device, value.dtype)
            self.trace.sources[joined(path, name)] = Source(path, name, leaves=[leaf.requires_grad_()], channels=[0])
            self.noise[id(value)] = leaf
        return self.noise[id(value)].clone()  # the model may write into it


# ---- batches of a trace: short, and enough to call the layers that calibration data call
@torch.no_grad()
def traced_batches(model: nn.Module, data: Sequence[Batch]) -> list[Batch]:
    """Short batches: the first, and one of every batch that calls a layer which no batch before it calls.

    A forward pass may branch by its data. A layer in another branch reads units too. A model that takes no fewer
    positions, such as one with an embedding for each column of a table, gets all of them.

    Args:
        model: in eval mode.
        data: calibration data. Nothing but the first batch is run if that one calls all layers.

    Raises:
        CalibrationError: the model returns no tensor.
    """
    paths = callable_modules(model)

    def shorter(batch: Batch, samples: int = _FIRST) -> tuple[Batch, set[str]]:
        """A shorter batch that the model takes, and the modules that it calls."""
        short = shortened(batch, samples)
        try:
            return short, called_modules(model, [short], paths)
        except unless_out_of_memory(*batches.REFUSALS):
            few = _fewer(batch, samples)
            return few, called_modules(model, [few], paths)

    first, called = shorter(data[0])
    traced = [first]
    for batch in data:
        for part in batches.pieces(batch):
            if called.issuperset(paths):
                return traced
            if new := called_modules(model, [part], paths) - called:
                candidates = (shorter(part, samples) for samples in (_FIRST, _FURTHER))
                traced.append(next((short for short, calls in candidates if new <= calls), batches.inputs(part)))
                called |= new
    return traced


@torch.no_grad()
def called_modules(model: nn.Module, data: Sequence[Batch], paths: Sequence[str]) -> set[str]:
    """The modules among those at some paths that a model calls on some batches, in eval mode.

    Raises:
        CalibrationError: the model returns no tensor.
    """
    called: set[str] = set()
    with evaluating(model), keeping_buffers(model), before_calls(model, paths, lambda path, *_: called.add(path)):
        for batch in data:
            logits(batches.forward(model, batch))
    return called


def callable_modules(model: nn.Module) -> list[str]:
    """Names of the modules with parameters that a forward pass may call as modules."""
    visible = {path: each for path, each in model.named_modules() if not isinstance(each, torch.jit.ScriptModule)}
    # Attention of torch multiplies by the weight of its last layer itself.
    unseen = {joined(path, "out_proj") for path, each in visible.items() if isinstance(each, nn.MultiheadAttention)}
    holders = (nn.ParameterList, nn.ParameterDict)
    able = [path for path, each in visible.items() if any(value is not None for value in each._parameters.values())]
    return [path for path in able if path not in unseen and not isinstance(visible[path], holders)]


def shortened(batch: Batch, samples: int = _FIRST) -> Batch:
    """At most some samples, and `TOKENS` positions of text if nothing else is in the batch.

    Text beside images or sounds is left whole: its tokens stand for their parts. Of text that is padded on the left the
    last positions are taken.
    """
    short = _fewer(batch, samples)
    tensors = batches.tensors(short)
    if len(tensors) > 1 and any(tensor.is_floating_point() for tensor in tensors):
        return short
    texts = {tensor.shape for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()}
    if isinstance(short, Mapping) and len(texts) == 1:
        mask = short.get("attention_mask")
        padded = isinstance(mask, Tensor) and mask.shape in texts and not bool(mask[:, 0].all())
        part = slice(-TOKENS, None) if padded else slice(TOKENS)
        return {
            name: value[:, part] if isinstance(value, Tensor) and value.shape in texts else value
            for name, value in short.items()
        }
    return short[:, :TOKENS] if isinstance(short, Tensor) and short.shape in texts else short


def _fewer(batch: Batch, samples: int) -> Batch:
    """The inputs of at most some samples."""
    inputs = batches.inputs(batch)
    return batches.take(inputs, torch.arange(min(samples, batches.size(inputs))))
