"""Comparisons of results on a device with those of the CPU: solvers, and pruned networks."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

import iobs
from iobs.core.patterns import NM, Grid, Pattern, Unstructured
from iobs.core.quadratic import Quadratic
from iobs.errors import first_line
from iobs.pruning.blockwise.offloaded import OffloadedStore
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.pruning.store import Store
from iobs.solvers import SOLVERS

Found = TypeVar("Found")

CLOSE = 0.01  # relative difference of errors; ADMM searches in float32, where near ties may fall either way
_MASKS = 0.97  # share of equal mask entries of two pruned networks; near ties may fall either way
_LOSS = 0.05  # relative difference of their losses


@dataclass(frozen=True)
class Check:
    """A comparison with the CPU."""

    name: str
    passed: bool
    detail: str


def tried(task: Callable[[], Found]) -> tuple[Found | None, Exception | None]:
    """The result of a task, or the error that a device raised: other tasks may run all the same."""
    try:
        return task(), None
    except Exception as error:
        return None, error


def _checked(name: str, task: Callable[[], Check]) -> Check:
    """A check, which fails if its task raises an error."""
    found, error = tried(task)
    return failed(name, error) if found is None else found


def failed(name: str, error: Exception | None) -> Check:
    """The check of a task that raised an error."""
    return Check(name, False, f"{type(error).__name__}: {first_line(error)}" if error is not None else "no result")


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
        name = f"solve {solver}{f' + {refine}' if refine else ''}, {pattern}"
        yield _checked(name, partial(_solver_check, name, solver, pattern, refine, columns, device))


def _solver_check(
    name: str, solver: str, pattern: Pattern, refine: str | None, columns: int, device: torch.device
) -> Check:
    problem, here = _solved(solver, pattern, refine, columns, torch.device("cpu"))
    there = _solved(solver, pattern, refine, columns, device)[1].cpu()
    dense = float(problem.loss(problem.centre()).sum())
    errors = [float(problem.loss(weight).sum()) - dense for weight in (here, there)]
    apart = abs(errors[1] / errors[0] - 1)
    equal = float(((here == 0) == (there == 0)).double().mean())
    same_count = isinstance(pattern, Grid) or int((here == 0).sum()) == int((there == 0).sum())
    detail = f"errors differ by {apart:.1e}, {equal:.2%} of the zeros equal"
    return Check(name, apart <= CLOSE and same_count, detail)


def _solved(
    solver: str, pattern: Pattern, refine: str | None, columns: int, device: torch.device
) -> tuple[Quadratic, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * columns, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(2 if solver == "exact" else 16, columns, generator=generator, dtype=torch.float64)
    problem = Quadratic.at(weight.to(device), (inputs.T @ inputs).to(device))
    return problem, iobs.solve(problem, pattern, solver, refine=refine).weight


def network_checks(device: torch.device) -> Iterator[Check]:
    """Compare pruned networks: one shot, residual targets, block reconstruction, bfloat16, and blocks that visit."""
    loaded = iobs.load().module
    vocabulary = next(loaded.parameters()).shape[0]
    tokens = torch.randint(3, vocabulary, (24, 64), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": part} for part in torch.split(tokens, 4)]
    fit = BlockFit(masks=1, steps=4, lr=1e-3, network_steps=2, network_lr=1e-4)
    shot = Recipe.preset("one-shot")
    blocks = shot.but(target="residual", solver="sparsegpt", blocks=fit)
    runs = {
        "own outputs as targets": (shot.but(target="layer"), torch.float32, _MASKS, _resident),
        "residual targets": (shot.but(target="residual"), torch.float32, _MASKS, _resident),
        "block reconstruction": (blocks, torch.float32, _MASKS, _resident),
        "block reconstruction, blocks visit the device": (blocks, torch.float32, _MASKS, OffloadedStore),
        "residual targets, bfloat16": (shot.but(target="residual"), torch.bfloat16, 0.9, _resident),
    }
    for title, (recipe, dtype, masks, place) in runs.items():
        name = f"prune, {title}"
        yield _checked(name, partial(_network_check, name, loaded, data, recipe, device, dtype, masks, place))


def _network_check(
    name: str,
    loaded: nn.Module,
    data: list[dict[str, Tensor]],
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    masks: float,
    place: Callable[[nn.Module, torch.device], Store],
) -> Check:
    here = _pruned(loaded, data, recipe, torch.device("cpu"), torch.float32, _resident)
    return _compared(name, loaded, here, _pruned(loaded, data, recipe, device, dtype, place), data, masks)


def _resident(model: nn.Module, device: torch.device) -> Store:
    """The store of a model that is whole on the device."""
    return Store(model.to(device))


def _pruned(
    loaded: nn.Module,
    data: list[dict[str, Tensor]],
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    place: Callable[[nn.Module, torch.device], Store],
) -> dict[str, Tensor]:
    model = copy.deepcopy(loaded).to(dtype)
    iobs.prune(place(model, device), data, 0.5, recipe, holdout=0.0)
    return {name: value.detach().to("cpu", torch.float32) for name, value in model.state_dict().items()}


@torch.no_grad()
def _compared(
    name: str,
    loaded: nn.Module,
    here: dict[str, Tensor],
    there: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    masks: float,
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
