"""Floors of proofs: bounds of every sparse vector in the box, close to the least value over the hull."""

from itertools import combinations

import numpy as np
import pytest
from checks import benchmarks
from scipy.optimize import minimize


@pytest.fixture(scope="module")
def script():
    with benchmarks() as imported:
        yield imported("proof_floors")


def quadratic(rng, d):
    factor = rng.normal(size=(2 * d, d))
    return factor.T @ factor, 3 * factor.T @ rng.normal(size=2 * d)


@pytest.mark.parametrize("seed", range(4))
def test_bound_is_the_least_value_over_the_hull(script, seed):
    rng = np.random.default_rng(seed)
    hessian, linear = quadratic(rng, 6)
    sizes = rng.uniform(0.2, 1.0, 6)
    sizes[5] = 0.0
    hull = script.Hull(sizes, np.arange(6) == 2, 2)
    bound = script.least(hessian, linear, hull, 1e-9)
    split = np.concatenate([np.eye(6), -np.eye(6)], 1)  # v = split @ (positive part, negative part)
    costs = np.tile(hull.costs(), 2)
    found = minimize(
        lambda u: 0.5 * (split @ u) @ hessian @ (split @ u) - linear @ split @ u,
        np.zeros(12),
        jac=lambda u: split.T @ (hessian @ split @ u - linear),
        bounds=[(0, size) for size in np.tile(sizes, 2)],
        constraints={"type": "ineq", "fun": lambda u: 2 - costs @ u, "jac": lambda u: -costs},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    assert bound == pytest.approx(found.fun, abs=1e-5 * abs(found.fun))
    assert bound <= found.fun + 1e-7 * abs(found.fun)


def test_bound_is_below_every_sparse_vector_of_the_box(script):
    rng = np.random.default_rng(9)
    hessian, linear = quadratic(rng, 7)
    best = min(
        (0.5 * -linear[list(s)] @ np.linalg.solve(hessian[np.ix_(s, s)], linear[list(s)]), s)
        for s in combinations(range(7), 3)
    )
    theta = np.zeros(7)
    theta[list(best[1])] = np.linalg.solve(hessian[np.ix_(best[1], best[1])], linear[list(best[1])])
    hulls = script.settings(theta)
    assert script.least(hessian, linear, hulls["smallest box"], 1e-9) <= best[0]
    assert script.least(hessian, linear, hulls["exact sizes of the chosen"], 1e-9) <= best[0]
    assert script.least(hessian, linear, hulls["2 chosen included"], 1e-9) <= best[0]


def test_problem_without_noise_in_few_columns_has_no_floor(script):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(60, 8))
    found = script.floors(X, X[:, :3] @ np.array([1.0, -1.0, 1.0]), 3)
    assert abs(found["smallest box"][0]) < 1e-3
    assert found["largest chosen excluded"][0] < 0
    assert len(found) == 2 + 2 + 6


def test_table_has_a_column_for_each_problem(script):
    rows = [{"setting": "smallest box", "seed": seed, "floor": seed / 100} for seed in (1, 2)]
    assert "| smallest box | 0.010 | 0.020 |" in script.tables(rows)
