import pytest
import torch

import iobs
from iobs.errors import PatternError, ProblemError


def test_labels_of_equal_and_of_unequal_groups():
    assert iobs.Groups(2, 1).labels(6).tolist() == [0, 0, 1, 1, 2, 2]
    assert iobs.Groups.sizes((1, 3, 2), keep=1).labels(6).tolist() == [0, 1, 1, 1, 2, 2]
    assert iobs.Groups(torch.tensor([1, 0, 1]), 1).labels(3).tolist() == [1, 0, 1]
    assert iobs.Groups([1, 0, 1], 1) == iobs.Groups((1, 0, 1), 1)


@pytest.mark.parametrize(
    ("options", "columns", "kept"),
    [
        ({"keep": 5}, 12, 5),
        ({"sparsity": 0.5}, 12, 6),
        ({"sparsity": 0.3}, 10, 7),
        ({"sparsity": 0.5, "multiple_of": 8}, 172, 88),
        ({"sparsity": 0.48, "multiple_of": 8}, 172, 88),
        ({"sparsity": 0.99, "multiple_of": 16}, 64, 16),
        ({"sparsity": 0.01, "multiple_of": 8}, 172, 168),
        ({"sparsity": 0.0, "multiple_of": 8}, 172, 172),
    ],
)
def test_kept_groups_are_counted_and_aligned(options, columns, kept):
    assert iobs.Groups(1, **options).kept(columns) == kept


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: iobs.Groups(0, 1), "at least one column"),
        (lambda: iobs.Groups(2), "exactly one"),
        (lambda: iobs.Groups(2, 1, sparsity=0.5), "exactly one"),
        (lambda: iobs.Groups(2, sparsity=1.0), "Sparsity"),
        (lambda: iobs.Groups(2, -1), "not negative"),
        (lambda: iobs.Groups(2, 9, multiple_of=8), "no multiple"),
        (lambda: iobs.Groups(2, 8, multiple_of=0), "multiple_of"),
        (lambda: iobs.Groups([0, 2], 1), "without 1"),
        (lambda: iobs.Groups([0.5, 1.0], 1), "index of Groups"),
        (lambda: iobs.Groups("ab", 1), "index of Groups"),
        (lambda: iobs.Groups(3, 1).labels(8), "do not divide"),
        (lambda: iobs.Groups([0, 1], 1).labels(3), "names 2 columns"),
        (lambda: iobs.Groups(2, 5).kept(8), "at most 4"),
        (lambda: iobs.Groups(1, sparsity=0.5, multiple_of=16).kept(8), "fewer than"),
    ],
)
def test_impossible_groups_are_refused(make, match):
    with pytest.raises(PatternError, match=match):
        make()


def test_prune_refuses_groups_before_any_work():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    before = model[0].weight.clone()
    with pytest.raises(PatternError, match=r"iobs\.Structured"):
        iobs.prune(model, [torch.randn(20, 8)], iobs.Groups(2, 2))
    assert torch.equal(model[0].weight, before)


def test_free_bias_equals_one_more_column_that_is_kept():
    inputs = torch.randn(50, 6, dtype=torch.float64) + torch.arange(6)
    outputs = torch.randn(50, 3, dtype=torch.float64) + 5
    bias = iobs.FreeBias(inputs.mean(0), outputs.mean(0), samples=50)
    kept = [0, 2, 3]
    problem = bias.eliminated(iobs.Quadratic(inputs.T @ inputs, outputs.T @ inputs))
    pattern = iobs.Groups([0, 1, 0, 0, 1, 1], 1)
    solution = iobs.solve(problem, pattern, "scores", scores=torch.tensor([1.0, 0]), refine="refit")
    longer = torch.cat([inputs[:, kept], torch.ones(50, 1)], 1)
    expected = torch.linalg.lstsq(longer, outputs).solution.T
    torch.testing.assert_close(solution.weight[:, kept], expected[:, :-1])
    torch.testing.assert_close(bias.best(solution.weight), expected[:, -1])


def test_free_bias_of_a_layer_that_matches_itself():
    inputs = torch.randn(50, 6, dtype=torch.float64) + 3
    weight, own = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    mean = inputs.mean(0)
    bias = iobs.FreeBias(mean, weight @ mean + own)
    centred = bias.eliminated(iobs.Quadratic.at(weight, inputs.T @ inputs / 50))
    outputs = inputs @ weight.T + own
    general = bias.eliminated(iobs.Quadratic(inputs.T @ inputs / 50, outputs.T @ inputs / 50))
    torch.testing.assert_close(centred.linear, general.linear)
    found = iobs.solve(centred, iobs.Groups(2, 2))
    residual = inputs @ found.weight.T + bias.best(found.weight) - outputs
    torch.testing.assert_close(residual.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-10, rtol=0)


def test_free_bias_takes_the_part_of_a_constant_input():
    inputs = torch.randn(50, 4, dtype=torch.float64)
    inputs[:, 1] = 7
    weight = torch.randn(3, 4, dtype=torch.float64)
    mean = inputs.mean(0)
    bias = iobs.FreeBias(mean, weight @ mean)
    solution = iobs.solve(bias.eliminated(iobs.Quadratic.at(weight, inputs.T @ inputs / 50)), iobs.Groups(1, 3))
    torch.testing.assert_close(inputs @ solution.weight.T + bias.best(solution.weight), inputs @ weight.T)


def test_free_bias_refuses_other_shapes():
    problem = iobs.Quadratic.at(torch.ones(2, 3), torch.eye(3))
    with pytest.raises(ProblemError, match="shape"):
        iobs.FreeBias(torch.ones(2), torch.ones(2)).eliminated(problem)
