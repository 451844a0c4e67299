"""`iobs.accelerate`: replace layers of a model by the fastest form on this machine, found by timing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from iobs.core.modes import in_eval_mode
from iobs.errors import NonFiniteError, ProblemError
from iobs.inference import cpu, gpu
from iobs.inference.decodable import changed, window_of
from iobs.inference.formats import MOST_COLUMNS, FormatName, store
from iobs.inference.fused import can_fuse, fuse
from iobs.inference.modules import StoredLayer, StoredLinear, can_store, matrix_of, refuse_to_save, stored, with_matrix

# ---- Layers that `iobs.accelerate` may replace: what their model does with them, found in a forward pass

_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # compute with the weights of layers inside
HOOKED = "with a hook or a forward of their own stay dense, since their stored form would not have it"
READ = "stay dense, since the model reads their weights, which a stored form unpacks each time"


def replaceable(model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers that have a stored form and may be replaced, by name, and notes on those that may not."""
    storable = {name: module for name, module in model.named_modules() if can_store(module)}
    inside = {part for module in model.modules() if isinstance(module, _READERS) for part in module.modules()}
    hooked = {module for module in storable.values() if changed(module) and module not in inside}
    counts = {HOOKED: len(hooked), READ: sum(module in inside for module in storable.values())}
    free = {name: module for name, module in storable.items() if module not in hooked and module not in inside}
    return free, [f"{count} layers {reason}" for reason, count in counts.items() if count]


def require_finite(layers: Mapping[str, nn.Module]) -> None:
    """Raise unless all weights of layers are finite, before any of them is replaced.

    Raises:
        NonFiniteError: one holds NaN or infinite entries; names the layer.
    """
    for name, layer in layers.items():
        if not bool(torch.isfinite(matrix_of(layer)).all()):
            raise NonFiniteError(f"The weight of {name!r} holds NaN or infinity; a stored layer needs finite ones.")


def tokens_seen(model: nn.Module, layers: Mapping[str, nn.Module], example: object) -> dict[str, int]:
    """The most tokens that each layer sees in a forward pass of the example."""
    counts: dict[str, int] = {}

    def counting(name: str) -> Callable[..., None]:
        def count(_: nn.Module, __: object, output: Tensor) -> None:
            counts[name] = max(counts.get(name, 1), output.numel() // len(matrix_of(layers[name])))

        return count

    handles = [layer.register_forward_hook(counting(name)) for name, layer in layers.items()]
    try:
        _run(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return counts


def weights_read(model: nn.Module, example: object) -> list[str]:
    """Names of the stored layers whose weight a forward pass of the example reads."""
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, StoredLayer)}
    weight, read_layers = StoredLayer.weight, set[StoredLayer]()

    def record(layer: StoredLayer) -> Tensor:
        read_layers.add(layer)
        return layer.unpacked()

    StoredLayer.weight = property(record)  # type: ignore[method-assign, assignment]
    try:
        _run(model, example)
    finally:
        StoredLayer.weight = weight  # type: ignore[method-assign]
    return [name for layer, name in names.items() if layer in read_layers]


@torch.no_grad()
def _run(model: nn.Module, example: object) -> None:
    """A forward pass as in inference: it changes no statistics of a batch norm."""
    with in_eval_mode(model):
        called(model, example)


