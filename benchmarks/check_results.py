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
from iobs.pruning.layerwise.problem import SEARCH_COLUMNS
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.pruning.store import Store
from iobs.solvers import SOLVERS

Found = TypeVar("Found")

CLOSE = 0.01  # relative difference of errors; ADMM searches in float32, where near ties may fall either way
_SPLIT = 0.003  # share of mask entries by which two pairs of networks differ that rounding alone has driven apart
_ROUNDING = 1e-6  # relative change of weights that stands for rounding
_TIES = 0.01  # relative change of the network's weights: stored in few bits, many are equal, and ties have no order


@dataclass(frozen=True)
class Limits:
    """Largest differences between a network pruned on a device and the one of the CPU.

    Args:
        masks: least share of equal mask entries; None: that of two networks of the CPU, whose weights differ by
            rounding before they are pruned.
        loss: largest relative difference of the losses.
        errors: the same of the mean output error of the layers.
        weights: the same of the weights of any tensor.
    """

    masks: float | None
    loss: float
    errors: float
    weights: float = float("inf")


@dataclass(frozen=True)
class Case:
    """A network that is pruned on the CPU and on a device.

    Args:
        name: what is compared.
        recipe: how both are pruned.
        limits: of their difference.
        dtype: of the computations on the CPU.
        there: the same on the device; None: as on the CPU.
        samples: number of samples.
        visits: the blocks visit the device.
    """

    name: str
    recipe: Recipe
    limits: Limits
    dtype: torch.dtype
    there: torch.dtype | None = None
    samples: int = 24
    visits: bool = False


@dataclass(frozen=True)
class Pruned:
    """Weights of a pruned network by name, in float64, and the output errors of its layers."""

    weights: dict[str, Tensor]
    errors: list[float]


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


def network_cases() -> list[Case]:
    """The comparisons of networks, with their limits.

    Rounding turns a near tie between two entries now and then, and later layers have other inputs from there on. ADMM
    searches in float32 and meets such ties in every layer: a change of the weights by 1e-7 leaves 93 % of the masks of
    a network equal. SparseGPT decides entry by entry and meets few, in float64 none. So float64 is compared closely;
    float32 closely where a flip does not spread; and ADMM with what rounding does on the CPU.
    """
    shot = Recipe.preset("one-shot")
    residual = shot.but(target="residual", solver="sparsegpt")
    fit = BlockFit(masks=1, steps=4, lr=1e-3, network_steps=2, network_lr=1e-4)
    same, few = Limits(0.9999, 1e-6, 1e-4, 1e-4), 8
    return [
        Case("SparseGPT, float32", residual.but(target="layer"), Limits(0.9995, 1e-4, 1e-3, 0.03), torch.float32),
        Case("residual targets, float64", residual, same, torch.float64, samples=few),
        Case("block reconstruction, float64", residual.but(blocks=fit), same, torch.float64, samples=few),
        Case(
            "block reconstruction, float64, blocks visit the device",
            residual.but(blocks=fit),
            same,
            torch.float64,
            samples=few,
            visits=True,
        ),
        Case("ADMM, residual targets, float32", shot.but(target="residual"), Limits(None, 5e-3, 5e-3), torch.float32),
        Case(
            "SparseGPT, bfloat16 against float32",
            residual.but(target="layer"),
            Limits(0.993, 5e-3, 0.01),
            torch.float32,
            torch.bfloat16,
        ),
    ]


def network_checks(device: torch.device) -> Iterator[Check]:
    """Compare pruned networks; see `network_cases`."""
    loaded = changed(iobs.load().module, _TIES, 0)
    vocabulary = next(loaded.parameters()).shape[0]
    tokens = torch.randint(3, vocabulary, (24, 64), generator=torch.Generator().manual_seed(0))
    for case in network_cases():
        name = f"prune, {case.name}"
        yield _checked(name, partial(_network_check, name, case, loaded, tokens, device))


@torch.no_grad()
def changed(model: nn.Module, size: float, seed: int) -> nn.Module:
    """A copy of a network, the entries of whose matrices are changed by random relative amounts."""
    generator, found = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    for parameter in found.parameters():
        if parameter.ndim > 1:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(parameter.double() * (1 + size * drawn))
    return found


def _network_check(name: str, case: Case, loaded: nn.Module, tokens: Tensor, device: torch.device) -> Check:
    data = [{"input_ids": part} for part in torch.split(tokens[: case.samples], 4)]
    limits = case.limits
    here = _pruned(Store(copy.deepcopy(loaded).to(case.dtype)), data, case.recipe)
    moved = copy.deepcopy(loaded).to(case.there or case.dtype)
    there = _pruned(OffloadedStore(moved, device) if case.visits else Store(moved.to(device)), data, case.recipe)
    least, beside = limits.masks, ""
    if least is None:
        usual = equal_masks(here, _pruned(Store(changed(loaded, _ROUNDING, 1).to(case.dtype)), data, case.recipe))
        least, beside = usual - _SPLIT, f" ({usual:.2%} after rounding on the CPU)"
    equal = equal_masks(here, there)
    zeros = [sum(int((value == 0).sum()) for value in one.weights.values() if value.ndim > 1) for one in (here, there)]
    losses = [_loss(loaded, one, data) for one in (here, there)]
    loss, errors = abs(losses[1] / losses[0] - 1), abs(sum(there.errors) / sum(here.errors) - 1)
    weights = max(float((there.weights[key] - one).norm() / one.norm()) for key, one in here.weights.items())
    passed = zeros[0] == zeros[1] and equal >= least and loss <= limits.loss and errors <= limits.errors
    found = f"{equal:.4%} of the masks equal{beside}, {zeros[1]} zeros; loss apart {loss:.1e}, errors {errors:.1e}"
    return Check(name, passed and weights <= limits.weights, f"{found}, weights {weights:.1e}")


def _pruned(store: Store, data: list[dict[str, Tensor]], recipe: Recipe) -> Pruned:
    """Prune the network of a store; in float64 without the layers of many columns, which are solved in float32."""
    linear = {name: one for name, one in store.model.named_modules() if isinstance(one, nn.Linear)}
    wide = [name for name, one in linear.items() if one.in_features >= SEARCH_COLUMNS]
    exact = next(store.model.parameters()).dtype == torch.float64
    report = iobs.prune(store, data, 0.5, recipe, holdout=0.0, ignore=(wide or None) if exact else None)
    errors = [entry.error_calibration for entry in report.rounds[-1].layers]
    return Pruned({name: value.detach().cpu().double() for name, value in store.model.state_dict().items()}, errors)


def equal_masks(here: Pruned, there: Pruned) -> float:
    """Share of the entries of the pruned matrices that are zero in both networks, or in none."""
    pairs = [(one == 0, there.weights[key] == 0) for key, one in here.weights.items() if one.ndim > 1]
    pairs = [pair for pair in pairs if bool(pair[0].any())]
    return sum(int((one == two).sum()) for one, two in pairs) / sum(one.numel() for one, _ in pairs)


@torch.no_grad()
def _loss(loaded: nn.Module, pruned: Pruned, data: list[dict[str, Tensor]]) -> float:
    """The loss of a pruned network, computed in float64 on the CPU."""
    model = copy.deepcopy(loaded).double()
    model.load_state_dict(pruned.weights)
    return statistics.fmean(float(model(**batch, labels=batch["input_ids"]).loss) for batch in data)
