"""The paper's theory against measured steps."""

import numpy as np
import pytest
from checks import benchmarks
from sparse_problems import sparse_signal

from iobs.optimize.minimize import minimize
from iobs.optimize.objectives.families import Logistic, Poisson

with benchmarks() as imported:
    theory = imported("paper_tables.theory")


@pytest.mark.parametrize("kind", ["logistic", "poisson"])
@pytest.mark.parametrize("method", ["iobs", "topk_iobs"])
@pytest.mark.parametrize("seed", range(3))
def test_theory_bounds_hold_for_local_steps(kind, method, seed):
    """Soft labels and noiseless rates: the sparse truth is the global minimiser, as the theorem assumes."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((400, 40)) / (1 if kind == "logistic" else 4)
    truth = sparse_signal(rng, 40, 6)
    margin = X @ truth
    objective = Logistic(X, 1 / (1 + np.exp(-margin))) if kind == "logistic" else Poisson(X, np.exp(margin))
    iterates = [truth * 0.5]
    minimize(objective, 10, method=method, theta0=iterates[0], callback=lambda record, theta: iterates.append(theta))
    steps = theory.compare(objective, iterates, truth, 10)
    rounding = 1e-12
    assert min(step.after for step in steps) < 1e-11
    assert len(steps) <= 12
    for step in steps:
        bound = step.topk if method == "topk_iobs" else step.tight
        assert step.after <= bound + rounding
        assert step.tight <= step.paper


def test_theory_tight_factor_is_newtons_if_k_equals_d():
    constants = theory.constants_on_segment(Poisson(np.eye(3), np.ones(3)), np.full(3, 0.5), np.zeros(3))
    assert constants.mu == pytest.approx(1.0)
    assert pytest.approx(np.exp(0.5)) == constants.L
    tight, paper, _ = theory.quadratic_factors(constants, 3, 3, 1)
    assert tight == pytest.approx(constants.M / (2 * constants.mu))
    assert paper == float("inf")
    assert theory.quadratic_factors(constants, 3, 0, 0)[2] == pytest.approx(constants.M / (2 * constants.mu))