def called(model: nn.Module, example: object) -> object:
    """The output of a model for an example: a tensor, or a tuple or a mapping of arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, (tuple, list)) else model(example)


Precision = Literal["bf16", "int8", "int4"]
FORMATS_OF: dict[Precision, tuple[FormatName, ...]] = {
    "bf16": ("bitmask-bf16", "index-bf16", "bf16"),
    "int8": ("bitmask-bf16", "index-bf16", "bf16", "bitmask-int8", "int8"),
    "int4": ("bitmask-bf16", "index-bf16", "bf16", "bitmask-int8", "int8", "bitmask-int4"),
}
_Candidate = FormatName | Literal["dense"]
_Place = tuple[int, torch.Size, tuple[int, ...]]  # of a weight in memory: address, shape and strides
_Timing = tuple[dict[str, float], _Candidate, int, int | None]  # see `_Timings._timed`


class _Way(NamedTuple):
    """A candidate: format, threads, and the most tokens that the kernels of few tokens take."""

    format: _Candidate
    threads: int = 1
    most: int | None = None


_Key = TypeVar("_Key")
PRECISIONS: tuple[Precision, ...] = tuple(FORMATS_OF)
_NO_INDEX_BELOW = 0.75  # share of zeros; below it an index takes more bytes than a mask
_NO_MASK_BELOW = 0.05  # share of zeros; below it a mask takes more than it saves
_TIE = 1.1  # the form with the fewest bytes wins among those within this factor of the least time
_SMALLEST = 1 << 14  # entries; the calls of smaller layers cost more than their products
_REPETITIONS, _LONGEST = 9, 0.3  # of a timing: number, and seconds for one candidate
_COUNTS = (2, 4, 8, 16, 64)  # tokens that decide between the kernels of few and of many tokens
_ANY = 1 << 30


@dataclass(frozen=True)
class Choice:
    """The form of one layer.

    Args:
        name: name of the layer in the model.
        shape: (rows, columns).
        sparsity: share of zero entries.
        format: the chosen format, or "dense": the layer is unchanged.
        seconds: best measured seconds of one product, for each candidate.
        tokens: number of tokens of that product.
        threads: threads of the chosen form; 0 on a CUDA device.
        bytes_before: bytes of the dense weight.
        bytes_after: bytes of the chosen form.
        error: norm of the change of the weight relative to its norm; without the rounding of activations.
    """

    name: str
    shape: tuple[int, int]
    sparsity: float
    format: str
    seconds: Mapping[str, float]
    tokens: int
    threads: int
    bytes_before: int
    bytes_after: int
    error: float


@dataclass(frozen=True)
class Acceleration:
    """Result of `iobs.accelerate`: the form of every layer.

    Args:
        choices: the layers that were looked at.
        level: instruction set of the kernels: "avx512", "avx2" or "none"; "cuda" on a CUDA device.
        notes: forms that were not candidates, and why.
    """

    choices: tuple[Choice, ...]
    level: str
    notes: tuple[str, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Bytes of the dense weights of all these layers."""
        return sum(choice.bytes_before for choice in self.choices)

    @property
    def bytes_after(self) -> int:
        """Bytes of the chosen forms."""
        return sum(choice.bytes_after for choice in self.choices)

    def __str__(self) -> str:
        """A line for each distinct shape and format, and the totals."""
        groups: dict[tuple[tuple[int, int], str, int], list[Choice]] = {}
        for choice in self.choices:
            groups.setdefault((choice.shape, choice.format, choice.threads), []).append(choice)
        lines = [f"Kernels: {self.level}. One product of each layer:"]
        for (shape, name, threads), group in groups.items():
            before = sum(choice.seconds["dense"] for choice in group) / len(group)
            after = sum(choice.seconds[choice.format] for choice in group) / len(group)
            zeros = sum(choice.sparsity for choice in group) / len(group)
            rows, columns = shape
            shared = f", {threads} thread(s)" if threads else ""
            lines.append(
                f"  {len(group):3d} x {rows} x {columns}, {zeros:.0%} zeros: {name}{shared}, "
                f"{1e3 * before:.3f} -> {1e3 * after:.3f} ms"
            )
        lines.append(f"Weights of these layers: {self.bytes_before / 1e6:.1f} -> {self.bytes_after / 1e6:.1f} MB.")
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])


