"""Check and time iobs on a device, and predict the run of an 8-billion-parameter model.

    python -m iobs.check_gpu [--device cuda] [--out iobs_check]

It takes under ten minutes. It verifies that the device gives the results of the CPU, times the kernels and one block,
and writes OUT.json and OUT.txt, which can be attached to a report. The exit status is 1 if a result differs.
"""

from __future__ import annotations

import argparse
import copy
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
from torch import Tensor, nn

import iobs
from iobs.core.patterns import NM, Grid, Pattern, Unstructured
from iobs.core.quadratic import Quadratic
from iobs.errors import IOBSError, ProblemError, is_out_of_memory
from iobs.inference import gpu
from iobs.pruning.cost.phases import Rates, Shape, Work, phases, solve_operations
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.solvers import SOLVERS
from iobs.solvers.kernels.conjugate import improve_weights
from iobs.solvers.kernels.inverse import shifted_inverse
from iobs.solvers.kernels.project import project

_CLOSE = 0.01  # relative difference of errors; ADMM searches in float32, where near ties may fall either way
_MASKS = 0.97  # share of equal mask entries of two pruned networks; near ties may fall either way
_LOSS = 0.05  # relative difference of their losses
_PRODUCTS = 20  # repetitions of a product with zeros
_TIMED = 3  # repetitions of a timing; the median counts
_BLOCKS, _SAMPLES, _LENGTH = 32, 128, 2048  # of the predicted run
_BLOCK_8B = (
    *(Shape(4096, 4096), Shape(1024, 4096), Shape(1024, 4096), Shape(4096, 4096)),
    *(Shape(14336, 4096), Shape(14336, 4096), Shape(4096, 14336)),
)
_OUTSIDE_8B = 2 * 128256 * 4096
_SHRUNK = 16  # factor by which the block is narrower on a CPU


@dataclass(frozen=True)
class Check:
    """A comparison with the CPU."""

    name: str
    passed: bool
    detail: str


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


def run(device: torch.device) -> Findings:
    """Make all checks and timings on a device."""
    found = Findings(_machine(device))
    found.checks += [*solver_checks(device), *network_checks(device)]
    shrink = _SHRUNK if device.type == "cpu" else 1
    try:
        rates = timed_block(device, shrink, found)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found.notes.append("One block of 8 billion parameters does not fit; it was timed at half its width.")
        torch.cuda.empty_cache()
        rates = timed_block(device, 2, found)
    if device.type == "cuda":
        sparse_products(device, torch.cuda.get_device_capability(device), _BLOCK_8B[0].columns, found)
    else:
        found.notes.append("Products with zeros left out were not run: iobs.accelerate has other forms on a CPU.")
    weights = _BLOCKS * sum(shape.weights for shape in _BLOCK_8B) + _OUTSIDE_8B
    work = Work(_BLOCK_8B * _BLOCKS, _SAMPLES * _LENGTH, 2 * weights)
    blocks = Recipe.preset("one-shot").but(target="residual", blocks=BlockFit(network_steps=300))
    for name, recipe in {"one-shot": Recipe.preset("one-shot"), "blocks and 300 network steps": blocks}.items():
        found.predicted[name] = phases(work, recipe, rates)
    return found


def _machine(device: torch.device) -> dict[str, str]:
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    name = platform.processor() or platform.machine() if gpu is None else f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB"
    return {"device": str(device), "name": name, "torch": torch.__version__, "iobs": iobs.__version__}


# ---- equality with the CPU
def solver_checks(device: torch.device) -> Iterator[Check]:
    """Compare the errors and the zeros of every solver, refinement and kind of pattern, on problems in float64."""
    patterns: list[Pattern] = [Unstructured(0.5), Unstructured(0.5, per="row"), NM(2, 4)]
    asked: list[tuple[str, Pattern, str | None, int]] = []
    for solver in SOLVERS:
        columns = 8 if solver == "exact" else 64
        asked += [(solver, pattern, None, columns) for pattern in patterns]
    asked += [("magnitude", Unstructured(0.5), refine, 64) for refine in ("refit", "swap")]
    asked += [("search", iobs.Groups(4, 8), None, 64), ("admm", Grid(4, 16), None, 64)]
    for solver, pattern, refine, columns in asked:
        problem, here = _solved(solver, pattern, refine, columns, torch.device("cpu"))
        there = _solved(solver, pattern, refine, columns, device)[1].cpu()
        dense = float(problem.loss(problem.centre()).sum())
        errors = [float(problem.loss(weight).sum()) - dense for weight in (here, there)]
        apart = abs(errors[1] / errors[0] - 1)
        equal = float(((here == 0) == (there == 0)).double().mean())
        name = f"solve {solver}{f' + {refine}' if refine else ''}, {pattern}"
        same_count = isinstance(pattern, Grid) or int((here == 0).sum()) == int((there == 0).sum())
        yield Check(
            name, apart <= _CLOSE and same_count, f"errors differ by {apart:.1e}, {equal:.2%} of the zeros equal"
        )


