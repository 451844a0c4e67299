"""Check and time iobs on a device, and predict the run of an 8-billion-parameter model.

    python benchmarks/check_gpu.py [--device cuda] [--out iobs_check]

It takes under ten minutes. It compares the results of the device with those of the CPU, and times the kernels and one
block. It writes OUT.json and OUT.txt, which can be attached to a report. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from check_results import CLOSE, Check, failed, network_checks, solver_checks, tried
from torch import Tensor, nn

import iobs
from iobs.core.linalg import masked_conjugate_gradients, shifted_inverse
from iobs.core.modes import full_precision
from iobs.core.outputs import make_folder
from iobs.core.patterns import NM, Unstructured
from iobs.core.quadratic import Quadratic
from iobs.errors import IOBSError, ProblemError, is_out_of_memory
from iobs.inference import gpu
from iobs.pruning.cost.machines import Machine, Network, Rates, need
from iobs.pruning.cost.work import solver_cost
from iobs.pruning.network.layers import Layer
from iobs.pruning.recipe import LayerSettings, Recipe
from iobs.solvers.kernels.project import project

_PRODUCTS = 20  # repetitions of a product with zeros
_TIMED = 3  # repetitions of a timing; the median counts
_BLOCKS, _SAMPLES, _LENGTH = 32, 128, 2048  # of the predicted run
_BLOCK_8B = (
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),
    *((14336, 4096), (14336, 4096), (4096, 14336)),
)  # rows and columns
_VOCABULARY_8B = 128256
_OUTSIDE_8B = 2 * _VOCABULARY_8B * 4096
_SHRUNK = 16  # factor by which the block is narrower on a CPU


@dataclass(frozen=True)
class Timing:
    """Median seconds of a task, and its operations or bytes per second."""

    name: str
    seconds: float
    rate: float
    unit: str = "FLOP/s"


@dataclass
class Findings:
    """Machine, checks and timings of one run, as they are written.

    Attributes:
        machine: names and versions.
        checks: comparisons with the CPU.
        timings: of kernels and of one block.
        predicted: seconds by phase of the predicted run, by recipe.
        notes: what was left out, and why.
    """

    machine: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The findings as text."""
        yield from (f"{name}: {value}" for name, value in self.machine.items())
        yield ""
        yield from (f"{'ok    ' if one.passed else 'DIFFERS'} {one.name}: {one.detail}" for one in self.checks)
        yield ""
        yield from (f"{one.name}: {one.seconds:.4g} s, {one.rate:.3g} {one.unit}" for one in self.timings)
        for name, found in self.predicted.items():
            parts = ", ".join(f"{phase} {seconds / 60:.1f} min" for phase, seconds in found.items())
            yield f"predicted for 8 billion parameters, {name}: {sum(found.values()) / 60:.0f} min ({parts})"
        yield from self.notes


@full_precision()
def run(device: torch.device) -> Findings:
    """Make all checks and timings on a device, in the precision of a run."""
    found = Findings(_machine(device))
    found.checks += [*solver_checks(device), *network_checks(device)]
    shrink = _SHRUNK if device.type == "cpu" else 1
    rates, error = tried(lambda: timed_block(device, shrink, found))
    if error is not None and is_out_of_memory(error):
        found.notes.append("One block of 8 billion parameters does not fit; it was timed at half its width.")
        found.timings.clear()
        error = None  # its traceback holds the tensors
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rates, error = tried(lambda: timed_block(device, 2 * shrink, found))
    if error is not None:
        found.checks.append(failed("times of one block", error))
    if device.type == "cuda":
        _, error = tried(lambda: sparse_products(device, _BLOCK_8B[0][1], found))
        found.checks += [] if error is None else [failed("products with zeros", error)]
    else:
        found.notes.append("Products with zeros left out were not run: iobs.accelerate has other forms on a CPU.")
    if rates is not None:
        found.predicted |= predictions(rates)
    return found


