"""L-OBS against a step-by-step reference, and its bounds on random layers and networks."""

from itertools import pairwise

import pytest
import torch
from solver_problems import PATTERNS, random_problem

import iobs
from iobs.errors import ProblemError
from iobs.solvers import LOBS, network_bound


def reference(problem, mask):
    """L-OBS as published: one step for each removed entry in the order of saliency, then the mask."""
    inverse = torch.linalg.inv(problem.matrix)
    weight = problem.centre().clone()
    saliency = weight.square() / inverse.diagonal() / 2
    lengths = torch.zeros(len(weight), dtype=weight.dtype)
    for row in range(len(weight)):
        for entry in saliency[row].argsort(stable=True).tolist():
            if not mask[row, entry]:
                step = weight[row, entry] / inverse[entry, entry]
                lengths[row] += (step**2 * inverse[entry, entry]).sqrt()
                weight[row] -= step * inverse[entry]
    rest = weight * ~mask
    lengths += (rest @ problem.matrix * rest).sum(1).sqrt()
    return weight * mask, float(lengths.square().sum()) / 2


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_lobs_equals_the_published_steps_one_by_one(seed, pattern):
    problem = random_problem(seed=seed)
    found = iobs.solve(problem, pattern, "lobs")
    weight, bound = reference(problem, found.mask)
    torch.testing.assert_close(found.weight, weight, rtol=1e-9, atol=1e-12)
    assert found.stats["bound"] == pytest.approx(bound, rel=1e-9)


def random_layer(seed):
    """A layer of random shape, conditioning, scale and pattern."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    rows, columns = draw(1, 12), 4 * draw(1, 9)
    samples = torch.randn(columns + draw(0, 60), columns, generator=generator, dtype=torch.float64)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    spread = torch.rand(columns, generator=generator, dtype=torch.float64).mul(4 * draw(0, 3)).exp()
    inputs = samples @ (mixing if seed % 2 else torch.eye(columns, dtype=torch.float64)) * spread
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    patterns = [iobs.Unstructured(0.05 + 0.9 * (seed % 10) / 10), iobs.NM(2, 4), iobs.Unstructured(0.6, per="row")]
    return iobs.Quadratic.at(weight, inputs.T @ inputs), patterns[seed % 3]


def error_and_bound(seed):
    problem, pattern = random_layer(seed)
    found = iobs.solve(problem, pattern, "lobs")
    assert found.stats["damping"] == 0
    change = found.weight - problem.centre()
    return 0.5 * float((change @ problem.matrix * change).sum()), found.stats["bound"]


@pytest.mark.parametrize("first", [0, pytest.param(50, marks=pytest.mark.slow)])
def test_bound_of_lobs_holds_on_random_layers(first):
    ratios = []
    for seed in range(first, 50 if first == 0 else 1000):
        error, bound = error_and_bound(seed)
        assert error <= bound * (1 + 1e-9)
        ratios.append(bound / max(error, 1e-300))
    assert min(ratios) < 1.5  # the bound is not idle: on some layers it is nearly reached


@pytest.mark.parametrize("unit", [2.0**-50, 1.0, 2.0**50])
def test_bound_of_lobs_has_the_units_of_the_loss(unit):
    problem = random_problem()
    scaled = iobs.Quadratic.at(problem.centre() * unit, problem.matrix * unit)
    plain, found = (iobs.solve(one, iobs.Unstructured(0.5), "lobs").stats["bound"] for one in (problem, scaled))
    assert found == pytest.approx(plain * unit**3)


@pytest.mark.parametrize("seed", range(20))
def test_bound_of_a_damped_problem_is_that_of_its_damped_loss(seed):
    generator = torch.Generator().manual_seed(seed)
    factor, centre, anchor = (torch.randn(6, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    hessian = factor @ factor.T + 0.01 * torch.eye(6, dtype=torch.float64)
    problem = iobs.Quadratic(hessian, centre @ hessian, anchor)
    found = iobs.solve(problem, iobs.Unstructured(0.5), LOBS(), damping=0.1)
    damped = problem.damped(0.1 * float(hessian.diagonal().mean()))
    assert float((damped.loss(found.weight) - damped.loss(damped.centre())).sum()) <= found.stats["bound"] * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_network_bound_holds_for_chains_of_pruned_layers(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = [8, 12, 10, 6]
    weights = [
        torch.randn(after, before, generator=generator, dtype=torch.float64) for before, after in pairwise(sizes)
    ]
    inputs = torch.randn(8, 60, generator=generator, dtype=torch.float64)
    dense, sparse, errors, pruned = inputs, inputs, [], []
    for weight in weights:
        problem = iobs.Quadratic.at(weight, dense @ dense.T)
        found = iobs.solve(problem, iobs.Unstructured(0.3), LOBS(), damping=1e-6)
        errors.append(float(((found.weight - weight) @ dense).norm()))
        assert errors[-1] <= (2 * found.stats["bound"]) ** 0.5 * (1 + 1e-9)
        pruned.append(found.weight)
        dense, sparse = (weight @ dense).relu(), (found.weight @ sparse).relu()
    assert float((dense - sparse).norm()) <= network_bound(errors, pruned)


def test_network_bound_of_one_layer_is_its_error():
    assert network_bound([0.3], [torch.eye(2)]) == 0.3
    assert network_bound([0.3, 0.1], [torch.eye(2), 2 * torch.eye(2)]) == pytest.approx(0.7)


def test_network_bound_needs_an_error_for_each_weight():
    with pytest.raises(ProblemError, match="one error for each weight"):
        network_bound([0.1, 0.2], [torch.eye(2)])