def _solved(
    solver: str, pattern: Pattern, refine: str | None, columns: int, device: torch.device
) -> tuple[Quadratic, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(2 if solver == "exact" else 16, columns, generator=generator, dtype=torch.float64)
    problem = Quadratic.at(weight.to(device), (inputs.T @ inputs).to(device))
    return problem, iobs.solve(problem, pattern, solver, refine=refine).weight


def network_checks(device: torch.device) -> Iterator[Check]:
    """Compare pruned networks: one shot, residual targets, block reconstruction, and bfloat16 on the device."""
    loaded = iobs.load().module
    vocabulary = next(loaded.parameters()).shape[0]
    tokens = torch.randint(3, vocabulary, (24, 64), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": part} for part in torch.split(tokens, 4)]
    fit = BlockFit(masks=1, steps=4, lr=1e-3, network_steps=2, network_lr=1e-4)
    recipes = {
        "one-shot": Recipe.preset("one-shot"),
        "residual targets": Recipe.preset("one-shot").but(target="residual"),
        "block reconstruction": Recipe.preset("one-shot").but(target="residual", solver="sparsegpt", blocks=fit),
    }
    for name, recipe in recipes.items():
        here, there = (_pruned(loaded, data, recipe, one, torch.float32) for one in (torch.device("cpu"), device))
        yield _compared(f"prune, {name}", loaded, here, there, data)
    name = "one-shot"
    narrow = _pruned(loaded, data, recipes[name], device, torch.bfloat16)
    here = _pruned(loaded, data, recipes[name], torch.device("cpu"), torch.float32)
    yield _compared(f"prune, {name}, bfloat16", loaded, here, narrow, data, masks=0.9)


def _pruned(
    loaded: nn.Module, data: list[dict[str, Tensor]], recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    model = copy.deepcopy(loaded).to(device, dtype)
    iobs.prune(model, data, 0.5, recipe, holdout=0.0)
    return {name: value.detach().to("cpu", torch.float32) for name, value in model.state_dict().items()}


@torch.no_grad()
def _compared(
    name: str,
    loaded: nn.Module,
    here: dict[str, Tensor],
    there: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    masks: float = _MASKS,
) -> Check:
    losses = []
    for state in (here, there):
        model = copy.deepcopy(loaded).float()
        model.load_state_dict(state)
        losses.append(statistics.fmean(float(model(**batch, labels=batch["input_ids"]).loss) for batch in data))
    pairs = [((one == 0), (there[key] == 0)) for key, one in here.items() if one.ndim > 1 and bool((one == 0).any())]
    entries = sum(one.numel() for one, _ in pairs)
    equal = sum(int((one == two).sum()) for one, two in pairs) / entries
    zeros = [sum(int(pair[side].sum()) for pair in pairs) for side in (0, 1)]
    apart = abs(losses[1] / losses[0] - 1)
    passed = zeros[0] == zeros[1] and equal >= masks and apart <= _LOSS
    return Check(name, passed, f"{equal:.2%} of the masks equal, {zeros[1]} zeros, loss {losses[1]:.4f} ({apart:.1e})")


# ---- times
def timed_block(device: torch.device, shrink: int, found: Findings) -> Rates:
    """Time the kernels and one block whose sides are divided by `shrink`; returns the measured rates."""
    shapes = [Shape(one.rows // shrink, one.columns // shrink) for one in _BLOCK_8B]
    wide, narrow = shapes[-1], shapes[0]
    clock = Clock(device)
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(rows, columns, generator=generator).to(device, dtype)

    side = wide.columns
    for dtype in (torch.float32, torch.bfloat16):
        one = drawn(side, narrow.columns, dtype)
        operations = 2.0 * side * side * narrow.columns
        found.timings.append(clock.timed(f"product in {str(dtype)[6:]}", operations, partial(torch.matmul, one, one.T)))
    moved = torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copied = clock.timed("copy from main memory", moved.numel(), lambda: moved.to(device, copy=True), "B/s")
    found.timings.append(copied)
    kernel_times(narrow, clock, drawn, found)
    solve, operations = 0.0, 0.0
    recipe = Recipe(solver="admm")
    for shape in dict.fromkeys(shapes):
        weight = drawn(shape.rows, shape.columns)
        inputs = drawn(2 * shape.columns, shape.columns)
        problem = Quadratic.at(weight, inputs.T @ inputs)
        count = shapes.count(shape)
        one_solve = clock.timed(
            f"solve {shape.rows} x {shape.columns}, ADMM 50 %",
            solve_operations(shape, recipe),
            partial(iobs.solve, problem, Unstructured(0.5), "admm", damping=0.01),
            repeat=1,
        )
        found.timings.append(one_solve)
        solve, operations = solve + count * one_solve.seconds, operations + count * solve_operations(shape, recipe)
        del problem, inputs
    step = timed_step(shapes, device, clock)
    found.timings.append(step)
    if shrink > 1:
        found.notes.append(f"The block was timed with its sides divided by {shrink}; rates are assumed to be the same.")
    return Rates(step.rate, operations / solve, copied.rate)


def kernel_times(shape: Shape, clock: Clock, drawn: Callable[[int, int], Tensor], found: Findings) -> None:
    """Time the kernels of the solvers on one layer."""
    rows, columns = shape.shape
    inputs, weight = drawn(2 * columns, columns), drawn(rows, columns)
    hessian = (inputs.T @ inputs).contiguous()
    shift = float(hessian.diagonal().mean())
    pattern = Unstructured(0.5).groups(shape.shape)
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
            lambda: improve_weights(hessian, linear, mask, weight * mask, 6),
        ),
        "SparseGPT": (
            2.0 * rows * columns**2,
            lambda: iobs.solve(Quadratic.at(weight, hessian), NM(2, 4), "sparsegpt", damping=0.01),
        ),
    }
    for name, (operations, task) in tasks.items():
        found.timings.append(clock.timed(name, operations, task))


@torch.no_grad()
def sparse_products(device: torch.device, capability: tuple[int, int], side: int, found: Findings) -> None:
    """Compare and time the forms of `iobs.accelerate` on a GPU, in bfloat16: one token and 1,024 tokens."""
    clock, generator = Clock(device), torch.Generator().manual_seed(0)
    for pattern in (NM(2, 4), Unstructured(0.5), Unstructured(0.7), Unstructured(0.9)):
        weight = torch.randn(side, side, generator=generator) / side**0.5
        weight = iobs.solve(Quadratic.at(weight, torch.eye(side)), pattern, "magnitude").weight
        layer = nn.Linear(side, side, bias=False)
        layer.weight.data = weight
        layer.to(device, torch.bfloat16)
        makers, notes = gpu.forms(layer, capability)
        for tokens in (1, 1024):
            given = torch.randn(tokens, side, generator=generator).to(device, torch.bfloat16)
            forms, more = gpu.usable(makers, given)
            found.notes += [f"{pattern}: {note}." for note in notes + more if f"{pattern}: {note}." not in found.notes]
            wanted = layer(given).float()
            for name, form in {"dense": layer, **forms}.items():
                title = f"{name} product of {pattern}, {side} x {side}, {tokens} token(s)"
                apart = float((form(given).float() - wanted).norm() / wanted.norm())
                found.checks += [Check(title, apart <= _CLOSE, f"{apart:.1e} from dense")] if name != "dense" else []
                found.timings.append(clock.timed(title, 2.0 * tokens * side**2, partial(form, given), repeat=_PRODUCTS))


def timed_step(shapes: list[Shape], device: torch.device, clock: Clock) -> Timing:
    """Time a gradient step of a gated perceptron and four projections, with the shapes of a block, in 1,024 tokens."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    query, key, value, output, gate, up, down = (
        torch.randn(one.rows, one.columns, device=device, dtype=dtype).div_(one.columns**0.5).requires_grad_()
        for one in shapes
    )
    hidden = torch.randn(1024, shapes[0].columns, device=device, dtype=dtype)

    def step() -> None:
        mixed = (hidden @ query.T) * (hidden @ key.T).repeat(1, 4) + (hidden @ value.T).repeat(1, 4)
        state = hidden + mixed @ output.T
        state = state + (torch.nn.functional.silu(state @ gate.T) * (state @ up.T)) @ down.T
        torch.autograd.grad(state.square().mean(), [query, key, value, output, gate, up, down])

    return clock.timed("gradient step of a block", 6.0 * 1024 * sum(one.weights for one in shapes), step)


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
    parser = argparse.ArgumentParser(prog="python -m iobs.check_gpu", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("iobs_check"), help="files OUT.json and OUT.txt")
    given = parser.parse_args(arguments)
    try:
        try:
            device = torch.empty(1, device=given.device).device
        except (RuntimeError, AssertionError) as error:
            raise ProblemError(f"The device {given.device} cannot be used ({error}); give --device cpu.") from error
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