def accelerate(
    model: nn.Module,
    example: object = None,
    *,
    precision: Precision = "int8",
    threads: int | None = None,
) -> Acceleration:
    """Replace linear layers and convolutions of size 1 by stored forms where those are faster on this machine.

    The candidates of each shape are timed, the dense layer among them. The model is changed in place and computes
    without gradients; transformers' `generate` and pipelines work as before. The state dict then has the stored
    tensors, so save the dense model first. On a CUDA device, the candidate beside a dense linear layer is its non-zero
    entries with short column offsets, unrounded.

    Args:
        model: on the CPU, in float32 or bfloat16, or on one CUDA device.
        example: a batch: a tensor, or a tuple or a mapping of arguments. It says how many tokens a layer sees, and
            whose weights the model reads: those stay dense. None: layers are timed with one token, as in generation,
            and convolutions stay dense.
        precision: on the CPU, the fewest bits of a stored weight. With "int8" and "int4" a product may also round
            activations to 8 bits, one scale for each token.
        threads: on the CPU, threads of a product. None: 1 or all threads of torch, whichever is faster.

    Returns:
        What was chosen for each layer, with the measured times.

    Raises:
        ProblemError: the model is on another kind of device or on several, or an argument is unknown.
        NonFiniteError: a weight holds NaN or infinite entries. After an error the model is unchanged.
    """
    device = _require(model, precision, threads)
    storable, notes = replaceable(model)
    layers = {name: layer for name, layer in storable.items() if matrix_of(layer).numel() >= _SMALLEST}
    tokens = {name: 1 for name, layer in layers.items() if isinstance(layer, nn.Linear)} if example is None else {}
    if example is not None:
        tokens = tokens_seen(model, layers, example)
    layers = {name: layer for name, layer in layers.items() if name in tokens}
    require_finite(layers)
    before = _count_stored(model)
    timings: _Timings | _GpuTimings
    if device.type == "cuda":
        timings = _GpuTimings()
    else:
        timings = _Timings(FORMATS_OF[precision], [threads] if threads else sorted({1, torch.get_num_threads()}))
    choices: dict[str, Choice] = {}
    read: list[str] = []
    with _dense_again(model, layers):
        for name, layer in layers.items():
            choices[name], form = timings.choose(name, layer, tokens[name])
            if form is not None:
                model.set_submodule(name, form.train(layer.training))
        if example is not None and device.type == "cpu":
            read = [name for name in weights_read(model, example) if name in layers]
    for name in read:
        model.set_submodule(name, layers[name])
        choice = choices[name]
        choices[name] = replace(choice, format="dense", threads=1, bytes_after=choice.bytes_before, error=0.0)
    notes = [*timings.notes, *notes]
    if before:
        notes.append(f"{before} layers are stored already and stay as they are")
    notes += [f"{len(read)} layers {READ}"] if read else []
    if _count_stored(model):
        refuse_to_save(model)
    small = sum(matrix_of(layer).numel() < _SMALLEST for layer in storable.values())
    if small:
        notes.append(f"{small} layers of fewer than {_SMALLEST:,} weights stay dense, since they gain nothing")
    if device.type == "cpu" and can_fuse(model):
        fuse(model)
        window = window_of(model)
        limit = f", as long as the text has fewer than {window:,} tokens" if window else ""
        notes.append(f"each new token of generate is one call of compiled code{limit}")
    return Acceleration(tuple(choices.values()), "cuda" if device.type == "cuda" else cpu.level(), tuple(notes))


def _count_stored(model: nn.Module) -> int:
    """Number of layers that are no longer dense."""
    return sum(isinstance(module, StoredLinear | gpu.OffsetLinear) for module in model.modules())


