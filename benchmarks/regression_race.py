"""Race of sparse regressions from small to wide: iobs, abess, fastsparsegams, skglm, adelie, scikit-learn, skscope.

    pip install abess skscope skglm adelie fastsparsegams
    OMP_NUM_THREADS=1 python benchmarks/regression_race.py [--only SHAPE,...] [--trials N]

A row for each problem and solver is added to results/regression_race.jsonl. Peers that are not installed are left out.
Data, measures and times are those of `recovery.py`. Solvers with a penalty instead of k (fastsparsegams, skglm, adelie)
compute their path, and the largest support of at most k on it is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import recovery
import torch
from recovery import Solver, available
from rows import Rows, parser

import iobs
from iobs import objectives

NOISE = {"rho": 0.5, "snr": 5.0}
SHAPES = {
    "n 200, d 50, k 5": {"n": 200, "d": 50, "k": 5, **NOISE},
    "n 500, d 100, k 10": {"n": 500, "d": 100, "k": 10, **NOISE},
    "n 1000, d 100, k 10": {"n": 1000, "d": 100, "k": 10, **NOISE},
    "n 1000, d 500, k 25, correlation .9": {"n": 1000, "d": 500, "k": 25, "rho": 0.9, "snr": 5.0},
    "n 500, d 2,000, k 25": {"n": 500, "d": 2000, "k": 25, **NOISE},
    "n 1000, d 10,000, k 20": {"n": 1000, "d": 10_000, "k": 20, **NOISE},
    "n 500, d 100,000, k 10": {"n": 500, "d": 100_000, "k": 10, **NOISE},
}
FAMILIES: dict[str, tuple[Callable, float]] = {
    "logistic": (objectives.Logistic, 1.0),
    "Poisson": (objectives.Poisson, 0.3),
    "Cox": (lambda X, y: objectives.Cox(X, y[:, 0], y[:, 1]), 1.0),
}
FAMILY_SHAPE = {"n": 500, "d": 100, "k": 10, "rho": 0.5}


def iobs_of(make: Callable) -> Solver:
    """`iobs.minimize` on an objective."""
    return lambda X, y, k: iobs.minimize(make(X, y), k).theta


def largest(path: np.ndarray, k: int) -> np.ndarray:
    """The coefficients (d,) with the largest support of at most k on a path (steps, d)."""
    sizes = np.count_nonzero(path, axis=1)
    return path[int(np.argmax(np.where(sizes <= k, sizes, -1)))]


def adelie_path(family: str) -> Solver:
    """The lasso path of adelie, ended once more than k coefficients are not zero."""
    import adelie

    def glm(y: np.ndarray) -> object:
        if family == "Cox":
            stop, status = y.T.copy()  # adelie refuses strided columns
            return adelie.glm.cox(start=np.full(len(y), -1.0), stop=stop, status=status)
        names = {"linear": "gaussian", "logistic": "binomial", "Poisson": "poisson"}
        return getattr(adelie.glm, names[family])(y)

    def solve(X: np.ndarray, y: np.ndarray, k: int) -> np.ndarray:
        state = adelie.grpnet(
            X=np.asfortranarray(X), glm=glm(y), intercept=False, progress_bar=False, min_ratio=1e-2,
            exit_cond=lambda state: state.active_set_size > k,
        )  # fmt: skip
        return largest(state.betas.toarray(), k)

    return solve


def skglm_path(X: np.ndarray, y: np.ndarray, k: int) -> np.ndarray:
    """The path of skglm with the penalty MCP, 30 penalties."""
    from skglm import MCPRegression

    alphas = np.abs(X.T @ y).max() / len(y) * np.geomspace(0.99, 0.01, 30)
    model = MCPRegression(gamma=3.0, fit_intercept=False)
    found = np.zeros(X.shape[1])
    for alpha in alphas:  # each from the last
        model.set_params(alpha=alpha, warm_start=True)
        values = model.fit(X, y).coef_
        if np.count_nonzero(values) > k:
            break
        found = values.copy()
    return found


def abess_family(name: str) -> Solver:
    """abess with a given k."""
    linear = available("abess.linear")
    names = {"logistic": "LogisticRegression", "Poisson": "PoissonRegression"}  # its gamma has another link than log
    if name == "Cox":
        return lambda X, y, k: linear.CoxPHSurvivalAnalysis(support_size=k).fit(X, y).coef_
    kind = getattr(linear, names[name])
    return lambda X, y, k: kind(support_size=k, fit_intercept=False).fit(X, y).coef_


def solvers(label: str) -> dict[str, Solver]:
    """Everyone who runs on a shape of least squares."""
    wide = "100,000" in label
    found = {
        "iobs": iobs_of(objectives.LeastSquares),
        **recovery.linear_peers(scope="d 50" in label or "n 1000, d 100," in label),
    }
    found.pop("skscope Grasp", None)
    if wide or "10,000" in label:
        found.pop("L0Learn core", None)
    if available("skglm"):
        found["skglm MCP"] = skglm_path
    if available("adelie"):
        found["adelie lasso"] = adelie_path("linear")
    return found


def family_solvers(name: str) -> dict[str, Solver]:
    """Everyone who runs on a family."""
    found = {"iobs": iobs_of(FAMILIES[name][0])}
    if available("abess.linear"):
        found["abess"] = abess_family(name)
    if available("adelie"):
        found["adelie lasso"] = adelie_path(name)
    return found


def main() -> None:
    options_of = parser(__doc__, data=False)
    options_of.add_argument("--only", help="labels of problems, or families, separated by semicolons")
    options_of.add_argument("--trials", type=int, default=10)
    options_of.add_argument("--seed", type=int, default=2_920_000)
    options = options_of.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = Rows("regression_race", ("section", "problem", "solver", "seed"), options.again)
    wanted = options.only.split(";") if options.only else [*SHAPES, *FAMILIES]
    shapes = {
        label: values
        for label, values in SHAPES.items()
        if label in wanted and not (options.quick and values["d"] > 500)
    }
    for label, values in shapes.items():
        trials = options.trials if values["d"] <= 500 else max(3, options.trials // 3)
        cells = [(label, trials, options.seed, values)]
        recovery.race("least squares", cells, objectives.LeastSquares, solvers(label), rows)
    for name in (name for name in FAMILIES if name in wanted):
        make, amplitude = FAMILIES[name]
        cells = [(name, options.trials, options.seed, {**FAMILY_SHAPE, "kind": name, "amplitude": amplitude})]
        recovery.race("families", cells, make, family_solvers(name), rows)


if __name__ == "__main__":
    main()
