"""Solver and refinement classes as values: plain fields, checked options, and the results of `solve` by name."""

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from solver_problems import random_problem

import iobs
from iobs.core.partition import Partition
from iobs.errors import PatternError, ProblemError
from iobs.solvers import (
    ADMM,
    LOBS,
    OBC,
    Exact,
    Magnitude,
    NetTrim,
    Refit,
    ScreenedSwap,
    SparseGPT,
    Swap,
    Wanda,
    require_known_solver,
)
from iobs.solvers.families import GRID_SOLVERS

VALUES = [
    ADMM(budget="best"),
    SparseGPT(block=16),
    OBC(),
    LOBS(),
    NetTrim(refit=False, steps=5),
    Magnitude(),
    Wanda(),
    Exact(limit=5000),
    Refit(),
    Swap(rounds=3),
    ScreenedSwap(candidates=8, passes=2),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_solver_is_a_frozen_dataclass_of_plain_values(value):
    stored = json.loads(json.dumps(dataclasses.asdict(value)))
    assert type(value)(**stored) == value
    assert hash(type(value)(**stored)) == hash(value)
    assert type(value)().__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ADMM(budget="huge"), '"fast", "default" or "best"'),
        (lambda: ADMM(budget=["fast"]), '"fast", "default" or "best"'),
        (lambda: SparseGPT(block=0), "block must be a whole number of at least 1, got 0"),
        (lambda: SparseGPT(block=1.5), "block must be a whole number of at least 1, got 1.5"),
        (lambda: SparseGPT(block="128"), "block must be a whole number of at least 1, got '128'"),
        (lambda: Exact(limit=0), "limit must be a whole number of at least 1"),
        (lambda: Exact(limit=True), "limit must be a whole number of at least 1"),
        (lambda: Swap(rounds=-1), "rounds must be a whole number of at least 0"),
        (lambda: ScreenedSwap(candidates=0), "candidates must be a whole number of at least 1"),
        (lambda: ScreenedSwap(passes=0), "passes must be a whole number of at least 1"),
    ],
)
def test_solver_option_raises_if_not_allowed(make, expected):
    with pytest.raises(ProblemError, match=expected):
        make()


def test_solver_option_may_be_a_numpy_integer():
    assert SparseGPT(block=np.int64(16)) == SparseGPT(block=16)


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("admm", {"budget": "fast"}, ADMM(budget="fast")),
        ("admm", {}, ADMM()),
        ("admm", {"budget": "best"}, ADMM(budget="best")),
        ("sparsegpt", {"block": 16}, SparseGPT(block=16)),
        ("obc", {}, OBC()),
        ("lobs", {}, LOBS()),
        ("nettrim", {"iterations": 5}, NetTrim(iterations=5)),
        ("magnitude", {}, Magnitude()),
        ("wanda", {}, Wanda()),
    ],
)
@pytest.mark.parametrize(("refine", "refinement"), [(None, None), ("refit", Refit()), ("swap", Swap())])
@pytest.mark.parametrize("shape", [(6, 16), (130, 64)])
def test_solve_gives_equal_bits_by_name_and_by_value(shape, name, options, value, refine, refinement):
    if shape == (130, 64) and refine == "swap":
        shape = (20, 32)  # swaps of large layers take seconds
    problem, pattern = random_problem(*shape, dtype=torch.float32), iobs.Unstructured(0.5)
    named = iobs.solve(problem, pattern, name, refine=refine, damping=0.01, **options)
    given = iobs.solve(problem, pattern, value, refine=refinement, damping=0.01)
    assert torch.equal(given.weight, named.weight)
    assert torch.equal(given.mask, named.mask)
    assert given.stats == named.stats


def test_a_solver_needs_no_hash():
    @dataclass
    class Own:
        def __call__(self, problem, pattern):
            return Magnitude()(problem, pattern)

    assert iobs.Recipe(solver=Own()).solver == Own()
    require_known_solver(Own())
    with pytest.raises(ProblemError, match="name or a function"):
        require_known_solver([])


def test_groups_of_several_rows_are_refused():
    """The loops over groups read rows: such masks had wrong counts."""

    class Bands:
        def groups(self, shape):
            return Partition(shape[0] // 2, 2 * shape[1], shape[1])

    with pytest.raises(PatternError, match="within one row"):
        iobs.solve(random_problem(8, 16), Bands())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quadratic": torch.zeros(2, 3)}, "needs an iobs.Quadratic, got Tensor"),
        ({"solver": 3}, "solver must be a name"),
        ({"solver": ADMM}, "solver must be a name"),
        ({"refine": Swap}, "refine must be a name"),
        ({"damping": "a"}, "damping must be a number"),
        ({"pattern": iobs.Rate(4), "solver": ADMM()}, "is for other patterns; choose one of rounding"),
        ({"pattern": iobs.Grid(4), "solver": SparseGPT()}, "is for other patterns; choose one of admm"),
        ({"pattern": iobs.Grid(4), "refine": Swap()}, "is for other patterns; leave it out"),
        ({"pattern": iobs.Groups((0, 1) * 4, 1), "solver": ADMM()}, "is for other patterns"),
        ({"solver": GRID_SOLVERS["gptq"]()}, "is for other patterns"),
    ],
)
def test_solve_refuses_arguments_of_another_kind(arguments, message):
    with pytest.raises(ProblemError, match=message):
        iobs.solve(**{"quadratic": random_problem(4, 8), "pattern": iobs.Unstructured(0.5), **arguments})
