"""A random Llama directory pruned block by block: peak memory against the prediction, seconds a block, where they go.

    python benchmarks/scale.py                             # 1.1 billion parameters, 2.2 GB, 16 x 512 tokens, "fast"
    python benchmarks/scale.py --model 1024 --layers 1     # other widths: 1024, 1.1b, 8b; any number of layers
    python benchmarks/scale.py --model 8b --device cuda --samples 128 --length 2048 --batch 4 [--budget default]
    python benchmarks/scale.py --recipe fast --set blocks.window=1 --layers 1     # a preset, with changed settings
    python benchmarks/scale.py --folder DIR --resume       # may be killed: the same command goes on, seconds are summed

The directory is made a tensor at a time, so that making it needs no memory either.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from scale_report import record

import iobs
from iobs.core.memory import resident
from iobs.core.patterns import Unstructured
from iobs.models.streamed import BlockWriter, StreamedModel, StreamedStore
from iobs.models.weights import Entry, ShardWriter
from iobs.pruning.calibration import replay as stream
from iobs.pruning.calibration.gram import Gram
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.layerwise import projection
from iobs.pruning.plan.curves import CurveSweep
from iobs.pruning.recipe import Recipe
from iobs.pruning.recipe.text import with_settings
from iobs.pruning.reconstruction.fits import Fits
from iobs.pruning.runtime.memory import MemoryWatch
from iobs.pruning.workspace import Request


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int


SHAPES = {
    "1024": Shape(1024, 2816, 22, 16, 4, 32000),
    "1.1b": Shape(2048, 5632, 22, 32, 4, 32000),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
}


def entries(shape: Shape, layers: int) -> dict[str, Entry]:
    width, hidden, keys = shape.width, shape.hidden, shape.width // shape.heads * shape.key_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, width)}
    for index in range(layers):
        block = f"model.layers.{index}."
        shapes |= {
            f"{block}self_attn.q_proj.weight": (width, width),
            f"{block}self_attn.k_proj.weight": (keys, width),
            f"{block}self_attn.v_proj.weight": (keys, width),
            f"{block}self_attn.o_proj.weight": (width, width),
            f"{block}mlp.gate_proj.weight": (hidden, width),
            f"{block}mlp.up_proj.weight": (hidden, width),
            f"{block}mlp.down_proj.weight": (width, hidden),
            f"{block}input_layernorm.weight": (width,),
            f"{block}post_attention_layernorm.weight": (width,),
        }
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (shape.vocabulary, width)}
    return {name: Entry(torch.bfloat16, size) for name, size in shapes.items()}


def make(folder: Path, shape: Shape, layers: int) -> None:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    described = entries(shape, layers)
    writer = ShardWriter(folder / "model.safetensors", described, {"format": "pt"})
    for name, entry in described.items():
        one = torch.ones(entry.shape) if len(entry.shape) == 1 else torch.randn(entry.shape, generator=generator) * 0.02
        writer.put(name, one.to(torch.bfloat16))
    writer.close()


_TOLD = (Fits.fit_window, Fits.fit_network)  # parts whose every call is printed


@dataclass
class Clock(iobs.Callback):
    """Seconds of every block, and of the parts of the work that it is told to time."""

    device: str
    kept: Path | None = None  # file that keeps what the run has taken so far, for a run that is killed
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peaks: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # bytes by phase; on a GPU allocated ones
    ends: dict[str, float] = field(default_factory=dict)  # by block, when its last layer was done
    began: float = 0.0
    phases: list[str] = field(default_factory=lambda: ["other"])  # the present phase, inside those around it

    def now(self) -> float:
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_start(self, model: object, layers: object, rounds: int) -> None:
        self.began = self.now()

    def on_note(self, text: str) -> None:
        print(f"{self.now() - self.began:8.1f} s  {text}", flush=True)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def used(self) -> int:
        """Bytes now: resident, or allocated on a GPU."""
        return torch.cuda.memory_allocated() if self.on_gpu else resident()

    def on_layer(self, entry: Any, round_index: int) -> None:
        elapsed = self.now() - self.began
        self.ends[entry.name.rsplit(".", 2)[0]] = elapsed
        print(f"{elapsed:8.1f} s  {entry.name}: {entry.seconds:.1f} s, {self.used() / 1e6:.0f} MB now", flush=True)
        self._keep(elapsed)

    def on_measure(self, task: str, done: int, total: int) -> None:
        elapsed = self.now() - self.began
        print(f"{elapsed:8.1f} s  {task}: {done} of {total}", flush=True)
        self._keep(elapsed)

    def _keep(self, elapsed: float) -> None:
        if self.kept is not None:
            part = {"seconds": elapsed, "processor": time.process_time(), "peak": max(self.peaks.values(), default=0)}
            self.kept.write_text(json.dumps(part))

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the functions that the work consists of; none of them is called by another."""
        with ExitStack() as stack:
            for owner, name, part in (
                (Gram, "add", "Gram products"),
                (stream.Stream, "run", "forward passes"),
                (projection, "solve_layer", "solves"),
                (projection, "solve_together", "solves"),
                (projection, "relative_output_error", "errors"),
                (StreamedModel, "load", "reading"),
                (BlockWriter, "block", "writing"),
                (Fits, "fit_window", "steps of blocks"),
                (Fits, "fit_network", "steps of the network"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name), part)))
            for owner, name, part in (
                (Sweep, "_statistics", "Grams"),
                (projection.Projection, "project", "solves"),
                (CurveSweep, "_damages", "allocation"),
                (Fits, "fit_window", "steps of blocks"),
                (Fits, "fit_network", "steps of the network"),
                (Gram, "add", "Grams: products"),
                (stream.Stream, "advance", "forward passes"),
                (projection, "solve_layer", "solves: solver"),
                (projection, "solve_together", "solves: solver"),
                (projection, "target_energy", "solves: errors"),
                (projection, "relative_output_error", "solves: errors"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._watched(getattr(owner, name), part)))
            if self.on_gpu:
                for name in ("enter", "leave"):
                    told = self._telling(getattr(StreamedStore, name), name)
                    stack.enter_context(mock.patch.object(StreamedStore, name, told))
                # The run's own peak is that since the last change of phase.
                whole = property(lambda watch: self.peak())
                stack.enter_context(mock.patch.object(MemoryWatch, "on_device", whole))
                torch.cuda.reset_peak_memory_stats()
                yield
                self.change()
                return
            ended = threading.Event()
            thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(ended.set)
            yield

    def _watch(self, ended: threading.Event) -> None:
        """On a CPU look at the memory every few milliseconds, and keep its largest value in the present phase."""
        while not ended.wait(0.005):
            self._seen(resident())

    def _seen(self, used: int) -> None:
        """Keep the peak of the present phase, and of the planned phase that it is a part of."""
        phase = self.phases[-1]
        for name in (phase, phase.partition(":")[0]):
            self.peaks[name] = max(self.peaks[name], used)

    def change(self, phase: str | None = None) -> None:
        """Begin a phase inside the present one, or end that (None). A GPU has the exact peak since the last change."""
        if self.on_gpu:
            self._seen(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        if phase is not None:
            self.phases.append(phase)
        elif len(self.phases) > 1:
            self.phases.pop()

    def peak(self) -> int:
        """Peak bytes of all phases so far; on a GPU of the present one too."""
        return max([torch.cuda.max_memory_allocated() if self.on_gpu else 0, *self.peaks.values()])

    def _watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            self.change(phase)
            try:
                return function(*args, **options)
            finally:
                self.change()

        return watched

    def _telling(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def telling(store: StreamedStore, stage: int) -> None:
            function(store, stage)
            print(f"{self.now() - self.began:8.1f} s  {name} {stage}: {self.used() / 1e6:.0f} MB now", flush=True)

        return telling

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = self.now()
            try:
                return function(*args, **options)
            finally:
                seconds = self.now() - began
                self.parts[part] += seconds
                if function in _TOLD:
                    print(f"{self.now() - self.began:8.1f} s  {part}: {seconds:.1f} s", flush=True)

        return timed


def recipe_of(name: str, solver: str, budget: str, settings: list[str]) -> Recipe:
    """The recipe of a run: a preset or the plain recipe, with a solver and changed fields."""
    recipe = Recipe() if name == "plain" else Recipe.preset(name)
    given = iobs.ADMM(budget) if solver == "admm" else solver  # type: ignore[arg-type]
    return with_settings(recipe.but(solver=given), dict(one.split("=", 1) for one in settings))


def described(options: argparse.Namespace) -> str:
    """The recipe of a run in words: the solver or its budget, and the preset with its changes."""
    solver = options.budget if options.solver == "admm" else options.solver
    return solver if options.recipe == "plain" else " ".join([solver, options.recipe, *options.set])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="1.1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--solver", default="admm")
    parser.add_argument("--budget", default="fast")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipe", default="plain", help="plain (one projection on its own outputs), or a preset")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of the recipe")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep a checkpoint in the folder, and go on from there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.model]
    layers = options.layers or shape.layers
    folder = options.folder or Path(tempfile.mkdtemp())
    if not (folder / "model").exists():
        make(folder / "model", shape, layers)
    shutil.rmtree(folder / "pruned", ignore_errors=True)
    earlier = [json.loads(one.read_text()) for one in folder.glob("part*.json")] if options.resume else []
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, shape.vocabulary, (options.samples, options.length), generator=generator)
    batches = [{"input_ids": rows} for rows in tokens.split(options.batch)]
    recipe = recipe_of(options.recipe, options.solver, options.budget, options.set)
    kept, checkpoint = (folder / f"part{len(earlier)}.json", folder / "checkpoint") if options.resume else (None, None)
    clock = Clock(options.device, kept)
    with (
        clock.timing(),
        StreamedStore.open(folder / "model", folder / "pruned", device=options.device) as store,
    ):
        pattern = Unstructured(0.5)
        patterns = dict.fromkeys(store.select(None, None, False).layers, pattern)
        planned = store.plan(Request(recipe, patterns, pattern, 0.0, 0, None), batches)
        kept = {} if not clock.on_gpu else {"allocated on the GPU": clock.used()}
        kept |= {"resident": resident(), f"planned for hidden states, {planned.streams}": planned.streams_bytes}
        print("before the run:", ", ".join(f"{size / 1e6:.0f} MB {name}" for name, size in kept.items()), flush=True)
        print(f"predicted: peak {planned.peak_bytes / 1e6:.0f} MB, {planned.seconds / 60:.1f} min", flush=True)
        report = iobs.prune(store, batches, 0.5, recipe, holdout=0.0, callbacks=[clock], checkpoint=checkpoint)
    for phase, size in sorted(clock.peaks.items()):
        foretold = f", planned {planned.peaks[phase] / 1e6:.0f} MB" if phase in planned.peaks else ""
        print(f"peak of {phase}: {size / 1e6:.0f} MB{foretold}", flush=True)
    on_device = clock.on_gpu
    peak = clock.peak() if on_device else report.peak_memory_bytes
    peak = max([peak, *(part["peak"] for part in earlier)])
    ends = [0.0, *clock.ends.values()]
    measured = {
        "width": shape.width,
        "layers": layers,
        "samples": options.samples,
        "length": options.length,
        "budget": described(options),
        "device": torch.cuda.get_device_name()
        if on_device
        else f"{options.threads} thread{'s' * (options.threads > 1)}",
        "model_mb": planned.model_bytes / 1e6,
        "peak_mb": peak / 1e6,
        "predicted_mb": planned.peak_bytes / 1e6,
        "peaks_mb": {phase: round(size / 1e6) for phase, size in clock.peaks.items()},
        "planned_peaks_mb": {phase: round(size / 1e6) for phase, size in planned.peaks.items()},
        "seconds": report.seconds + sum(part["seconds"] for part in earlier),
        "killed": len(earlier),
        "processor_seconds": time.process_time() + sum(part["processor"] for part in earlier),
        "predicted_seconds": planned.seconds,
        "sparsity": report.sparsity,
        "block_seconds": [after - before for before, after in itertools.pairwise(ends)],
        "parts": {part: seconds / layers for part, seconds in clock.parts.items()},
        "expected": "Planned: " + ", ".join(f"{name} {value:.0f} s" for name, value in planned.phases.items()) + ".",
    }
    print(json.dumps(measured, indent=1))
    work = f"{options.samples} x {options.length}, {measured['device']}"
    record("model", f"{options.model} {layers} {measured['budget']} {work}", **measured)


if __name__ == "__main__":
    main()