def predictions(rates: Rates) -> dict[str, dict[str, float]]:
    """Seconds by phase of pruning a model of 8 billion parameters from files, by recipe."""
    layers = [Layer(f"{block}.{place}", shape) for block in range(_BLOCKS) for place, shape in enumerate(_BLOCK_8B)]
    block = sum(rows * columns for rows, columns in _BLOCK_8B)
    weights = _BLOCKS * block + _OUTSIDE_8B
    network = Network(layers, block, _OUTSIDE_8B, weights, _VOCABULARY_8B, width=_BLOCK_8B[0][1], blocks=_BLOCKS)
    machine, held = Machine("this one", 0, rates), {"one-shot": 0.0, "fast": 0.1, "best": 0.1}
    return {
        name: need(network, Recipe.preset(name), _SAMPLES, _LENGTH, 1, machine, share).phases
        for name, share in held.items()
    }


def _machine(device: torch.device) -> dict[str, str]:
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    name = platform.processor() or platform.machine() if gpu is None else f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB"
    return {"device": str(device), "name": name, "torch": torch.__version__, "iobs": iobs.__version__}


# ---- times
def timed_block(device: torch.device, shrink: int, found: Findings) -> Rates:
    """Time the kernels and one block whose sides are divided by `shrink`; returns the measured rates."""
    shapes = [(rows // shrink, columns // shrink) for rows, columns in _BLOCK_8B]
    wide, narrow = shapes[-1], shapes[0]
    clock = Clock(device)
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(rows, columns, generator=generator).to(device, dtype)

    side, rates = wide[1], {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        factor = drawn(side, narrow[1], dtype)
        product = partial(torch.matmul, factor, factor.T)
        timing = clock.timed(f"product in {str(dtype)[6:]}", 2.0 * side * side * narrow[1], product)
        rates[dtype] = timing.rate
        found.timings.append(timing)
    total, part = (drawn(side, side, dtype) for dtype in (torch.float64, torch.float32))
    summed = clock.timed("sum in float64", 20.0 * side**2, lambda: total.add_(part), "B/s")
    found.timings.append(summed)
    moved = torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copied = clock.timed("copy from main memory", moved.numel(), lambda: moved.to(device, copy=True), "B/s")
    found.timings.append(copied)
    kernel_times(narrow, clock, drawn, found)
    solve, operations = 0.0, 0.0
    settings = LayerSettings("admm")
    for shape in dict.fromkeys(shapes):
        rows, columns = shape
        weight, inputs = drawn(rows, columns), drawn(2 * columns, columns)
        taken = solver_cost(settings, rows, columns).operations
        problem = Quadratic.at(weight, inputs.T @ inputs)
        count = shapes.count(shape)
        one_solve = clock.timed(
            f"solve {rows} x {columns}, ADMM 50 %",
            taken,
            partial(iobs.solve, problem, Unstructured(0.5), "admm", damping=0.01),
            repeat=1,
        )
        found.timings.append(one_solve)
        solve, operations = solve + count * one_solve.seconds, operations + count * taken
        del problem, inputs
    step = timed_step(shapes, device, clock)
    found.timings.append(step)
    if shrink > 1:
        found.notes.append(f"The block was timed with its sides divided by {shrink}; rates are assumed to be the same.")
    inner = rates[torch.bfloat16] if device.type == "cuda" else None
    return Rates(step.rate, operations / solve, copied.rate, rates[torch.float64], summed.rate, inner)


def kernel_times(shape: tuple[int, int], clock: Clock, drawn: Callable[[int, int], Tensor], found: Findings) -> None:
    """Time the kernels of the solvers on one layer."""
    rows, columns = shape
    inputs, weight = drawn(2 * columns, columns), drawn(rows, columns)
    hessian = (inputs.T @ inputs).contiguous()
    shift = float(hessian.diagonal().mean())
    pattern = Unstructured(0.5).groups(shape)
    mask = weight.abs() > weight.abs().median()
    linear = (weight @ hessian).contiguous()
    tasks: dict[str, tuple[float, Callable[[], object]]] = {
        "Gram": (2.0 * inputs.numel() * columns, lambda: inputs.T @ inputs),
        "inverse": (2.0 * columns**3, lambda: shifted_inverse(hessian, shift)),
        "projection": (
            10.0 * rows * columns,
            lambda: project(weight.clone(), weight.clone(), mask.clone(), linear, pattern, shift, 1.4),
        ),
        "conjugate gradients": (
            6 * 2.0 * rows * columns**2,
            lambda: masked_conjugate_gradients(hessian, linear, mask, weight * mask, iterations=6),
        ),
        "SparseGPT": (
            2.0 * rows * columns**2,
            lambda: iobs.solve(Quadratic.at(weight, hessian), NM(2, 4), "sparsegpt", damping=0.01),
        ),
    }
    for name, (operations, task) in tasks.items():
        found.timings.append(clock.timed(name, operations, task))


@torch.no_grad()
def sparse_products(device: torch.device, side: int, found: Findings) -> None:
    """Compare and time the form of `iobs.accelerate` on a GPU, in bfloat16: one token and 1,024 tokens."""
    clock, generator = Clock(device), torch.Generator().manual_seed(0)
    for pattern in (NM(2, 4), Unstructured(0.5), Unstructured(0.7), Unstructured(0.9)):
        weight = torch.randn(side, side, generator=generator) / side**0.5
        weight = iobs.solve(Quadratic.at(weight, torch.eye(side)), pattern, "magnitude").weight
        layer = nn.Linear(side, side, bias=False)
        layer.weight.data = weight
        layer.to(device, torch.bfloat16)
        make, note = gpu.form_of(layer)
        for tokens in (1, 1024):
            given = torch.randn(tokens, side, generator=generator).to(device, torch.bfloat16)
            form, more = (None, "") if make is None else gpu.usable(make, given)
            notes = [f"{pattern}: {text}." for text in (note, more) if text]
            found.notes += [text for text in notes if text not in found.notes]
            wanted = layer(given).float()
            for name, each in {"dense": layer, **({} if form is None else {gpu.OFFSETS: form})}.items():
                title = f"{name} product of {pattern}, {side} x {side}, {tokens} token(s)"
                apart = float((each(given).float() - wanted).norm() / wanted.norm())
                found.checks += [Check(title, apart <= CLOSE, f"{apart:.1e} from dense")] if name != "dense" else []
                found.timings.append(clock.timed(title, 2.0 * tokens * side**2, partial(each, given), repeat=_PRODUCTS))


def timed_step(shapes: list[tuple[int, int]], device: torch.device, clock: Clock) -> Timing:
    """Time a gradient step of a gated perceptron and four projections, with the shapes of a block, in 1,024 tokens."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    query, key, value, output, gate, up, down = (
        torch.randn(rows, columns, device=device, dtype=dtype).div_(columns**0.5).requires_grad_()
        for rows, columns in shapes
    )
    hidden = torch.randn(1024, shapes[0][1], device=device, dtype=dtype)

    def step() -> None:
        mixed = (hidden @ query.T) * (hidden @ key.T).repeat(1, 4) + (hidden @ value.T).repeat(1, 4)
        state = hidden + mixed @ output.T
        state = state + (torch.nn.functional.silu(state @ gate.T) * (state @ up.T)) @ down.T
        torch.autograd.grad(state.square().mean(), [query, key, value, output, gate, up, down])

    return clock.timed("gradient step of a block", 6.0 * 1024 * sum(rows * columns for rows, columns in shapes), step)


class Clock:
    """Times tasks on a device, and waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def timed(
        self, name: str, amount: float, task: Callable[[], object], unit: str = "FLOP/s", repeat: int = _TIMED
    ) -> Timing:
        """The median time of a task after one untimed call; `amount` is its operations or bytes."""
        task()
        found = [self._once(task) for _ in range(repeat)]
        seconds = statistics.median(found)
        return Timing(name, seconds, amount / seconds, unit)

    def _once(self, task: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        task()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, print and write the findings; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python benchmarks/check_gpu.py", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("iobs_check"), help="files OUT.json and OUT.txt")
    given = parser.parse_args(arguments)
    try:
        try:
            device = torch.empty(1, device=given.device).device
        except (RuntimeError, AssertionError) as error:
            raise ProblemError(f"The device {given.device} cannot be used ({error}); give --device cpu.") from error
        make_folder(given.out.parent)
        found = run(device)
    except IOBSError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    text = "\n".join(found.lines()) + "\n"
    sys.stdout.write(text)
    for suffix, content in {"json": json.dumps(asdict(found), indent=1), "txt": text}.items():
        given.out.with_name(f"{given.out.name}.{suffix}").write_text(content, encoding="utf8")
    return 0 if all(one.passed for one in found.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