@contextmanager
def _dense_again(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Context that replaces layers; after an error, or an interruption, the model has these layers again."""
    try:
        yield
    except BaseException:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        raise


def _require(model: nn.Module, precision: str, threads: int | None) -> torch.device:
    """Raise unless the arguments of `accelerate` are possible; return the device of the model."""
    if not isinstance(model, nn.Module):
        raise ProblemError(
            f"accelerate needs a torch module, got {type(model).__name__}; give the module of iobs.load."
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ProblemError("accelerate replaces Python modules, and torch.jit hides them; script the model afterwards.")
    if can_store(model):
        raise ProblemError("accelerate replaces layers inside a model; put a single one into nn.Sequential(layer).")
    if precision not in FORMATS_OF:
        raise ProblemError(f"precision must be one of {', '.join(FORMATS_OF)}, got {precision!r}.")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise ProblemError(f"threads must be a whole number of at least 1, got {threads!r}.")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or torch.device((devices or ["cpu"])[0]).type not in ("cpu", "cuda"):
        raise ProblemError(
            f"accelerate needs a model on the CPU or on one CUDA device, this one is on {' and '.join(devices)}; "
            "move it: model.cpu() or model.cuda()."
        )
    return torch.device((devices or ["cpu"])[0])


@dataclass
class _Timings:
    """Times the candidates once for every shape, sparsity (to 5 %) and number of tokens."""

    formats: tuple[FormatName, ...]
    threads: list[int]
    measured: dict[tuple[object, ...], _Timing] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    forms: dict[_Place, StoredLinear] = field(default_factory=dict)

    def choose(self, name: str, layer: nn.Module, tokens: int) -> tuple[Choice, StoredLinear | None]:
        """The choice for a layer, and its new form; None if the dense layer is fastest."""
        weight = matrix_of(layer)
        sparsity = float((weight == 0).float().mean())
        key = (weight.shape, weight.dtype, layer.bias is None, round(20 * sparsity), tokens, type(layer))
        if key not in self.measured:
            self.measured[key] = self._timed(layer, sparsity, tokens)
        seconds, best, threads, most = self.measured[key]
        form, before = None, _bytes(layer)
        error, after = 0.0, before
        if best != "dense":
            form = stored(layer, best, threads, most)
            first = self.forms.setdefault((weight.data_ptr(), weight.shape, weight.stride()), form)
            if first is not form and first.format == best:  # layers with one weight share its stored form
                for part, tensor in first.named_buffers():
                    setattr(form, part, tensor)
            after = form.matrix.bytes
            error = float((form.matrix.to_dense() - weight.float()).norm() / weight.float().norm().clamp(min=1e-30))
        shape = (weight.shape[0], weight.shape[1])
        return Choice(name, shape, sparsity, best, seconds, tokens, threads, before, after, error), form

    def _timed(self, layer: nn.Module, sparsity: float, tokens: int) -> _Timing:
        """Seconds of each candidate, the best one, its threads, and the most tokens of its kernel for few tokens."""
        forms: dict[_Way, nn.Module] = {_Way("dense"): layer}
        for name in self.formats if cpu.level() != "none" else ():
            if name == "index-bf16" and (sparsity < _NO_INDEX_BELOW or matrix_of(layer).shape[1] > MOST_COLUMNS):
                continue
            if name.startswith("bitmask") and sparsity < _NO_MASK_BELOW:
                continue
            matrix = store(matrix_of(layer), name)
            for threads in self.threads:
                for few in {tokens, max(tokens - 1, 1)}:
                    forms[_Way(name, threads, few)] = with_matrix(layer, matrix, threads, few)
        inputs = _activations(layer, tokens)
        seconds = _best_seconds({key: partial(form, inputs) for key, form in forms.items()})
        near = [key for key, value in seconds.items() if value <= _TIE * min(seconds.values())]
        best = min(near, key=lambda key: (_bytes(forms[key]), seconds[key]))
        most: int | None = None
        if best.format != "dense":
            counts = [count for count in _COUNTS if (count > tokens) == (best.most == tokens)]
            most = _most_tokens(forms[best], layer, counts, tokens if best.most == tokens else 1)
        least: dict[str, float] = {}
        for way, value in seconds.items():
            least[way.format] = min(value, least.get(way.format, value))
        return least, best.format, best.threads, most


@dataclass
class _GpuTimings:
    """Times the candidates on a CUDA device, as `_Timings` does."""

    measured: dict[tuple[object, ...], dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def choose(self, name: str, layer: nn.Module, tokens: int) -> tuple[Choice, nn.Module | None]:
        """The choice for a layer, and its new form; None if the dense layer is fastest."""
        weight, make = matrix_of(layer), None
        sparsity = float((weight == 0).float().mean())
        if isinstance(layer, nn.Linear):
            make, note = gpu.form_of(layer)
            self._note(note)
        key = (weight.shape, weight.dtype, layer.bias is None, round(20 * sparsity), tokens, make is None)
        if key not in self.measured:
            self.measured[key] = self._timed(layer, tokens, make)
        seconds = self.measured[key]
        # The form has fewer bytes, so it wins a tie.
        faster = make is not None and seconds.get(gpu.OFFSETS, math.inf) <= _TIE * seconds["dense"]
        form = make() if make is not None and faster else None
        before, shape = _bytes(layer), (weight.shape[0], weight.shape[1])
        after = form.bytes if isinstance(form, gpu.OffsetLinear) else before
        chosen = "dense" if form is None else gpu.OFFSETS
        return Choice(name, shape, sparsity, chosen, seconds, tokens, 0, before, after, 0.0), form

    def _timed(self, layer: nn.Module, tokens: int, make: Callable[[], nn.Module] | None) -> dict[str, float]:
        """Seconds of each candidate."""
        inputs = _activations(layer, tokens).to(matrix_of(layer).device)
        candidates = {"dense": layer}
        if make is not None:
            form, note = gpu.usable(make, inputs)
            self._note(note)
            candidates |= {} if form is None else {gpu.OFFSETS: form}
        return _best_seconds({name: partial(gpu.waiting, form, inputs) for name, form in candidates.items()})

    def _note(self, note: str) -> None:
        if note and note not in self.notes:
            self.notes.append(note)


def _most_tokens(form: nn.Module, layer: nn.Module, counts: list[int], least: int) -> int:
    """The most tokens, of ascending counts, that the kernels of few tokens multiply faster; at least `least`."""
    assert isinstance(form, StoredLinear)
    most = least
    for count in counts:
        inputs = _activations(layer, count)
        ways = {limit: with_matrix(layer, form.matrix, form.threads, limit) for limit in (count, count - 1)}
        seconds = _best_seconds({limit: partial(way, inputs) for limit, way in ways.items()})
        if seconds[count - 1] < seconds[count]:
            return most
        most = _ANY if count == _COUNTS[-1] else count
    return most


def _bytes(form: nn.Module) -> int:
    """Bytes of the weight of a layer, dense or stored."""
    return form.matrix.bytes if isinstance(form, StoredLinear) else matrix_of(form).nbytes


def _activations(layer: nn.Module, tokens: int) -> Tensor:
    """Random inputs of a layer."""
    weight = matrix_of(layer)
    inputs = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    if isinstance(layer, nn.Linear):
        return inputs
    strides: tuple[int, ...] = layer.stride  # type: ignore[assignment]
    spread = inputs.new_zeros(weight.shape[1], (tokens - 1) * strides[-1] + 1)  # a stride leaves some positions out
    spread[:, :: strides[-1]] = inputs.t()
    return spread.reshape(1, weight.shape[1], *[1] * (len(strides) - 1), -1)


@torch.no_grad()
def _best_seconds(calls: Mapping[_Key, Callable[[], object]]) -> dict[_Key, float]:
    """The least seconds of each call, with all calls in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()  # compile, and warm the caches
    for _ in _repetitions(calls):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            best[key] = min(best[key], time.perf_counter() - start)
    return best


def _repetitions(calls: Mapping[_Key, Callable[[], object]]) -> Iterator[int]:
    """Count repetitions until there are enough, or time is up."""
    end = time.perf_counter() + _LONGEST * len(calls)
    for count in range(_REPETITIONS):
        if count > 1 and time.perf_counter() > end:
            return
        yield count
