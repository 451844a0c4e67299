"""Measurement of a model in several forms, each in a process of its own, so that its memory is its own."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from iobs.errors import ModelError
from iobs.report.running import RunningRow

if TYPE_CHECKING:
    from torch import Tensor

    from iobs.inference.choices import Precision
    from iobs.models import LoadedModel

DenseForm = Literal["float32", "bfloat16"]
Form = Literal["float32", "bfloat16", "stored"]
DENSE: tuple[DenseForm, ...] = ("float32", "bfloat16")
_MAC = sys.platform == "darwin"
_HIGH_WATER = Path("/proc/self/clear_refs")  # writing 5 sets the greatest memory of a process to its present memory


@dataclass(frozen=True)
class Workload:
    """Work that every form of a model does, so that their times compare.

    Args:
        model: directory or name of the model.
        tokens: new tokens of a text, or images, of one repetition.
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
    """The work that is measured; a call does it once.

    Attributes:
        run: generates a text, or computes images one by one.
        own_bytes: bytes that it keeps beside the tensors of the model.
    """

    run: Callable[[], Timing]
    own_bytes: int = 0

    def __call__(self) -> Timing:
        """Do the work, and return its speed."""
        return self.run()


@dataclass(frozen=True)
class Timing:
    """One repetition: units a second, and prompt tokens a second (None for images)."""

    speed: float
    prompt_speed: float | None


def measured(
    work: Workload, repetitions: int, on_progress: Callable[[str], object] = lambda _: None
) -> Iterator[RunningRow]:
    """Yield the dense forms and last the stored one. Repetitions take turns if memory holds all forms at once.

    Args:
        work: of one repetition.
        repetitions: number of repetitions of each form.
        on_progress: called with what comes next.

    Raises:
        ModelError: the model cannot be loaded, or has no known input.
        OutputError: the disk has too little room for the dense files of a packed model.
    """
    from iobs.models.bitmasks import unpacked
    from iobs.models.packed import is_packed

    with ExitStack() as stack:
        dense = work.model
        if is_packed(work.model):
            dense = str(stack.enter_context(unpacked(work.model)))
        forms: list[Form] = [*DENSE, "stored"]
        together = [forms] if _have_room(Path(dense)) else [[form] for form in forms]
        for group in together:
            yield from _measured_together(work, dense, group, repetitions, on_progress)


