"""Equations from data: `iobs.SparseEquations` beside MIOSR, pysindy's exact optimizer, which calls Gurobi.

    python benchmarks/equations.py [--quick] [--seeds SEED ...]

Both are optimizers of pysindy and see the same states: six systems, integrated for ten seconds in steps of 0.01, with
noise of one per cent of the standard deviation of each state. Derivatives are smoothed finite differences; the terms
are polynomials of degree 3 (of three states 20 an equation). Each equation has as many terms as the true one, and a
ridge of 0.01. One system is solved again with terms that are counted together and a linear equation between two
coefficients. The loss is half the squared residual with the ridge; "true" counts the equations with exactly the true
terms. One thread; processor seconds of the optimizer alone. It needs pysindy and gurobipy, whose free
licence holds for these sizes: pip install pysindy gurobipy.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rows import Row, Rows, importable, parser, stamp
from scipy.integrate import solve_ivp

import iobs

Floats = NDArray[np.float64]
RIDGE, STEP, NOISE, DEGREE = 1e-2, 0.01, 0.01, 3
SOLVERS = ("iobs", "MIOSR")


@dataclass(frozen=True)
class System:
    """A system of ordinary differential equations.

    Attributes:
        start: the first state.
        terms: of each equation the names of its terms, as pysindy writes them.
        slope: (state) -> its time derivative.
        opposite: a term whose coefficients in the first two equations sum to zero; "" for no such constraint.
    """

    start: tuple[float, ...]
    terms: tuple[frozenset[str], ...]
    slope: Callable[[Floats], tuple[float, ...]]
    opposite: str = ""


def _terms(*equations: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(one.split(",")) for one in equations)


SYSTEMS = {
    "Lorenz": System(
        (-8.0, 8.0, 27.0),
        _terms("x0,x1", "x0,x1,x0 x2", "x2,x0 x1"),
        lambda s: (10 * (s[1] - s[0]), s[0] * (28 - s[2]) - s[1], s[0] * s[1] - 8 / 3 * s[2]),
    ),
    "Roessler": System(
        (1.0, 1.0, 0.5),
        _terms("x1,x2", "x0,x1", "1,x2,x0 x2"),
        lambda s: (-s[1] - s[2], s[0] + 0.2 * s[1], 0.2 + s[2] * (s[0] - 5.7)),
    ),
    "Lotka-Volterra": System(
        (1.0, 2.0),
        _terms("x0,x0 x1", "x1,x0 x1"),
        lambda s: (1.5 * s[0] - s[0] * s[1], -s[1] + s[0] * s[1]),
    ),
    "van der Pol": System((2.0, 0.0), _terms("x1", "x0,x1,x0^2 x1"), lambda s: (s[1], (1 - s[0] ** 2) * s[1] - s[0])),
    "Duffing": System((1.0, 0.0), _terms("x1", "x0,x1,x0^3"), lambda s: (s[1], -s[0] - 0.1 * s[1] - s[0] ** 3)),
    "Hopf": System(
        (0.1, 0.0),
        _terms("x0,x1,x0^3,x0 x1^2", "x0,x1,x1^3,x0^2 x1"),
        lambda s: (
            s[0] - s[1] - s[0] * (s[0] ** 2 + s[1] ** 2),
            s[0] + s[1] - s[1] * (s[0] ** 2 + s[1] ** 2),
        ),
    ),
}
SYSTEMS["Lotka-Volterra, constrained"] = replace(SYSTEMS["Lotka-Volterra"], opposite="x0 x1")
QUICK = ("Lorenz",)


def states(system: System, seed: int) -> tuple[Floats, Floats]:
    """Times (n,) and noisy states (n, d)."""
    times = np.arange(0, 10, STEP)
    solved = solve_ivp(lambda _, s: system.slope(s), (0, 10), system.start, t_eval=times, rtol=1e-9, atol=1e-9).y.T
    noise = np.random.default_rng(seed).standard_normal(solved.shape)
    return times, solved + NOISE * solved.std(axis=0) * noise


def measure(name: str, solver: str, seed: int) -> Row:
    """Loss, number of true equations and processor time of one solver."""
    import pysindy

    system = SYSTEMS[name]
    times, noisy = states(system, seed)
    library = pysindy.PolynomialLibrary(degree=DEGREE)
    terms = np.asarray(library.fit_transform(noisy))
    sides = np.asarray(pysindy.SmoothedFiniteDifference()(noisy, times))
    names = library.get_feature_names()
    sizes, constraint = [len(of) for of in system.terms], {}
    if system.opposite:
        left = np.zeros((1, sides.shape[1], terms.shape[1]))
        left[0, :2, names.index(system.opposite)] = 1.0
        constraint = {"constraint_lhs": left.reshape(1, -1), "constraint_rhs": np.zeros(1)}
    together = sum(sizes) if system.opposite else None
    optimizer: Any
    if solver == "iobs":
        optimizer = iobs.SparseEquations(None if together else sizes, total=together, ridge=RIDGE, **constraint)
    else:
        groups = None if together else sizes
        optimizer = pysindy.MIOSR(together, groups, alpha=RIDGE, regression_timeout=60, **constraint)
    began, processor = time.perf_counter(), time.process_time()
    optimizer.fit(terms, sides)
    row = {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - processor}
    found = np.asarray(optimizer.coef_)
    true = [{names[j] for j in np.flatnonzero(of)} == set(asked) for of, asked in zip(found, system.terms, strict=True)]
    loss = 0.5 * float(((sides - terms @ found.T) ** 2).sum()) + 0.5 * RIDGE * float((found**2).sum())
    return {**row, "loss": loss, "true": sum(true), "equations": len(true), "terms": [*map(int, (found != 0).sum(1))]}


def tables(rows: list[Row]) -> str:
    """The page: both optimizers by system, means over seeds."""
    lines = [
        "# Equations from data",
        "",
        "Made by `python benchmarks/equations.py`: pysindy with `iobs.SparseEquations` and with MIOSR, which calls "
        "Gurobi, on the same noisy states (1 %), polynomials of degree 3, as many terms as the true equations have. "
        "Equal losses: of the seeds, those in which both have the same loss up to 1e-6. Processor seconds of one fit.",
        "",
        "| system | true equations, iobs | MIOSR | equal losses | lower loss, iobs | MIOSR | seconds, iobs | MIOSR |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in [name for name in SYSTEMS if any(row["system"] == name for row in rows)]:
        of = {s: {r["seed"]: r for r in rows if (r["system"], r["solver"]) == (name, s)} for s in SOLVERS}
        seeds = sorted(of["iobs"].keys() & of["MIOSR"].keys())
        pairs = [(of["iobs"][seed], of["MIOSR"][seed]) for seed in seeds]
        equal = [abs(a["loss"] - b["loss"]) <= 1e-6 * b["loss"] for a, b in pairs]
        lower = [sum(p[i]["loss"] < (1 - 1e-6) * p[1 - i]["loss"] for p in pairs) for i in (0, 1)]
        true = [f"{sum(p[i]['true'] for p in pairs)} of {sum(p[i]['equations'] for p in pairs)}" for i in (0, 1)]
        seconds = [f"{np.mean([p[i]['processor_seconds'] for p in pairs]):.2f}" for i in (0, 1)]
        cells = [name, *true, f"{sum(equal)} of {len(equal)}", *map(str, lower), *seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__, data=False)
    given = options.parse_args()
    if not importable("equations", "pysindy", "gurobipy"):
        return
    warnings.simplefilter("ignore")  # pysindy warns of numpy's deprecations
    iobs.SparseEquations(1).fit(np.eye(3), np.ones(3))  # loads the compiled kernels
    rows = Rows("equations", ("system", "solver", "seed"), again=given.again)
    for seed in given.seeds or range(1 if given.quick else 5):
        for name in QUICK if given.quick else SYSTEMS:
            for solver in SOLVERS:
                if not rows.has(system=name, solver=solver, seed=seed):
                    rows.put({"system": name, "solver": solver} | measure(name, solver, seed) | stamp(seed))


if __name__ == "__main__":
    main()
