"""Time of a module on one input, in torch or in ONNX Runtime."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from iobs.core.modes import silenced
from iobs.core.structured import Runtime
from iobs.errors import ModelError, ProblemError, first_line

TimedCall: TypeAlias = Callable[[], object]  # a function without arguments whose time is measured
Clock: TypeAlias = Callable[[Sequence[TimedCall]], list[float]]  # seconds of every call

NAMES: dict[Runtime, str] = {"torch": "torch", "onnx": "ONNX Runtime"}
_SLICE = 1e-3  # seconds that one measurement of a call takes at least
_SECONDS = 0.15  # seconds of measurements for one call
_ROUNDS = (5, 40)  # least and most measurements of one call


@dataclass(frozen=True)
class Example:
    """A module with the arguments of one call.

    Attributes:
        module: in eval mode.
        arguments: positional arguments.
        named: arguments by name.
    """

    module: nn.Module
    arguments: tuple[object, ...]
    named: dict[str, object]


class _Traced(nn.Module):
    """A module as a function of the tensors among its arguments, as an export needs it."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.module = example.module
        leaves, self.structure = tree_flatten((example.arguments, example.named))
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.leaves = leaves

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors of the example."""
        return tuple(self.leaves[place] for place in self.places)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the module; returns the tensors of its output."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, inputs, strict=True):
            leaves[place] = value
        arguments, named = tree_unflatten(leaves, self.structure)
        output = self.module(*arguments, **named)
        values = output.to_tuple() if hasattr(output, "to_tuple") else output
        return tuple(value for value in tree_flatten(values)[0] if isinstance(value, Tensor))


def require_runtime(runtime: Runtime) -> None:
    """Raise unless a runtime is installed.

    Raises:
        ProblemError: it is not.
    """
    missing = [name for name in ("onnx", "onnxruntime") if runtime == "onnx" and find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise ProblemError(f"runtime=\"onnx\" needs {needed}: pip install 'iobs[timing]'")


def called_in(runtime: Runtime, example: Example) -> TimedCall:
    """The call of an example in a runtime, ready to be timed.

    Raises:
        ModelError: the module cannot be exported to ONNX, or does not run there.
    """
    return _in_torch(example) if runtime == "torch" else _in_onnx(example)


def _in_torch(example: Example) -> TimedCall:
    accelerator = next((value.device for value in example.module.parameters() if value.device.type != "cpu"), None)

    def call() -> None:
        with torch.no_grad():
            example.module(*example.arguments, **example.named)
            if accelerator is not None:
                torch.accelerator.synchronize(accelerator)  # a call only starts the work there

    return call


def _in_onnx(example: Example) -> TimedCall:
    """The call of an example in ONNX Runtime, which was called once.

    Raises:
        ModelError: the module cannot be exported, or the runtime does not take it.
    """
    try:
        call = _session(example)
        call()
        return call
    except ModelError:
        raise
    except Exception as error:  # the runtime has its own, and numpy has no bfloat16
        raise ModelError(
            f"{type(example.module).__name__} does not run in ONNX Runtime ({first_line(error)}); measure it with "
            'runtime="torch".'
        ) from error


def _session(example: Example) -> TimedCall:
    import onnxruntime

    traced = _Traced(example).eval()
    names = [f"input{number}" for number in range(len(traced.inputs))]
    content = _exported(traced, names)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    used = {one.name for one in session.get_inputs()}
    given = {name: one.detach().cpu().numpy() for name, one in zip(names, traced.inputs, strict=True) if name in used}
    return lambda: session.run(None, given)


def _exported(traced: _Traced, names: Sequence[str]) -> bytes:
    """A file of ONNX. The exporter that traces is tried first; the newer one knows more, and is slower.

    Raises:
        ModelError: neither can export the module.
    """
    reason = ""
    for newer in (False, True):
        if newer and find_spec("onnxscript") is None:
            reason += "; with onnxscript another exporter is tried"
            break
        try:
            with TemporaryDirectory() as folder, _silent(), torch.no_grad(), _shared_heads_repeated():
                file = Path(folder) / "module.onnx"
                options: dict[str, Any] = {"verbose": False, "external_data": False} if newer else {}
                torch.onnx.export(traced, traced.inputs, str(file), dynamo=newer, input_names=names, **options)
                return file.read_bytes()
        except Exception as error:  # operators that an exporter does not know
            reason = reason or first_line(error)
    raise ModelError(
        f'{type(traced.module).__name__} cannot be exported to ONNX ({reason}); measure it with runtime="torch".'
    )


@contextmanager
def _silent() -> Iterator[None]:
    """Context of an export, without standard output: C++ prints the graph of a module that cannot be exported."""
    output = os.dup(1)
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        with silenced("torch.onnx"):
            yield
    finally:
        os.dup2(output, 1)
        os.close(output)
        os.close(nowhere)


@contextmanager
def _shared_heads_repeated() -> Iterator[None]:
    """Context in which attention repeats keys and values that several heads share: the exporter knows no other form."""
    plain = nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **named: Any
    ) -> Tensor:
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = (tensor.repeat_interleave(times, -3) for tensor in (key, value))
        return plain(query, key, value, *args, **named)

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = plain


def interleaved(calls: Sequence[TimedCall]) -> list[float]:
    """Median seconds of every call; the calls take turns, so that a change of the machine's speed meets all of them.

    With one thread these are seconds of that thread, which other programs do not change; otherwise wall seconds.
    """
    alone = torch.get_num_threads() == 1 and not torch.accelerator.is_available()
    now = time.thread_time if alone else time.perf_counter
    repeats, rounds = [], []
    for call in calls:
        call()  # the first call prepares kernels
        began = now()
        call()
        once = max(now() - began, 1e-7)
        repeats.append(max(1, round(_SLICE / once)))
        rounds.append(min(_ROUNDS[1], max(_ROUNDS[0], round(_SECONDS / (once * repeats[-1])))))
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(max(rounds)):
        for index, call in enumerate(calls):
            if number >= rounds[index]:
                continue
            began = now()
            for _ in range(repeats[index]):
                call()
            seconds[index].append((now() - began) / repeats[index])
    return [median(of_call) for of_call in seconds]
