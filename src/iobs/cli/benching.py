"""Measurement of a model in several forms, each in its own process with its own memory, or beside another model."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from iobs.cli.loading import use_threads
from iobs.core.files import weight_files
from iobs.core.memory import available
from iobs.core.structured import Runtime, require_known_runtime
from iobs.errors import ModelError, first_line
from iobs.inference import accelerate
from iobs.inference.choices import Precision, called
from iobs.inference.decodable import most_tokens, undecodable
from iobs.inference.decoder import Decoder, generated
from iobs.inference.fused import FusedForward
from iobs.inference.storing import bytes_held, precision_of
from iobs.models import LoadedModel, load
from iobs.models.packed import is_ready_to_run, open_packed, packed_precision
from iobs.models.packed_files import dense_entries, unpacked
from iobs.pruning.runtime.memory import give_back
from iobs.pruning.widths.latency import NAMES, require_runtime, shares_of
from iobs.report.comparisons import BesideRow, RunningRow

DenseForm = Literal["float32", "bfloat16"]
Form = Literal["float32", "bfloat16", "filled", "stored"]
DENSE: tuple[DenseForm, ...] = ("float32", "bfloat16")
_MAC = sys.platform == "darwin"
_HIGH_WATER = Path("/proc/self/clear_refs")  # writing 5 sets the greatest memory of a process to its present memory


@dataclass(frozen=True)
class Workload:
    """Work that every form of a model does, so that their times compare.

    Args:
        model: directory or name of the model.
        tokens: new tokens of a text, or images or texts for an encoder, of one repetition.
        prompt: tokens of the prompt.
        shape: shape of one image; None: as the model says.
        precision: the fewest bits of a weight of the stored form.
        threads: threads; None: one for the compiled step, and for the others the faster of all threads and one.
        trust_remote_code: also run code that comes with the weights.
    """

    model: str
    tokens: int
    prompt: int
    shape: tuple[int, ...] | None
    precision: Precision
    threads: int | None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Repetition:
    """The work that is measured.

    Attributes:
        run: generates a text, or computes images or texts one by one, and returns the speed.
        own_bytes: bytes that it keeps beside the tensors of the model.
    """

    run: Callable[[], Timing]
    own_bytes: int = 0


@dataclass(frozen=True)
class Timing:
    """One repetition: its unit, units a second, and prompt tokens a second where a text is generated, or None."""

    unit: str
    speed: float
    prompt_speed: float | None = None


def measure_forms(
    workload: Workload, repetitions: int, on_progress: Callable[[str], object] = lambda _: None
) -> Iterator[RunningRow]:
    """Yield the dense forms and last the stored one. Repetitions take turns if memory holds all forms at once.

    The last dense form is stored in the same way, with numbers in the place of the zeros: what it gains over the other
    dense forms, zeros have not given.

    Args:
        workload: of one repetition.
        repetitions: number of repetitions of each form.
        on_progress: called with what comes next.

    Raises:
        ModelError: the model cannot be loaded, or has no known input.
        OutputError: the disk has too little room for the dense files of a packed model.
    """
    with ExitStack() as stack:
        dense = workload.model
        workload = replace(workload, precision=packed_precision(dense) or workload.precision)
        if is_ready_to_run(dense):
            dense = str(stack.enter_context(unpacked(dense)))
        forms: list[Form] = [*DENSE, "filled", "stored"]
        together = [forms] if _have_room(Path(dense)) else [[form] for form in forms]
        for group in together:
            yield from _measure_together(workload, dense, group, repetitions, on_progress)


def _have_room(dense: Path) -> bool:
    """Check that main memory holds all forms of a model at once; True where the size or the memory is not known."""

    files = weight_files(dense) if dense.is_dir() else []
    entries = [entry for file in files for entry in dense_entries(file).values()]
    weights = sum(entry.bytes // entry.dtype.itemsize for entry in entries)
    free, sizes = available(), [getattr(torch, form).itemsize for form in (*DENSE, DENSE[-1], DENSE[-1])]
    return not free or weights * sum(sizes) <= free


def _measure_together(
    workload: Workload, dense: str, forms: Sequence[Form], repetitions: int, on_progress: Callable[[str], object]
) -> Iterator[RunningRow]:
    """Yield the rows of forms that are in memory at the same time, and whose repetitions take turns."""
    with ExitStack() as stack:
        pools = {form: stack.enter_context(_process()) for form in forms}
        names = {form: "iobs" if form == "stored" else f"dense {form}" for form in pools}
        sizes: dict[str, dict[str, int]] = {}
        for form, pool in pools.items():
            on_progress(f"loading {names[form]}")
            prepared = pool.submit(_prepare, workload, workload.model if form == "stored" else dense, form)
            names[form], sizes[form] = prepared.result()
        timings: dict[str, list[Timing]] = {form: [] for form in pools}
        for number in range(repetitions):
            for form, pool in pools.items():
                on_progress(f"running {names[form]}, {number + 1} of {repetitions}")
                timings[form].append(pool.submit(_repeat).result())
        for form, pool in pools.items():
            peak: Future[int | None] = pool.submit(_peak)
            prompts = [timing.prompt_speed for timing in timings[form] if timing.prompt_speed is not None]
            yield RunningRow(
                names[form],
                statistics.median(timing.speed for timing in timings[form]),
                timings[form][0].unit,
                statistics.median(prompts) if prompts else None,
                sizes[form],
                peak.result(),
            )


@contextmanager
def _process() -> Iterator[ProcessPoolExecutor]:
    """A process that keeps its model between calls. Ctrl-C is left to this process, which ends the other one."""
    others = multiprocessing.active_children()
    context, ignored = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=signal.signal, initargs=ignored)
    try:
        yield pool
    except BaseException:  # its present repetition may take minutes
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_prepared: list[Callable[[], Timing]] = []  # of a process that measures: its repetition


def _prepare(workload: Workload, model: str, form: str) -> tuple[str, dict[str, int]]:
    """Load the model in a form, run it once, and return the name of the form and the bytes that it holds, by kind."""

    if workload.threads is not None:
        torch.set_num_threads(workload.threads)
    if is_ready_to_run(model):
        loaded = open_packed(model, trust_remote_code=workload.trust_remote_code)
    else:
        dtype = getattr(torch, form) if form in DENSE else None
        loaded = load(model, dtype=dtype, trust_remote_code=workload.trust_remote_code)
    example = None if loaded.task == "causal-lm" else accepted_input(loaded, workload)
    packed_precision = precision_of(loaded.module)
    if packed_precision is not None:
        workload = replace(workload, precision=packed_precision)
        use_threads(loaded.module, workload.threads)
    elif form not in DENSE:
        if form == "filled":
            fill_zeros(loaded.module)
        accelerate(loaded.module, example, precision=workload.precision, threads=workload.threads)
    repeat = repetition(loaded, workload, form not in DENSE)
    repeat.run()
    if workload.threads is None:
        fastest_threads(repeat.run)
    give_back()  # memory of the dense layers that are gone
    if _HIGH_WATER.exists():
        _HIGH_WATER.write_text("5", encoding="ascii")
    _prepared.append(repeat.run)
    held = {**bytes_held(loaded.module), "copies": repeat.own_bytes}
    names = {"stored": f"iobs {workload.precision}", "filled": f"dense {workload.precision}"}
    return names.get(form, f"dense {form}"), held


def fill_zeros(module: nn.Module) -> None:
    """Replace the zeros of matrices by their least other magnitude: forms without zeros have the speed of any."""
    for weight in module.parameters():
        if weight.ndim > 1 and (weight != 0).any():
            weight.data[weight == 0] = weight.data[weight != 0].abs().min()


def fastest_threads(repeat: Callable[[], Timing]) -> int:
    """Set torch to all threads or to one, and return the number with the faster repetition.

    A small model, or a busy machine, is slower with all threads: every operation then waits for the last of them.
    """
    speeds = {}
    for threads in sorted({torch.get_num_threads(), 1}):
        torch.set_num_threads(threads)
        speeds[threads] = repeat().speed
    chosen = max(speeds, key=lambda threads: speeds[threads])
    torch.set_num_threads(chosen)
    return chosen


def _repeat() -> Timing:
    return _prepared[0]()


def _peak() -> int | None:
    """The greatest memory of this process since it was prepared; None where the system does not tell."""
    if _HIGH_WATER.exists():
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    if not _MAC:
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def repetition(loaded: LoadedModel, workload: Workload, stored: bool) -> Repetition:
    """The work of a loaded model."""

    if loaded.task != "causal-lm":
        sample = input_of(loaded, workload)
        unit = "texts/s" if isinstance(sample, dict) else "images/s"

        def compute() -> Timing:
            started = time.perf_counter()
            with torch.no_grad():
                for _ in range(workload.tokens):
                    called(loaded.module, sample)
            return Timing(unit, workload.tokens / (time.perf_counter() - started))

        return Repetition(compute)
    length = min(workload.prompt, (loaded.context or 1 << 30) - workload.tokens)
    if length < 1:
        raise ModelError(f"{workload.model} reads {loaded.context} tokens, fewer than the {workload.tokens} new ones.")
    vocabulary: int = loaded.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    decoder = None
    fuses = stored and (workload.threads or 1) == 1 and undecodable(loaded.module) is None
    if fuses and length + workload.tokens <= most_tokens(loaded.module):
        decoder = Decoder(loaded.module, length + workload.tokens, "bf16" if workload.precision == "bf16" else "int8")

    def generate() -> Timing:
        started = time.perf_counter()
        count = workload.tokens
        tokens = generated(loaded.module, ids, count) if decoder is None else decoder.generate(ids, count)
        next(tokens)
        first = time.perf_counter()
        count = sum(1 for _ in tokens)
        return Timing("tokens/s", count / (time.perf_counter() - first), length / (first - started))

    forward = vars(loaded.module).get("forward")
    if decoder is None and isinstance(forward, FusedForward):
        # The first tokens of a text beyond the window take the step.
        return Repetition(generate, forward.own_bytes(length))
    return Repetition(generate, 0 if decoder is None else decoder.own_bytes)


@torch.no_grad()
def accepted_input(loaded: LoadedModel, workload: Workload) -> Tensor | dict[str, Tensor]:
    """The sample of `input_of`, which the model takes.

    Raises:
        ModelError: it does not, as a model of text that needs more than token ids.
    """
    sample = input_of(loaded, workload)
    try:
        called(loaded.module, sample)
    except Exception as error:  # models refuse inputs in any way
        kind = "token ids alone" if isinstance(sample, dict) else f"pictures of the shape {tuple(sample.shape[1:])}"
        raise ModelError(f"{workload.model} does not take {kind}, and is not timed: {first_line(error)}") from error
    return sample


def image_of(loaded: LoadedModel, workload: Workload) -> Tensor:
    """A random image of the shape that the model or the user says.

    Raises:
        ModelError: neither says a shape.
    """
    described = getattr(loaded.module, "default_cfg", None) or {}
    shape = workload.shape or described.get("input_size")
    config: object = getattr(loaded.module, "config", None)
    side = getattr(config, "image_size", None)
    if shape is None and isinstance(side, int):
        shape = (getattr(config, "num_channels", 3), side, side)
    if shape is None:
        raise ModelError(
            f"{workload.model} is no model of text and does not say the shape of its pictures; give it: "
            "--shape 3,224,224."
        )
    dtype = next(loaded.module.parameters()).dtype
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def runtimes_of(name: str | None) -> tuple[Runtime, ...]:
    """The runtimes to measure: the named one, otherwise torch, and ONNX Runtime where it is installed.

    Raises:
        ProblemError: the runtime is unknown or not installed.
    """
    if name is None:
        installed = all(find_spec(module) is not None for module in ("onnx", "onnxruntime"))
        return ("torch", "onnx") if installed else ("torch",)
    runtime = require_known_runtime(name)
    require_runtime(runtime)
    return (runtime,)


def measure_beside(
    workload: Workload,
    beside: str,
    runtimes: tuple[Runtime, ...],
    on_progress: Callable[[str], object] = lambda _: None,
) -> list[BesideRow]:
    """One row a runtime, in float32; the two models take turns on one input.

    Args:
        workload: the model, and the prompt or the shape of its input.
        beside: the other model.
        runtimes: to measure.
        on_progress: called with what comes next.

    Raises:
        ModelError: a model cannot be loaded, or does not take the input, or no runtime can run both.
    """

    if workload.threads is not None:
        torch.set_num_threads(workload.threads)
    models = []
    for name in (beside, workload.model):
        on_progress(f"loading {name}")
        models.append(load(name, dtype=torch.float32, trust_remote_code=workload.trust_remote_code))
    before, after = (loaded.module for loaded in models)
    entries = [sum(value.numel() for value in module.parameters()) for module in (before, after)]
    sample = input_of(models[1], workload)
    rows, reasons = [], []
    for runtime in runtimes:
        on_progress(f"running both in {NAMES[runtime]}")
        try:
            seconds = shares_of(before, after, sample, runtime)
        except Exception as error:  # of any runtime, and of a model that does not take the input
            reasons.append(f"{NAMES[runtime]}: {first_line(error)}")
            continue
        rows.append(BesideRow(beside, workload.model, NAMES[runtime], *seconds, entries[0], entries[1]))
    if not rows:
        raise ModelError(f"{beside} and {workload.model} could not be compared. {'; '.join(reasons)}")
    for reason in reasons:
        on_progress(f"not measured in {reason}")
    return rows


def input_of(loaded: LoadedModel, workload: Workload) -> Tensor | dict[str, Tensor]:
    """One sample: a prompt for a model of text, otherwise an image of the shape that the model or the user says.

    Raises:
        ModelError: neither says a shape.
    """
    embeddings = getattr(loaded.module, "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embeddings, "num_embeddings", None)
    if workload.shape is not None or vocabulary is None:
        return image_of(loaded, workload)
    length = min(workload.prompt, loaded.context or workload.prompt)
    return {"input_ids": torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))}
