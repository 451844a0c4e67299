"""Net-Trim against convex solvers: scipy on tiny layers."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize as scipy_minimize
from solver_problems import random_problem

import iobs
from iobs.errors import ProblemError
from iobs.solvers import NetTrim, net_trim, within_tolerance


def layer(seed, rows=2, columns=4, samples=14):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight, torch.randn(columns, samples, generator=generator, dtype=torch.float64)


def scipy_optimum(weight, inputs, tolerance, relu):
    """Least l1 norm by sequential quadratic programming on the positive and negative parts of V."""
    shape, X = tuple(weight.shape), inputs.numpy()
    Y = weight.numpy() @ X
    active = Y > 0 if relu else np.ones_like(Y, dtype=bool)
    entries = weight.numel()
    matrix = lambda v: (v[:entries] - v[entries:]).reshape(shape)  # noqa: E731

    def slack(v):
        return tolerance**2 - ((matrix(v) @ X - Y)[active] ** 2).sum()

    def slope(v):
        change = -2 * ((matrix(v) @ X - Y) * active) @ X.T
        return np.concatenate([change.ravel(), -change.ravel()])

    constraints = [{"type": "ineq", "fun": slack, "jac": slope}]
    if relu:
        constraints.append({"type": "ineq", "fun": lambda v: -(matrix(v) @ X)[~active]})
    start = np.concatenate([weight.numpy().clip(0).ravel(), (-weight.numpy()).clip(0).ravel()])
    ones, bounds = np.ones(2 * entries), [(0, None)] * (2 * entries)
    for ftol in (1e-12, 1e-10, 1e-8):  # at its rounding limit the line search may end without success: ask for less
        found = scipy_minimize(lambda v: v.sum(), start, method="SLSQP", jac=lambda v: ones, bounds=bounds,
                               constraints=constraints, options={"maxiter": 2000, "ftol": ftol})  # fmt: skip
        if found.success:
            break
        start = found.x.clip(0)
    assert found.success, found.message
    return found.fun


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_net_trim_agrees_with_scipy(seed, share):
    weight, inputs = layer(seed)
    tolerance = share * float((weight @ inputs).relu().norm())
    found = net_trim(weight, inputs, tolerance, accuracy=1e-8)
    assert found.converged
    assert found.error <= tolerance * (1 + 1e-6)
    assert float(found.weight.abs().sum()) == pytest.approx(scipy_optimum(weight, inputs, tolerance, True), rel=1e-5)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_net_trim_without_activation_agrees_with_scipy(seed, share):
    weight, inputs = layer(seed)
    tolerance = share * float((weight @ inputs).norm())
    found = within_tolerance(iobs.Quadratic.at(weight, inputs @ inputs.T), tolerance)
    assert found.stats["error"] == pytest.approx(tolerance, rel=1e-5)
    assert found.stats["error"] == pytest.approx(float(((found.weight - weight) @ inputs).norm()), rel=1e-9)
    assert found.stats["l1"] == pytest.approx(scipy_optimum(weight, inputs, tolerance, False), rel=1e-5)


@pytest.mark.parametrize("keep", [0, 7, 12, 21])
def test_net_trim_with_a_budget_has_the_least_tolerance_that_fits(keep):
    weight, inputs = layer(0, rows=3, columns=7, samples=50)
    found = net_trim(weight, inputs, keep=keep)
    assert found.nonzeros <= keep
    assert found.error <= found.tolerance + 1e-4
    if keep < 21:
        assert net_trim(weight, inputs, 0.95 * found.tolerance).nonzeros > keep


def test_net_trim_uses_that_a_relu_hides_negative_outputs():
    weight, inputs = layer(1, rows=6, columns=8, samples=80)
    tolerance = 0.2 * float((weight @ inputs).relu().norm())
    with_relu = net_trim(weight, inputs, tolerance)
    without = within_tolerance(iobs.Quadratic.at(weight, inputs @ inputs.T), tolerance)
    assert float(with_relu.weight.abs().sum()) < without.stats["l1"]


def test_budgeted_net_trim_has_the_support_of_the_convex_program():
    problem = random_problem(5, 12)
    found = iobs.solve(problem, iobs.Unstructured(0.5), NetTrim(refit=False, steps=60, iterations=400))
    change = found.weight - problem.centre()
    error = float((change @ problem.matrix * change).sum()) ** 0.5
    exact = within_tolerance(problem, error)
    assert torch.equal(exact.mask, found.mask)
    torch.testing.assert_close(exact.weight, found.weight, rtol=1e-3, atol=1e-4)


def test_budgeted_net_trim_solves_again_on_its_mask():
    problem = random_problem(5, 12)
    shrunk, solved = (iobs.solve(problem, iobs.Unstructured(0.5), NetTrim(refit=refit)) for refit in (False, True))
    assert torch.equal(shrunk.mask, solved.mask)
    assert float(solved.loss.sum()) < float(shrunk.loss.sum())


@pytest.mark.parametrize("unit", [2.0**40, 2.0**-40])
def test_penalty_has_the_units_of_the_problem(unit):
    problem = random_problem()
    scaled = iobs.Quadratic.at(problem.centre() * unit, problem.matrix * unit)
    plain, found = (iobs.solve(one, iobs.Unstructured(0.5), NetTrim(refit=False)) for one in (problem, scaled))
    assert found.stats["penalty"] == pytest.approx(plain.stats["penalty"] * unit**2, rel=1e-6)
    assert torch.allclose(found.weight / unit, plain.weight, rtol=1e-6)


def test_net_trim_raises_if_arguments_are_malformed():
    weight, inputs = layer(0)
    with pytest.raises(ProblemError, match="exactly one"):
        net_trim(weight, inputs)
    with pytest.raises(ProblemError, match="exactly one"):
        net_trim(weight, inputs, 0.1, keep=3)
    with pytest.raises(ProblemError, match="negative"):
        net_trim(weight, inputs, -0.1)
    with pytest.raises(ProblemError, match="keep must lie"):
        net_trim(weight, inputs, keep=99)
    with pytest.raises(ProblemError, match=r"\(d, samples\)"):
        net_trim(weight, inputs.T, 0.1)
    with pytest.raises(ProblemError, match="negative"):
        within_tolerance(random_problem(), -1.0)
    with pytest.raises(ProblemError, match="steps"):
        NetTrim(steps=0)