def _have_room(dense: Path) -> bool:
    """Check that main memory holds all forms of a model at once; True where the size or the memory is not known."""
    import torch

    from iobs.core.files import weight_files
    from iobs.models.weights import read_entries
    from iobs.pruning.runtime.memory import available

    files = weight_files(dense) if dense.is_dir() else []
    entries = [entry for file in files for entry in read_entries(file)[0].values()]
    weights = sum(entry.bytes // entry.dtype.itemsize for entry in entries)
    free, sizes = available(), [getattr(torch, form).itemsize for form in (*DENSE, DENSE[-1])]
    return not free or weights * sum(sizes) <= free


def _measured_together(
    work: Workload, dense: str, forms: Sequence[Form], repetitions: int, on_progress: Callable[[str], object]
) -> Iterator[RunningRow]:
    """Yield the rows of forms that are in memory at the same time, and whose repetitions take turns."""
    with ExitStack() as stack:
        pools = {form: stack.enter_context(_process()) for form in forms}
        names = {form: f"dense {form}" if form in DENSE else "iobs" for form in pools}
        sizes: dict[str, dict[str, int]] = {}
        for form, pool in pools.items():
            on_progress(f"loading {names[form]}")
            made = pool.submit(_prepare, work, dense if form in DENSE else work.model, form).result()
            names[form], sizes[form] = made
        timings: dict[str, list[Timing]] = {form: [] for form in pools}
        for number in range(repetitions):
            for form, pool in pools.items():
                on_progress(f"running {names[form]}, {number + 1} of {repetitions}")
                timings[form].append(pool.submit(_repeat).result())
        for form, pool in pools.items():
            peak: Future[int | None] = pool.submit(_peak)
            prompts = [one.prompt_speed for one in timings[form] if one.prompt_speed is not None]
            yield RunningRow(
                names[form],
                statistics.median(one.speed for one in timings[form]),
                "tokens/s" if prompts else "images/s",
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
        for one in multiprocessing.active_children():
            if one not in others:
                one.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_prepared: list[Callable[[], Timing]] = []  # of a process that measures: its repetition


def _prepare(work: Workload, model: str, form: str) -> tuple[str, dict[str, int]]:
    """Load the model in a form, run it once, and return the name of the form and the bytes that it holds, by kind."""
    import torch

    from iobs.cli.loading import use_threads
    from iobs.inference import accelerate
    from iobs.inference.storing import bytes_held, precision_of
    from iobs.models import load
    from iobs.models.packed import is_packed, open_packed
    from iobs.pruning.runtime.memory import give_back

    if work.threads is not None:
        torch.set_num_threads(work.threads)
    if is_packed(model):
        loaded = open_packed(model, trust_remote_code=work.trust_remote_code)
    else:
        dtype = getattr(torch, form) if form in DENSE else None
        loaded = load(model, dtype=dtype, trust_remote_code=work.trust_remote_code)
    example = None if loaded.task == "causal-lm" else image_of(loaded, work)
    kept = precision_of(loaded.module)
    if kept is not None:
        work = replace(work, precision=kept)
        use_threads(loaded.module, work.threads)
    elif form not in DENSE:
        accelerate(loaded.module, example, precision=work.precision, threads=work.threads)
    repeat = repetition(loaded, work, form not in DENSE)
    repeat()
    if work.threads is None:
        fastest_threads(repeat)
    give_back()  # memory of the dense layers that are gone
    if _HIGH_WATER.exists():
        _HIGH_WATER.write_text("5", encoding="ascii")
    _prepared.append(repeat)
    held = {**bytes_held(loaded.module), "copies": repeat.own_bytes}
    return f"dense {form}" if form in DENSE else f"iobs {work.precision}", held


def fastest_threads(repeat: Callable[[], Timing]) -> int:
    """Set torch to all threads or to one, and return the number with the faster repetition.

    A small model, or a busy machine, is slower with all threads: every operation then waits for the last of them.
    """
    import torch

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


def repetition(loaded: LoadedModel, work: Workload, stored: bool) -> Repetition:
    """The work of a loaded model."""
    import torch

    from iobs.inference.decodable import most_tokens, undecodable
    from iobs.inference.decoder import Decoder
    from iobs.inference.fused import FusedForward
    from iobs.inference.generation import generated

    if loaded.task != "causal-lm":
        image = image_of(loaded, work)

        def classify() -> Timing:
            started = time.perf_counter()
            with torch.no_grad():
                for _ in range(work.tokens):
                    loaded.module(image)
            return Timing(work.tokens / (time.perf_counter() - started), None)

        return Repetition(classify)
    length = min(work.prompt, (loaded.context or 1 << 30) - work.tokens)
    if length < 1:
        raise ModelError(f"{work.model} reads {loaded.context} tokens, fewer than the {work.tokens} new ones.")
    vocabulary: int = loaded.module.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    decoder = None
    fuses = stored and (work.threads or 1) == 1 and undecodable(loaded.module) is None
    if fuses and length + work.tokens <= most_tokens(loaded.module):
        decoder = Decoder(loaded.module, length + work.tokens, "bf16" if work.precision == "bf16" else "int8")

    def generate() -> Timing:
        started = time.perf_counter()
        made = generated(loaded.module, ids, work.tokens) if decoder is None else decoder.generate(ids, work.tokens)
        next(made)
        first = time.perf_counter()
        count = sum(1 for _ in made)
        return Timing(count / (time.perf_counter() - first), length / (first - started))

    forward = vars(loaded.module).get("forward")
    if decoder is None and isinstance(forward, FusedForward):
        # The first tokens of a text beyond the window take the step.
        return Repetition(generate, forward.own_bytes(length))
    return Repetition(generate, 0 if decoder is None else decoder.own_bytes)


def image_of(loaded: LoadedModel, work: Workload) -> Tensor:
    """A random image of the shape that the model or the user says.

    Raises:
        ModelError: neither says a shape.
    """
    import torch

    described = getattr(loaded.module, "default_cfg", None) or {}
    shape = work.shape or described.get("input_size")
    config: object = getattr(loaded.module, "config", None)
    side = getattr(config, "image_size", None)
    if shape is None and isinstance(side, int):
        shape = (getattr(config, "num_channels", 3), side, side)
    if shape is None:
        raise ModelError(f"{work.model} does not say the shape of its input; give it: --shape 3,224,224.")
    dtype = next(loaded.module.parameters()).dtype
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
