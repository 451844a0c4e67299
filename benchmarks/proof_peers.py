"""One peer on one problem of `proofs.py`, in the peer's own environment; prints a JSON object.

    PYTHON benchmarks/proof_peers.py NAME FILE.npz SECONDS

The file has X, y, k, loss, ridge, limit (largest coefficient, infinite for none), price (l0: the loss that one more
column must save) and points. Each peer first solves a tiny problem of the same kind, which compiles what it compiles.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

GAP = 1e-4


def el0ps(data: dict[str, Any], seconds: float) -> dict[str, Any]:
    """El0ps: the price of a column instead of k."""
    from el0ps.datafit import Leastsquares, Logistic
    from el0ps.penalty import BigmL2norm, L2norm
    from el0ps.solver import BnbSolver

    class Solver(BnbSolver):
        def package_results(self, problem, results):  # type: ignore[no-untyped-def]
            self.results = results
            return super().package_results(problem, results)

    y = data["y"] if data["loss"] == "squared" else 2 * data["y"] - 1
    datafit = (Leastsquares if data["loss"] == "squared" else Logistic)(y)
    half = 0.5 * data["ridge"]
    penalty = L2norm(half) if np.isinf(data["limit"]) else BigmL2norm(data["limit"], half)
    solver = Solver(relative_gap=GAP, time_limit=seconds)
    found = solver.solve(datafit, penalty, np.asfortranarray(data["X"]), data["price"])
    theta = found.x
    return {"theta": theta, "gap": _gap(solver.results.bound, found.objective_value), "nodes": int(found.iter_count)}


def okridge(data: dict[str, Any], seconds: float) -> dict[str, Any]:
    """OKRidge: least squares with a ridge, k columns."""
    from okridge.tree import BNBTree

    tree = BNBTree(data["X"], data["y"], lambda2=data["ridge"], max_memory_GB=4)
    upper, theta, _, lower, _ = tree.solve(k=data["k"], gap_tol=GAP, verbose=False, time_limit=seconds)
    constant = float(data["y"] @ data["y"])  # its loss leaves the constant out, and has no factor 1/2
    return {"theta": theta, "gap": _gap(lower + constant, upper + constant), "nodes": int(tree.number_of_nodes)}


def l0bnb(data: dict[str, Any], seconds: float) -> dict[str, Any]:
    """l0bnb: the price of a column instead of k, and a bound on the coefficients."""
    from l0bnb import BNBTree

    limit = data["limit"] if np.isfinite(data["limit"]) else 2 * data["largest"]
    tree = BNBTree(data["X"], data["y"])
    found = tree.solve(data["price"], 0.5 * data["ridge"], limit, gap_tol=GAP, time_limit=seconds)
    return {"theta": found.beta, "gap": float(found.gap), "nodes": int(tree.number_of_nodes)}


def abess(data: dict[str, Any], seconds: float) -> dict[str, Any]:
    """abess: a search without a proof, and without a bound on the coefficients."""
    import abess as library

    kind = library.LinearRegression if data["loss"] == "squared" else library.LogisticRegression
    model = kind(support_size=data["k"], alpha=0.5 * data["ridge"] / len(data["y"]), fit_intercept=False)
    return {"theta": model.fit(data["X"], data["y"]).coef_.ravel(), "gap": None, "nodes": None}


def scip(data: dict[str, Any], seconds: float) -> dict[str, Any]:
    """SCIP: least squares as a quadratic program with binary variables."""
    from pyscipopt import Model, quicksum

    X, y, k = data["X"], data["y"], data["k"]
    d = X.shape[1]
    limit = data["limit"] if np.isfinite(data["limit"]) else 2 * data["largest"]
    factor = np.linalg.cholesky(X.T @ X + data["ridge"] * np.eye(d)).T
    model = Model()
    model.hideOutput()
    model.setParam("limits/time", seconds)
    model.setParam("limits/gap", GAP)
    theta = [model.addVar(lb=-limit, ub=limit) for _ in range(d)]
    used = [model.addVar(vtype="B") for _ in range(d)]
    turned = [model.addVar(lb=None) for _ in range(d)]
    value = model.addVar(lb=0)
    for i in range(d):
        model.addCons(turned[i] == quicksum(factor[i, j] * theta[j] for j in range(i, d)))
        model.addCons(theta[i] <= limit * used[i])
        model.addCons(theta[i] >= -limit * used[i])
    model.addCons(quicksum(used) <= k)
    model.addCons(quicksum(each * each for each in turned) <= 2 * value)
    linear = X.T @ y
    constant = 0.5 * float(y @ y)
    model.setObjective(value - quicksum(linear[j] * theta[j] for j in range(d)) + constant)
    model.optimize()
    found = np.array([model.getVal(each) for each in theta]) if model.getNSols() else np.zeros(d)
    return {
        "theta": found, "gap": _gap(model.getDualbound(), model.getPrimalbound()), "nodes": int(model.getNTotalNodes())
    }  # fmt: skip


def fasterrisk(data: dict[str, Any], seconds: float) -> dict[str, Any]:
    """FasterRisk: integer points, without a proof."""
    from fasterrisk.fasterrisk import RiskScoreOptimizer

    search = RiskScoreOptimizer(data["X"], 2 * data["y"] - 1, data["k"], lb=-data["points"], ub=data["points"])
    search.optimize()
    multipliers, intercepts, points = search.get_models()
    signs = 2 * data["y"] - 1
    losses = [
        float(np.logaddexp(0, -signs * (data["X"] @ w + w0) / m).sum())
        for m, w0, w in zip(multipliers, intercepts, points, strict=True)
    ]
    best = int(np.argmin(losses))
    return {"theta": points[best] / multipliers[best], "gap": None, "nodes": None, "value": losses[best]}


PEERS = {"el0ps": el0ps, "okridge": okridge, "l0bnb": l0bnb, "abess": abess, "scip": scip, "fasterrisk": fasterrisk}


def _gap(lower: float, upper: float) -> float:
    return max(0.0, float(upper) - float(lower)) / max(abs(float(upper)), 1e-300)


def main() -> None:
    """Solve the problem of the file and print the result."""
    name, file, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with np.load(file) as loaded:
        data = {key: loaded[key][()] for key in loaded.files}
    data["loss"] = str(data["loss"])
    rng = np.random.default_rng(0)
    tiny = {**data, "X": rng.standard_normal((30, 5)), "y": (rng.random(30) < 0.5).astype(float), "k": 2}
    if name == "fasterrisk":
        tiny["X"] = (tiny["X"] > 0).astype(float)
    PEERS[name](tiny, 20.0)
    begun, processor = time.perf_counter(), time.process_time()
    result = PEERS[name](data, seconds)
    result["seconds"] = time.perf_counter() - begun
    result["processor_seconds"] = time.process_time() - processor
    result["theta"] = np.asarray(result["theta"]).ravel().tolist()
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
